"""Nothing is called that torch 1.12 lacks; newer torch stands in for it, cut down to what it had.

`named_parameters(remove_duplicate=)` and `torch.device` as a context manager came with 2.0.
"""

from __future__ import annotations

import importlib
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="runs real modules: needs torch")
pytest.importorskip("accelerate", reason="dispatches with accelerate")

import bnb_dispatch_fix
from bnb_dispatch_fix.patching.patches import original_of
from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk

#: One name of the function in every accelerate that is covered; 0.20 has it as transformers' alone.
NAMES = ("accelerate.big_modeling", "transformers.modeling_utils")


def installed_dispatch():
    """The installed accelerate's own function, whatever stands over its name."""
    return original_of(importlib.import_module("accelerate.big_modeling").dispatch_model)


@pytest.fixture
def old_torch(monkeypatch):
    """`named_parameters` as torch 1.12 has it, for the package; accelerate was written for both."""
    from bnb_dispatch_fix.backport import dispatch

    newer = torch.nn.Module.named_parameters

    def named_parameters(self, prefix="", recurse=True):
        return newer(self, prefix, recurse)

    def strictly(tied, model):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "named_parameters", named_parameters)
            return before(tied, model)

    before = dispatch._tied_in_memory
    monkeypatch.setattr(dispatch, "_tied_in_memory", strictly)
    bnb_dispatch_fix.activate()
    yield
    bnb_dispatch_fix.deactivate()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_all_disk_runs(old_torch, name, tmp_path):
    module = importlib.import_module(name)
    if not hasattr(module, "dispatch_model"):
        pytest.skip(f"{name} of this release does not have dispatch_model")
    if name.startswith("accelerate") and module.dispatch_model is installed_dispatch():
        pytest.skip("the backport of #4083 is not on this name here")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    given = torch.ones(1, 4)
    expected = model(given)
    model = module.dispatch_model(model, {"0": "disk", "1": "disk"}, offload_dir=str(tmp_path))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(model(given), expected)


def test_the_toy_model_for_a_whole_disk_tells(monkeypatch):
    function = installed_dispatch()
    with_new = probe_whole_disk(function)
    plain = types.ModuleType("torch")
    plain.__dict__.update(vars(torch))
    plain.device = lambda *args: torch.device(*args).type  # no context manager
    monkeypatch.setitem(sys.modules, "torch", plain)
    with_old = probe_whole_disk(function)
    assert with_old == with_new
    assert with_old.confirmed or with_old.ruled_out, with_old.reason
