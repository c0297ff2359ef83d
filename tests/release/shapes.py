"""Models of given sizes, planned by the installed release as it plans them itself.

A shape is an embedding, blocks that may not be split and a head, in bytes once loaded in 4-bit:
blocks are linear layers that bitsandbytes quantizes, embedding and head stay 16-bit. Nothing here
asks the shim for a size.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from meta import on_meta
from packaging.version import Version
from safetensors.torch import save_file
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from bnb_dispatch_fix.planning.simulation import Outcome, outcome_of, simulated_gpus

TRANSFORMERS = Version(importlib.metadata.version("transformers"))
#: From here on planning is a function of its own; before, it is a part of `from_pretrained`.
HAS_PLANNER = Version("4.50.0") <= TRANSFORMERS
#: What the release leaves of each budget of a model that bitsandbytes quantizes.
SHARE = 0.9 if Version("4.33.0") <= TRANSFORMERS else 1.0
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
MIB = 2**20
#: Placement cases from public reports; what fits was found by hand or by brute force.
CASES = json.loads(
    (Path(__file__).parent.parent / "data" / "placement_cases.json").read_text("utf-8")
)
#: Each with each of its strategies, as parameters of a test.
LISTED = [
    pytest.param(case, strategy, id=f"{case['id']}-{strategy}")
    for case in CASES
    for strategy in case["strategies"]
]


@dataclass(frozen=True)
class Shape:
    """Bytes of a model's parts; where it is tied, the head is the embedding's tensor."""

    embed: int
    blocks: tuple
    head: int
    tied: bool = False

    @property
    def sizes(self):
        """Bytes by the name of each part, in model order; what is shared counts once."""
        blocks = {f"layers.{index}": size for index, size in enumerate(self.blocks)}
        return {"embed": self.embed, **blocks, "head": 0 if self.tied else self.head}

    def loads(self, device_map):
        """Bytes on each device; fails where a part is on none, or tied ones are apart."""
        devices = {name: device_of(name, device_map) for name in self.sizes}
        assert not self.tied or devices["embed"] == devices["head"], device_map
        loads = {}
        for name, size in self.sizes.items():
            loads[devices[name]] = loads.get(devices[name], 0) + size
        return loads


def device_of(name, device_map):
    """The device of a part: a split part has several, which no block may have."""
    found = {
        str(device)
        for key, device in device_map.items()
        if key in ("", name) or name.startswith(f"{key}.") or key.startswith(f"{name}.")
    }
    assert len(found) == 1, f"{name} is on {sorted(found) or 'no device'}: {device_map}"
    device = found.pop()
    return int(device) if device.isdigit() else device


def from_mib(facts):
    """A shape from a record of tests/data/placement_cases.json."""
    blocks = [size for count, size in facts["layers"] for _ in range(count)]
    embed = even(facts["embed"] * MIB)
    head = embed if facts["tied"] else even(facts["head"] * MIB)
    return Shape(embed, tuple(math.floor(size * MIB) for size in blocks), head, facts["tied"])


def even(size):
    return 2 * math.floor(size / 2)


class Leaf(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size // 2))


class Block(nn.Module):
    def __init__(self, size, linear):
        super().__init__()
        self.linear = linear(2 * size, 1, bias=False)


class ShapeConfig(PretrainedConfig):
    model_type = "shape"

    def __init__(self, embed=2, blocks=(2,), head=2, tie_word_embeddings=False, **others):
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)
        self.embed, self.blocks, self.head = embed, tuple(blocks), head


def config_of(shape):
    return ShapeConfig(shape.embed, shape.blocks, shape.head, tie_word_embeddings=shape.tied)


class ShapeModel(PreTrainedModel):
    """Built of plain linear layers, or of `linear` where nothing will convert it."""

    config_class = ShapeConfig
    base_model_prefix = "shape"
    _no_split_modules = ["Block"]  # noqa: RUF012  # as models write it
    _tied_weights_keys = (
        {"head.weight": "embed.weight"} if TRANSFORMERS.major >= 5 else ["head.weight"]
    )

    def __init__(self, config, linear=nn.Linear):
        super().__init__(config)
        self.embed = Leaf(config.embed)
        self.layers = nn.ModuleList(Block(size, linear) for size in config.blocks)
        self.head = Leaf(config.head)
        self.post_init()

    def _init_weights(self, module):
        pass

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def quantization(bits=4, **changes):
    return BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **changes)


def quantizer(config=None, pre_quantized=True):
    """The quantizer of the installed release (4-bit), as it is when a model is planned."""
    from transformers.quantizers.auto import AutoHfQuantizer

    found = AutoHfQuantizer.from_config(config or quantization(), pre_quantized=pre_quantized)
    found.modules_to_not_convert = ["head"]
    return found


def build(shape, linear=None, double=False):
    """The model on the meta device, in fp16, converted to 4-bit; `double` quantizes the scales."""
    import bitsandbytes

    four_bit = functools.partial(bitsandbytes.nn.Linear4bit, compress_statistics=double)
    with in_fp16(), on_meta():
        model = ShapeModel(config_of(shape), linear or four_bit)
    if shape.tied and TRANSFORMERS.major < 5:
        model.head.weight = model.embed.weight  # 5.x ties what is declared, after planning
    return model


@contextmanager
def in_fp16():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plan(shape, strategy, max_memory, free=None, **changes):
    """What the installed release does with a 4-bit model of this shape on simulated GPUs.

    `free` is what these report as free, for calls without `max_memory` (bytes).
    """
    if HAS_PLANNER:
        using = quantizer(quantization(**changes))
        model = build(shape, double=changes.get("bnb_4bit_use_double_quant", False))
        return call_planner(model, strategy, max_memory, using, free)
    load = ShapeModel.from_pretrained
    options = {"torch_dtype": torch.float16, "quantization_config": quantization(**changes)}
    given = None if max_memory is None else dict(max_memory)
    with checkpoint(shape) as folder:
        return outcome_of(
            lambda: load(folder, device_map=strategy, max_memory=given, **options), free
        )


def call_planner(model, strategy, max_memory, using, free=None):
    """`_get_device_map`, called as `from_pretrained` of this release calls it."""
    from transformers.modeling_utils import _get_device_map

    tail = {4: (torch.float16, None), 5: ()}[TRANSFORMERS.major]
    given = None if max_memory is None else dict(max_memory)
    with simulated_gpus(free):
        try:
            return Outcome(_get_device_map(model, strategy, given, using, *tail), None)
        except Exception as error:  # noqa: BLE001  # any error is the outcome
            return Outcome(None, error)


@contextmanager
def checkpoint(shape):
    """A folder that can be planned, not loaded: no release looks at weights before it plans."""
    with TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        weights = {"embed.weight": torch.zeros(1, dtype=torch.float16)}
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        yield folder


def usable(max_memory, share=SHARE):
    """Bytes of each accelerator that a planner may use."""
    return {d: size * share for d, size in max_memory.items() if d not in ("cpu", "disk")}


def assert_placed(shape, outcome, max_memory, share=SHARE):
    """Everything on accelerators that the caller listed, within what is usable of their budgets."""
    assert outcome.error is None, outcome.error
    budgets = usable(max_memory, share)
    for device, load in shape.loads(outcome.device_map).items():
        assert load <= budgets[device], (device, load, budgets, outcome.device_map)
