"""Planned and allocated memory of a real load in nf4 and a real `generate`, on one GPU.

    python tests/release/gpu.py

Runs in the environment at hand, which has to have a CUDA build of torch, transformers, accelerate
and bitsandbytes. Without a GPU it says so, and nothing is measured.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bnb_dispatch_fix

MIB = 2**20
#: Two budgets, in MiB: the model takes a good 180 of them.
BUDGETS = (320, 640)
TOKENS, BATCH = 512, 2
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
#: torch hands out memory in blocks, and cuBLAS keeps a workspace of its own.
TOLERANCE = 1.05
WORKSPACE = 40 * MIB


def missing() -> str | None:
    """Why nothing can be measured here; None where it can."""
    try:
        import bitsandbytes  # noqa: F401
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        return f"{error}"
    return None if torch.cuda.is_available() else "no GPU is seen"


def save(folder: str) -> None:
    """A Llama with a vocabulary of 32000 and eight blocks of 12 million weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).half().save_pretrained(folder)


def measured(folder: str, device_map: dict) -> tuple[int, int]:
    """Bytes allocated by the weights, and the most that a prompt takes besides."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        device_map=device_map,
        torch_dtype=torch.float16,
        quantization_config=BitsAndBytesConfig(**NF4, bnb_4bit_compute_dtype=torch.float16),
    )
    weights = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    ids = torch.ones((BATCH, TOKENS), dtype=torch.long, device="cuda")
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return weights, torch.cuda.max_memory_allocated() - before - weights


def main() -> int:
    reason = missing()
    if reason is not None:
        print(f"nothing measured: {reason}")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for budget in BUDGETS:
            plan = bnb_dispatch_fix.plan(
                folder,
                max_memory={0: budget * MIB},
                quantization_config=NF4,
                dtype="float16",
                context=TOKENS,
                batch=BATCH,
            )
            print(f"{budget} MiB: {plan.verdict}")
            load = plan.room.devices[0]
            weights, besides = measured(folder, plan.device_map)
            for what, planned, seen, more in (
                ("weights", load.placed + load.scales, weights, 0),
                ("context", load.cache + load.working, besides, WORKSPACE),
            ):
                fine = seen <= planned * TOLERANCE + more
                wrong += not fine
                sign = "" if fine else "  MORE THAN PLANNED"
                print(
                    f"  {what}: planned {planned / MIB:.2f} MiB, allocated {seen / MIB:.2f}{sign}"
                )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
