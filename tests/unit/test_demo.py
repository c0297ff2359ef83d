"""What the demo shows of the spread: counted from a checkpoint, and as text; no torch."""

from __future__ import annotations

import json
import struct

import pytest

from bnb_dispatch_fix.planning import demo
from bnb_dispatch_fix.planning.simulation import Outcome

MIB = 2**20
SHAPES = {
    "model.embed_tokens.weight": [1024, 512],  # 1 MiB in 16 bits
    "model.layers.0.mlp.up_proj.weight": [2048, 1024],  # 1 MiB in 4 bits
    "model.layers.1.mlp.up_proj.weight": [2048, 1024],
    "model.layers.1.input_layernorm.weight": [524288],
    "lm_head.weight": [1024, 512],
}
PLACED = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 2, "lm_head": 7}


@pytest.fixture
def folder(tmp_path):
    header = {"__metadata__": {"format": "pt"}}
    header.update({name: {"dtype": "F16", "shape": shape} for name, shape in SHAPES.items()})
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return tmp_path


def test_loads_are_counted_card_by_card(folder):
    assert demo._loads(folder, Outcome(PLACED, None)) == [2, 0, 2, 0, 0, 0, 0, 1]
    assert demo._loads(folder, Outcome({**PLACED, "lm_head": "cpu"}, None)) == []
    assert demo._loads(folder, Outcome(PLACED, ValueError())) == []


def shown(monkeypatch, capsys, loads):
    def answer(switch):
        return {
            "versions": ["a 1"],
            "applied": [("plan", "one", [1]), ("plan", "other", [1]), ("plan", "one", [1])],
            "error": None,
            "device_map": {"": 0},
            "loads_on_gpus": True,
            "loads": [] if switch == "off" else loads,
        }

    monkeypatch.setattr(demo, "_run_child", answer)
    assert demo.run_demo() == 0
    return capsys.readouterr().out.splitlines()


def test_the_third_part_shows_eight_cards_before_and_with_even(monkeypatch, capsys):
    lines = shown(monkeypatch, capsys, [[2.0, *[0.0] * 7], [0.25] * 8])
    start = lines.index("With `even` on as well: MiB on each GPU")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["before", "2.00", *["0.00"] * 7],
        ["even", *["0.25"] * 8],
    ]
    assert lines.count("  repaired plan of one and other (#1)") == 2  # in either of the two parts


def test_without_loads_there_is_no_third_part(monkeypatch, capsys):
    assert not [line for line in shown(monkeypatch, capsys, []) if "even" in line]
