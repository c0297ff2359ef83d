"""A 4-bit model that is really loaded on the CPU says the same with and without the shim."""

from __future__ import annotations

import pytest
from cell import installed
from packaging.version import Version

pytest.importorskip("torch", reason="loads a real model: needs torch")
if Version(installed("bitsandbytes")) < Version("0.49"):
    pytest.skip("bitsandbytes before 0.49 cannot compute on the CPU", allow_module_level=True)

STEPS = ["generate:cpu", "shim", "generate:cpu", "generate:auto"]


def test_same_tokens(in_process):
    without, _, with_shim, automatic = in_process(STEPS)()
    assert without["linear"] == "Linear4bit"
    assert len(without["tokens"][0]) == 16
    assert with_shim == without
    assert automatic == without
