"""Units of small modules by hand: what is split, shared, tied, left out, or hardly there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="measures real modules: needs torch")
pytest.importorskip("accelerate", reason="accelerate says which maps it accepts")

from coverage_of import check_coverage
from torch import nn

from bnb_dispatch_fix.model.sizers import sizer_for
from bnb_dispatch_fix.model.units import measure


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
        self.scale = nn.Parameter(torch.empty(4))


def sizes(model, classes=("Block",), **options):
    units = measure(model, no_split_module_classes=classes, sizer=sizer_for(model), **options)
    return units, {unit.name: unit.size for unit in units.units}


def test_a_split_module_gives_its_parameters_children_and_buffers():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.dropout = nn.Dropout()
            self.prompt = nn.Parameter(torch.empty(5))

    model = nn.ModuleDict({"tower": Tower()})
    units, by_name = sizes(model)
    assert by_name == {
        "tower.prompt": 20,
        "tower.blocks.0": 80,
        "tower.blocks.1": 80,
        "tower.mask": 3,
    }
    assert list(by_name) == ["tower.prompt", "tower.blocks.0", "tower.blocks.1", "tower.mask"]
    assert units.facts["tower.mask"].sizes == {"bool": 3}
    check_coverage(model, units)
    assert units.device_map(dict.fromkeys(by_name, 3)) == {"": 3}
    assert units.device_map({**dict.fromkeys(by_name, 0), "tower.blocks.1": 1}) == {
        "tower.prompt": 0,
        "tower.blocks.0": 0,
        "tower.blocks.1": 1,
        "tower.mask": 0,
    }


@pytest.mark.parametrize("classes", [None, "Block", ["Block"], ("Block",), {"Block"}])
def test_forms_of_no_split_module_classes(classes):
    _, by_name = sizes(nn.ModuleList([Block()]), classes)
    whole = {"0": 80}
    assert by_name == ({"0.scale": 16, "0.inner.0": 64} if classes is None else whole)


def test_a_module_under_two_names_is_one_unit():
    block, leaf = Block(), nn.Linear(2, 2, bias=False)
    shared = nn.ModuleDict({"leaf": leaf})
    model = nn.ModuleDict({"a": block, "b": nn.ModuleList([block]), "c": shared, "d": shared})
    units, by_name = sizes(model)
    assert by_name == {"a": 80, "c.leaf": 16}
    assert units.facts["a"].names == ("a", "b.0")
    assert units.facts["c.leaf"].names == ("c.leaf", "d.leaf")
    check_coverage(model, units)
    assert units.device_map({"a": 0, "c.leaf": 1}) == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_a_module_inside_a_block_and_outside_of_it_is_tied():
    block = Block()
    model = nn.ModuleDict({"block": block, "free": nn.Linear(3, 3), "again": block.inner})
    units, by_name = sizes(model)
    assert by_name == {"block": 80, "free": 48, "again.0": 0}
    ties = {unit.name: unit.tie for unit in units.units}
    assert ties["block"] is not None
    assert ties["block"] == ties["again.0"]
    assert ties["free"] is None
    check_coverage(model, units)


def test_towers_tied_layer_by_layer():
    model = nn.ModuleDict({"left": nn.ModuleList(), "right": nn.ModuleList()})
    for _ in range(3):
        left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        right.weight = left.weight
        model["left"].append(left)
        model["right"].append(right)
    units, by_name = sizes(model)
    assert by_name == {
        **{f"left.{index}": 64 for index in range(3)},
        **{f"right.{index}": 0 for index in range(3)},
    }
    ties = {unit.name: unit.tie for unit in units.units}
    assert [ties[f"left.{index}"] for index in range(3)] == [
        ties[f"right.{index}"] for index in range(3)
    ]
    assert len(set(ties.values())) == 3


def test_declared_ties_count_at_the_source_even_if_it_comes_later():
    model = nn.ModuleDict({"head": nn.Linear(8, 4, bias=False), "embed": nn.Embedding(4, 8)})
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    units, by_name = sizes(model)
    assert by_name == {"head": 0, "embed": 128}
    assert units.units[0].tie == units.units[1].tie is not None
    model["head"].weight = model["embed"].weight  # tied in the meantime: same answer
    assert sizes(model)[1] == by_name


def test_a_declared_tie_without_its_source_still_takes_memory():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model.all_tied_weights_keys = {"a.weight": "gone", "b.weight": "gone"}
    units, by_name = sizes(model)
    assert by_name == {"a": 64, "b": 0}
    assert units.units[0].tie == units.units[1].tie is not None


def test_leaves_and_nothing_at_all():
    units, by_name = sizes(nn.Linear(4, 4))
    assert by_name == {"": 80}
    assert units.device_map({"": 0}) == {"": 0}
    check_coverage(nn.Linear(4, 4), units)
    units, by_name = sizes(nn.Sequential(nn.ReLU(), nn.Dropout()))
    assert by_name == units.device_map({}) == {}
    _, by_name = sizes(Block())  # the root itself may not be split
    assert by_name == {"": 80}


def test_placement_can_leave_parameters_out():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.ModuleDict({"rows": nn.Embedding(100, 4), "norm": nn.LayerNorm(4)})
            self.linear = nn.Linear(4, 4, bias=False)

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(4, 4)})
    units, by_name = sizes(model, ["Layer"], no_placement_params=["table.rows.weight"])
    assert by_name == {"layers.0": 96, "layers.1": 96, "head": 80}
    assert units.excluded == {f"layers.{index}.table.rows.weight": 1600 for index in range(2)}
    check_coverage(model, units)
    assert units.device_map(dict.fromkeys(by_name, 1)) == {
        **dict.fromkeys(["layers.0.linear", "layers.0.table.norm"], 1),
        **dict.fromkeys(["layers.1.linear", "layers.1.table.norm"], 1),
        "head": 1,
    }
    assert sizes(model, ["Layer"])[1]["layers.0"] == 1696


def test_a_model_deeper_than_the_recursion_limit():
    model = nn.Linear(2, 2, bias=False)
    for _ in range(3000):
        parent = nn.Module()
        parent._modules["m"] = model
        model = parent
    units, _ = sizes(model, ())
    assert units.total == 16
    assert units.device_map({units.units[0].name: 0}) == {"": 0}
