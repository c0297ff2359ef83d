"""Planned bytes and loaded bytes side by side; run as a script it prints them for Llama-3-8B.

    python tests/release/true_sizes.py [--write loaded.json | --read loaded.json]

It loads two layers on the CPU, embedding and head with them, and plans all 32; those that were not
loaded are as large as the first. A release that cannot load on the CPU plans with what another has
written. A loaded model is the sum of its parameters and buffers; what bitsandbytes keeps beside a
weight to scale it back is counted apart. Checkpoints hold zeros, so that they are written in no
time.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

import planned
import torch
import transformers
from device_maps import on_devices
from meta import on_meta

from bnb_dispatch_fix.planning.simulation import outcome_of

GIB = 2**30

#: Configurations of public models; those "/ 8" have an eighth of each width, and fewer layers.
SHAPES = {
    "Llama-3-8B": ("Llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "Llama-3-8B, two layers": ("Llama", 128256, 4096, 14336, 2, 32, 8, 128, False),
    "Llama-3-8B / 8": ("Llama", 16032, 512, 1792, 12, 4, 1, 128, False),
    "Gemma-2-27B / 8": ("Gemma2", 32000, 576, 4608, 8, 4, 2, 128, True),
    "Qwen2.5-0.5B": ("Qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
}


def config_of(name):
    family, vocabulary, hidden, ffn, layers, heads, kv_heads, head_dim, tied = SHAPES[name]
    return getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        architectures=[f"{family}ForCausalLM"],
    )


def save(name, folder, weights=True):
    """Write a checkpoint of zeros in fp16, in shards of 2 GB; planning needs no weights."""
    model = f"{SHAPES[name][0]}ForCausalLM"
    config = config_of(name)
    with on_meta():
        empty = getattr(transformers, model)(config).half()
    empty.tie_weights()
    zeros = {
        key: torch.zeros(1, dtype=torch.float16).expand(t.shape)
        for key, t in empty.state_dict().items()
    }
    skipped = {"lm_head.weight"} if config.tie_word_embeddings else set()
    kept = {key: zeros[key] for key in zeros if key not in skipped}
    write_shards(kept if weights else {"model.norm.weight": kept["model.norm.weight"]}, folder)
    config.save_pretrained(folder)


def write_shards(tensors, folder):
    from safetensors.torch import save_file

    shards, size = [[]], 0
    for key, tensor in tensors.items():
        if size + tensor.numel() * 2 > 2e9:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += tensor.numel() * 2
    names = {}
    for index, keys in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        whole = {key: tensors[key].contiguous() for key in keys}
        save_file(whole, Path(folder) / file, {"format": "pt"})
        names.update(dict.fromkeys(keys, file))
    index = {
        "metadata": {"total_size": sum(t.numel() * 2 for t in tensors.values())},
        "weight_map": names,
    }
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def nf4():
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def loaded_bytes(folder):
    """Load in 4-bit on the CPU: ({tensor: bytes}, bytes of the scales beside them)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "cpu"}, quantization_config=nf4(), torch_dtype=torch.float16
    )
    seen, found, scales = set(), {}, 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.numel() * tensor.element_size()
            state = getattr(tensor, "quant_state", None)
            scales += 0 if state is None else state.absmax.numel() * state.absmax.element_size()
    return found, scales


def plan(folder, max_memory, strategy="auto"):
    """(outcome, planned bytes by device) of `from_pretrained` on simulated GPUs."""
    with planned.requests() as requests:
        outcome = outcome_of(
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                device_map=strategy,
                max_memory=dict(max_memory),
                quantization_config=nf4(),
                torch_dtype=torch.float16,
            )
        )
    if outcome.device_map is None or not requests:
        return outcome, {}
    return outcome, requests[-1].units().loads(outcome.device_map)


def with_all_layers(tensors, name):
    """All layers of a shape, each with the bytes of the first."""
    first = {key: size for key, size in tensors.items() if key.startswith("model.layers.0.")}
    layers = {
        key.replace("layers.0.", f"layers.{index}."): size
        for index in range(config_of(name).num_hidden_layers)
        for key, size in first.items()
    }
    return {**tensors, **layers}


# --- as a script ----------------------------------------------------------------------------


def table(tensors, folder, max_memory, share=0.9):
    """Device by device without and with the shim: usable, planned, loaded."""
    import bnb_dispatch_fix

    lines = [
        "| device | usable | without the shim: loaded | with it: planned | with it: loaded |",
        "|---|---|---|---|---|",
    ]
    bnb_dispatch_fix.deactivate()
    without, _ = plan(folder, max_memory)
    before = on_devices(tensors, without.device_map or {"": "refused"})
    bnb_dispatch_fix.activate()
    found, planned = plan(folder, max_memory)
    after = on_devices(tensors, found.device_map)
    for device in max_memory:
        usable = max_memory[device] * share
        over = " (too much)" if device != "cpu" and before.get(device, 0) > usable else ""
        lines.append(
            f"| {device} | {usable / GIB:.3f} | {before.get(device, 0) / GIB:.3f}{over} "
            f"| {planned.get(device, 0) / GIB:.3f} | {after.get(device, 0) / GIB:.3f} |"
        )
    return "\n".join(lines)


def loaded_tensors():
    """{tensor: bytes} of the two layers, loaded here."""
    with tempfile.TemporaryDirectory() as folder:
        save("Llama-3-8B, two layers", folder)
        tensors, scales = loaded_bytes(folder)
    print(f"loaded: {sum(tensors.values()) / GIB:.3f} GiB, scales {scales / GIB:.3f} GiB")
    return tensors


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--write", type=Path)
    arguments.add_argument("--read", type=Path)
    asked = arguments.parse_args()
    logging.disable(logging.WARNING)
    found = json.loads(asked.read.read_text("utf-8")) if asked.read else loaded_tensors()
    if asked.write:
        asked.write.write_text(json.dumps(found), "utf-8")
    tensors = with_all_layers(found, "Llama-3-8B")
    budget = int(tensors["model.embed_tokens.weight"] * 1.02 / 0.9)
    print(f"transformers {transformers.__version__}, Llama-3-8B, nf4, eight equal GPUs, GiB\n")
    with tempfile.TemporaryDirectory() as folder:
        save("Llama-3-8B", folder, weights=False)
        print(table(tensors, folder, {**dict.fromkeys(range(8), budget), "cpu": 64 * GIB}))


if __name__ == "__main__":
    main()
