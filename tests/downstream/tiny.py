"""What the libraries are given to load: a small Llama, on GPUs where it has a place or none."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple

from bnb_dispatch_fix.planning.simulation import Planned, build_checkpoint

MIB = 2**20
STRATEGIES = ("auto", "balanced_low_0", "sequential")
#: Like GPUs: how many, and MiB on each. The model takes 2.21 MiB in 4-bit, embedding and head 1 MiB
#: each of it.
GPUS = ((8, 1.4), (2, 1.3), (4, 8), (2, 1.2), (3, 1.1))
HIDDEN, INNER, LAYERS, WORDS = 64, 192, 8, 8192
#: Bytes of a block: nf4 matrices, two norms in float16.
BLOCK = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) // 2 + 2 * HIDDEN * 2
PARTS = {
    "model.embed_tokens": WORDS * HIDDEN * 2,
    **{f"model.layers.{number}": BLOCK for number in range(LAYERS)},
    "model.norm": HIDDEN * 2,
    "lm_head": WORDS * HIDDEN * 2,
}


class Load(NamedTuple):
    """One call of a library's loading function, on simulated GPUs; it ends with `Planned`.

    `parts` are the bytes of what goes to one device whole, `rooms` what each GPU has for them.
    """

    name: str
    call: Callable[[], Any]
    parts: Mapping[str, int]
    rooms: Mapping[int, int]


class PlannedParts(Planned):
    """With what the planned model is made of, where that is known then only."""

    def __init__(self, device_map: dict[str, Any], parts: Mapping[str, int]) -> None:
        super().__init__(device_map)
        self.parts = parts


def tensors_of(model: Any) -> dict[str, int]:
    """Bytes of every parameter: nothing is smaller than these."""
    return {
        name: tensor.numel() * tensor.element_size() for name, tensor in model.named_parameters()
    }


def budgets(count: int, mib: float) -> dict[Any, int]:
    return {**dict.fromkeys(range(count), int(mib * MIB)), "cpu": 2**33}


def rooms(max_memory: Mapping[Any, int], share: float = 0.9) -> dict[int, int]:
    """What is left of each GPU; bitsandbytes takes a tenth."""
    return {gpu: int(size * share) for gpu, size in max_memory.items() if gpu != "cpu"}


def on_all_gpus(
    call: Callable[[str, dict[Any, int]], Any],
    parts: Mapping[str, int],
    *,
    share: float = 0.9,
    prefix: str = "",
) -> Iterator[Load]:
    """A load for each strategy and each set of GPUs; `call` takes the strategy and the budgets."""
    for strategy in STRATEGIES:
        for count, mib in GPUS:
            max_memory = budgets(count, mib)
            name = f"{prefix}{strategy} {count}x{mib}"
            yield Load(name, partial(call, strategy, max_memory), parts, rooms(max_memory, share))


def in_nf4(strategy: str, max_memory: dict[Any, int]) -> dict[str, Any]:
    """What `from_pretrained` is asked for a model in 4-bit."""
    return {"device_map": strategy, "max_memory": max_memory, "quantization_config": nf4()}


def write_checkpoint(folder: Any) -> str:
    """The model, and a tokenizer that knows three words."""
    build_checkpoint(folder, intermediate_size=INNER)
    tokenizer().save_pretrained(folder)
    return str(folder)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    unknown, end = "<unk>", "</s>"
    words = Tokenizer(models.WordLevel({unknown: 0, "a": 1, end: 2}, unk_token=unknown))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=unknown, eos_token=end, pad_token=end
    )


def nf4() -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
