"""A model that lies on the disk as a whole: refused before accelerate 1.15.0, runs with #4083."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from cell import HERE, installed, run
from packaging.version import Version

pytest.importorskip("torch", reason="generates from real checkpoints: needs torch")
pytest.importorskip("transformers", reason="generates from real checkpoints: needs transformers")

ACCELERATE = Version(installed("accelerate") or "0")
TRANSFORMERS = Version(installed("transformers") or "0")
UPSTREAM = Version("1.15.0")
#: 0.20 looks for an accelerator in the map, which has none.
REFUSED = (
    "ValueError: You are trying to offload the whole model to the disk"
    if Version("0.21.0.dev0") <= ACCELERATE
    else "IndexError: list index out of range"
)


@pytest.fixture(scope="module")
def answers():
    """What whole_disk.py printed without and with the shim."""

    def ask(switch):
        output = run([str(HERE / "whole_disk.py")], BNB_DISPATCH_FIX=switch)
        return json.loads(output.splitlines()[-1])

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("off", "on"), pool.map(ask, ("off", "backport"))))


def assert_runs(answer, expected):
    assert answer.get("error") is None
    assert answer["tokens"] == expected
    assert answer["weights"] == ["meta"]
    assert set(answer["device_map"].values()) == {"disk"}


@pytest.fixture(params=["untied", "tied"])
def weights(request):
    return request.param


def skip_where_transformers_never_dispatches():
    if Version("5.0.0.dev0") <= TRANSFORMERS < Version("5.13.0"):
        pytest.skip("transformers 5.0-5.12 do not dispatch a map of one device at all")


def test_accelerate_refuses_without_the_shim(answers, weights):
    if ACCELERATE >= UPSTREAM:
        pytest.skip("accelerate 1.15.0 and newer dispatch such a map")
    assert answers["off"][weights]["dispatch_model"]["error"].startswith(REFUSED)


def test_transformers_is_refused_without_the_shim(answers, weights):
    skip_where_transformers_never_dispatches()
    if ACCELERATE >= UPSTREAM:
        pytest.skip("accelerate 1.15.0 and newer dispatch such a map")
    assert answers["off"][weights]["from_pretrained names"]["error"].startswith(REFUSED)


def test_dispatch_model_gives_the_tokens_of_the_cpu(answers, weights):
    if ACCELERATE >= UPSTREAM:
        pytest.skip('accelerate 1.15.0 writes no weights for the key "" itself')
    found = answers["on"][weights]
    assert_runs(found["dispatch_model"], found["expected"])
    assert found["dispatch_model"]["device_map"] == {"": "disk"}


def test_from_pretrained_gives_the_tokens_of_the_cpu(answers, weights):
    skip_where_transformers_never_dispatches()
    found = answers["on"][weights]
    assert_runs(found["from_pretrained names"], found["expected"])


def test_from_pretrained_with_one_key(answers, weights):
    skip_where_transformers_never_dispatches()
    if Version("4.50.0") <= TRANSFORMERS < Version("5.0.0.dev0"):
        pytest.skip('transformers 4.50-4.57 take "disk" under the key "" for a torch device')
    found = answers["on"][weights]
    assert_runs(found["from_pretrained root"], found["expected"])


# --- code of unknown source, judged by running it ---------------------------------------------


def test_the_probe_agrees_with_the_release():
    from accelerate import big_modeling

    from bnb_dispatch_fix.patching.patches import original_of
    from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk

    probe = probe_whole_disk(original_of(big_modeling.dispatch_model))
    if ACCELERATE >= UPSTREAM:
        assert probe.ruled_out == (4083,), probe.reason
    else:
        assert probe.confirmed == (4083,), probe.reason


def test_the_probe_is_silent(caplog, capfd):
    from accelerate import big_modeling

    from bnb_dispatch_fix.patching.patches import original_of
    from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk

    probe_whole_disk(original_of(big_modeling.dispatch_model))
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("answer", ["raises", "returns"])
def test_a_function_that_does_something_else_is_undecided(answer):
    from bnb_dispatch_fix.patching.probe_disk import probe_whole_disk

    def other(model, device_map, offload_index=None):
        if answer == "raises":
            raise ValueError("no")
        return model

    assert probe_whole_disk(other).undecided == (4083,)


# --- everything else goes to the installed function as it is ----------------------------------


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": 0}, {"a": "disk", "b": "cpu"}, "auto", {}]
)
def test_other_maps_reach_the_installed_function_unchanged(device_map):
    from bnb_dispatch_fix.backport.dispatch import dispatch_model

    seen = []

    def installed(model, device_map, main_device=None, offload_index=None, force_hooks=False):
        seen.append((model, device_map, main_device, offload_index, force_hooks))
        return "answer"

    assert dispatch_model(installed, "model", device_map, force_hooks=None) == "answer"
    assert seen == [("model", device_map, None, None, None)]


def test_the_caller_keeps_the_main_device_and_the_index():
    import torch

    from bnb_dispatch_fix.backport.dispatch import dispatch_model

    seen = {}

    def find_tied_parameters(model):
        return [["0.weight", "1.weight"]]

    def installed(model, device_map, main_device=None, offload_index=None, force_hooks=False):
        seen.update(main_device=main_device, index=offload_index, force=force_hooks)
        return model

    installed.__globals__["find_tied_parameters"] = find_tied_parameters
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to("meta")
        index = {"0.weight": {"safetensors_file": "a.safetensors", "weight_name": "w"}}
        given = dict(index)
        dispatch_model(installed, model, {"": "disk"}, main_device=1, offload_index=given)
    finally:
        del installed.__globals__["find_tied_parameters"]
    assert given == index
    assert seen["main_device"] == 1
    assert seen["force"] is True
    assert seen["index"]["1.weight"] == index["0.weight"]


# --- why it came to that ----------------------------------------------------------------------

WHY = """
import json, logging, sys, tempfile
import bnb_dispatch_fix, transformers
from bnb_dispatch_fix.planning.simulation import build_checkpoint
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("bnb_dispatch_fix").addHandler(Keep())
notes = []
with tempfile.TemporaryDirectory() as folder:
    build_checkpoint(folder)
    try:
        transformers.LlamaForCausalLM.from_pretrained(
            folder, device_map="auto", max_memory={"cpu": 20}, offload_folder=folder + "/offload"
        )
    except Exception as error:
        notes = getattr(error, "__notes__", [str(error)])
print(json.dumps({"notes": notes, "lines": lines}))
"""


@pytest.mark.parametrize("switch", ["backport,explain", "explain", "backport"])
def test_the_budgets_that_led_to_the_disk_are_told(switch):
    """`max_memory={"cpu": 20}` is twenty bytes; told by a note on the error, or else in the log."""
    answer = json.loads(run(["-c", WHY], BNB_DISPATCH_FIX=switch).splitlines()[-1])
    told = [text for texts in answer.values() for text in texts if "20 bytes" in text]
    assert len(told) == (0 if switch == "backport" else 1)
    for text in told:
        assert "max_memory was read as: CPU 20 bytes" in text
        assert "a bare number counts bytes" in text
