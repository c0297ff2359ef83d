"""One small model for each kind of input that planners get wrong; sizes and answers by hand.

Sizes are in thousands of bytes once loaded in 4-bit: `linear(6)` takes 6,000. A kind says what is
usable of each accelerator and whether everything has a place there; `checked` sees to it that a
device map respects budgets, ties and blocks, from the tensors alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from device_maps import place
from meta import on_meta
from torch import nn

K = 1000


class Plain(nn.Module):
    """A leaf that stays in 16-bit."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(int(size * K) // 2, dtype=torch.float16))


def linear(size):
    import bitsandbytes

    return bitsandbytes.nn.Linear4bit(int(size * K) * 2, 1, bias=False)


class Block(nn.Module):
    """May not be split."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Outer(Block):
    """May not be split either, and holds blocks."""


class Tower(Block):
    """May be split."""


class Parameters(Tower):
    """A tower with a parameter of its own."""

    def __init__(self, size, *parts):
        super().__init__(*parts)
        self.prompt = nn.Parameter(torch.empty(int(size * K) // 2, dtype=torch.float16))


class Buffers(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        for index, size in enumerate(sizes):
            table = torch.empty(int(size * K) // 2, dtype=torch.float16)
            setattr(self, f"part{index}", nn.Module())
            getattr(self, f"part{index}").register_buffer("table", table)


@dataclass(frozen=True)
class Kind:
    """`usable` is in thousands of bytes by device; `ties` are (copy, source) names of tensors.

    `fp32` names the modules that are kept in fp32, where they take twice their size.
    """

    make: object
    usable: dict
    classes: tuple = ("Block",)
    ties: tuple = ()
    fits: bool = True
    no_placement: tuple = ()
    fp32: tuple = ()


def named(**parts):
    return nn.ModuleDict(parts)


def shared_module():
    shared = linear(2)
    return named(one=Block(linear(2), shared), two=Block(linear(2), shared), rest=Plain(1))


def towers(count, leaf=linear):
    """Two towers; each layer of the one is to be tied to the same layer of the other."""
    return named(
        left=Tower(*(leaf(2) for _ in range(count))),
        right=Tower(*(leaf(2) for _ in range(count))),
    )


def pairs(count):
    return tuple(
        (f"right.parts.{index}.weight", f"left.parts.{index}.weight") for index in range(count)
    )


def table_block():
    return Block(Plain(10), linear(2))


KINDS = {
    # Blocks that may not be split.
    "one instance": Kind(
        lambda: named(embed=Plain(2), block=Block(linear(3), linear(3)), head=Plain(2)),
        {0: 7, 1: 4},
    ),
    "no instance": Kind(
        lambda: named(embed=Plain(2), block=Block(linear(3), linear(3)), head=Plain(2)),
        {0: 7, 1: 4},
        ("Absent", "Block"),
    ),
    "only absent classes": Kind(
        lambda: named(embed=Plain(2), tower=Tower(linear(3), linear(3)), head=Plain(2)),
        {0: 6, 1: 5},
        ("Absent",),
    ),
    "nested": Kind(
        lambda: named(embed=Plain(2), outer=Outer(Block(linear(3)), Block(linear(3)), Plain(1))),
        {0: 4, 1: 8},
        ("Block", "Outer"),
    ),
    "blocks that share a module": Kind(shared_module, {0: 7, 1: 1}),
    "no classes": Kind(
        lambda: named(one=Block(linear(3), linear(3)), two=Block(linear(3), linear(3))),
        {0: 4, 1: 4, 2: 4, 3: 4},
        (),
    ),
    # Models that are hardly any.
    "one leaf": Kind(lambda: linear(6), {0: 4, 1: 7}),
    "buffers only": Kind(lambda: Buffers(3, 3), {0: 4, 1: 4}),
    # Ties.
    "head and embedding": Kind(
        lambda: named(embed=Plain(4), one=Block(linear(3)), two=Block(linear(3)), head=Plain(4)),
        {0: 4.5, 1: 6.5},
        ties=(("head.weight", "embed.weight"),),
    ),
    "towers tied in pairs": Kind(lambda: towers(4), {0: 5, 1: 5}, ties=pairs(4)),
    "three-way": Kind(
        lambda: named(one=Plain(4), two=Plain(4), block=Block(linear(4)), three=Plain(4)),
        {0: 5, 1: 5},
        ties=(("two.weight", "one.weight"), ("three.weight", "one.weight")),
    ),
    "tied across the border of a block": Kind(
        lambda: named(
            embed=Plain(4), block=Block(linear(3), Plain(4)), other=Block(linear(3)), rest=Plain(2)
        ),
        {0: 7.5, 1: 5.5},
        ties=(("block.parts.1.weight", "embed.weight"),),
    ),
    # Embedding and positions are 8 each once loaded; who counts 4 puts both on device 0.
    "tied and kept in fp32": Kind(
        lambda: named(
            embed=Plain(4),
            positions=Plain(4),
            one=Block(linear(3)),
            two=Block(linear(3)),
            head=Plain(4),
        ),
        {0: 12.5, 1: 11.5},
        ties=(("head.weight", "embed.weight"),),
        fp32=("embed", "positions", "head"),
    ),
    # Parameters outside of any leaf.
    "parameters of a split module": Kind(
        lambda: named(tower=Parameters(2, linear(3), linear(3)), head=Plain(1)), {0: 5, 1: 4}
    ),
    "parameters of the root": Kind(lambda: Parameters(2, linear(3), linear(3)), {0: 5, 1: 4}),
    # Device ids.
    "gaps": Kind(lambda: named(a=Plain(4), b=Block(linear(4)), c=Plain(4)), {0: 9, 3: 5}),
    "not from 0": Kind(lambda: named(a=Plain(4), b=Block(linear(4)), c=Plain(4)), {1: 9, 2: 5}),
    "zeros in between": Kind(
        lambda: named(a=Plain(4), b=Block(linear(4)), c=Plain(4)), {0: 9, 1: 0, 2: 5}
    ),
    "unsorted": Kind(lambda: named(a=Plain(4), b=Block(linear(4)), c=Plain(4)), {7: 5, 2: 5, 4: 5}),
    "one usable device": Kind(
        lambda: named(a=Plain(4), b=Block(linear(4)), c=Plain(4)), {0: 0, 1: 13, 2: 0}
    ),
    # Budgets.
    "a small device after a large one": Kind(
        lambda: named(a=Plain(1), b=Tower(*(Block(linear(2)) for _ in range(10))), c=Plain(1)),
        {0: 23, 1: 2.5},
    ),
    "a leaf larger than any budget": Kind(
        lambda: named(a=Plain(1), b=Block(linear(9)), c=Block(linear(1))),
        {0: 8, 1: 8},
        fits=False,
    ),
    "a huge leaf in front": Kind(
        lambda: named(tower=Plain(9), b=Tower(*(Block(linear(1)) for _ in range(12)))),
        {0: 10, 1: 7, 2: 7},
    ),
    # Parameters that need no place (transformers 5.16 and newer).
    "a no-placement table": Kind(
        lambda: named(embed=Plain(0.5), one=table_block(), two=table_block()),
        {0: 3, 1: 3},
        no_placement=("parts.0.weight",),
    ),
}


def build(kind, declare):
    """The model on the meta device; `declare` ties as transformers 5 does, by name only."""
    with on_meta():
        model = kind.make()
    for copy, source in () if declare else kind.ties:
        owner, _, leaf = copy.rpartition(".")
        from_owner, _, from_leaf = source.rpartition(".")
        weight = getattr(model.get_submodule(from_owner), from_leaf)
        setattr(model.get_submodule(owner), leaf, weight)
    model.all_tied_weights_keys = dict(kind.ties) if declare else {}
    model.dtype = torch.float16
    model._keep_in_fp32_modules = list(kind.fp32)
    model._no_split_modules = list(kind.classes)
    model._get_no_split_modules = lambda device_map: list(kind.classes)
    if kind.no_placement:
        model._no_placement_params = set(kind.no_placement)
    return model


def checked(kind, model, device_map):
    """Fails unless all is covered, together what must be, and within what is usable."""
    sources = dict(kind.ties)
    home, loads = {}, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = place(name, device_map)
        if device is None and any(name.endswith(f".{part}") for part in kind.no_placement):
            continue
        assert device is not None, f"{name} has no place in {device_map}"
        source = id(tensor) if name not in sources else sources[name]
        for tie in {name, source}:
            assert home.setdefault(tie, device) == device, (
                f"{name} is apart from what it is tied to"
            )
        if name not in sources:
            quantized = type(tensor).__name__ == "Params4bit"
            element = 0.5 if quantized else 4 if name.partition(".")[0] in kind.fp32 else 2
            loads[device] = loads.get(device, 0) + tensor.numel() * element
    for whole in blocks(kind, model):
        found = {place(name, device_map) for name in whole} - {None}
        assert len(found) <= 1, f"{whole} are apart in {device_map}"
    for device, load in loads.items():
        assert load <= math.floor(kind.usable.get(device, 0) * K), (device, load, device_map)


def blocks(kind, model):
    """The names of the tensors of each block; without those that need no place."""
    for name, module in model.named_modules():
        if type(module).__name__ in kind.classes and not kind.no_placement:
            yield [f"{name}.{leaf}" for leaf, _ in module.named_parameters()]
