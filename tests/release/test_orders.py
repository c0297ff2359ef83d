"""Every order of importing, activating, undoing and reloading, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cell import TRANSFORMERS, installed
from own_process import answers_of

pytestmark = pytest.mark.skipif(
    installed("torch") is None, reason="the planners cannot be imported: no torch"
)

MODULE = (
    "transformers.modeling_utils"
    if TRANSFORMERS.major < 5
    else "transformers.integrations.accelerate"
)
SHIM = "import bnb_dispatch_fix as shim"
#: accelerate.utils.bnb came with 0.21; modules are named once.
ACCELERATE = ["accelerate.big_modeling", "accelerate.utils.bnb"]
if (installed("accelerate") or "").startswith("0.20."):
    ACCELERATE.pop()
TARGETS = "import " + ", ".join(dict.fromkeys([*ACCELERATE, "transformers.modeling_utils", MODULE]))
LOOK = "answer(eval(STATES))"
#: Defines what the scripts share; imports nothing that is under test.
HEAD = """
import importlib, logging, sys, threading, warnings
warnings.simplefilter("ignore")
logging.disable()
answers = []
answer = answers.append
STATES = "{patch.id: [patch.state, patch.fixes] for patch in shim.status().patches}"

def stored():
    from bnb_dispatch_fix.patching.patches import found_at, locate
    return {
        patch.id: found_at(*locate(sys.modules[patch.module], patch.attribute))
        for patch in shim.status().patches if patch.module in sys.modules
    }

def in_child(method, *lines):
    import multiprocessing
    code = chr(10).join([*lines, "import sys; sys.found = " + STATES])
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.apply(exec, (code, {}))  # no function of this script exists in a spawned child
        return pool.apply(eval, ("__import__('sys').found",))
"""

SCRIPTS = {
    "shim, targets": [SHIM, TARGETS, LOOK],
    "targets, shim": [TARGETS, SHIM, LOOK],
    "names of the targets, shim": [
        "from transformers import AutoModelForCausalLM, PreTrainedModel",
        "from accelerate.utils import get_balanced_memory",
        SHIM,
        TARGETS,
        LOOK,
    ],
    "shim twice, names of the targets, activate twice": [
        SHIM,
        "import bnb_dispatch_fix; shim.activate()",
        "from transformers import PreTrainedModel; from accelerate import infer_auto_device_map",
        TARGETS,
        "shim.activate(); shim.activate()",
        LOOK,
    ],
    "packages, shim, targets": ["import transformers, accelerate", SHIM, TARGETS, LOOK],
    "undo, redo": [
        "import os; os.environ['BNB_DISPATCH_FIX'] = 'off'",
        SHIM,
        TARGETS,
        "before = stored()",
        "del os.environ['BNB_DISPATCH_FIX']",
        "shim.activate()",
        LOOK,
        "shim.deactivate()",
        "after = stored(); answer(before.keys() == after.keys())",
        "answer([name for name in before if before[name] is not after[name]])",
        "answer(sorted({patch.state for patch in shim.status().patches}))",
        "shim.deactivate(); shim.activate()",
        LOOK,
    ],
    "undone before the import, redone after it, reload": [
        SHIM,
        "shim.deactivate()",
        TARGETS,
        "answer(sorted({patch.state for patch in shim.status().patches}))",
        "shim.activate()",
        f"importlib.reload(sys.modules[{MODULE!r}])",
        f"answer({{p.id: p.state for p in shim.status().patches if p.module == {MODULE!r}}})",
        "shim.activate()",
        LOOK,
    ],
    "two threads": [
        "def load(code): exec(code, globals())",
        f"both = [threading.Thread(target=load, args=(code,)) for code in ({SHIM!r}, {TARGETS!r})]",
        "for thread in both: thread.start()",
        "for thread in both: thread.join()",
        "import transformers.models.gpt2.modeling_gpt2",
        LOOK,
    ],
    "in a spawned child": [f"answer(in_child('spawn', {SHIM!r}, {TARGETS!r}))"],
    "shim, in a forked child": [SHIM, f"answer(in_child('fork', {SHIM!r}, {TARGETS!r}))"],
    "shim, targets, in a forked child": [SHIM, TARGETS, f"answer(in_child('fork', {SHIM!r}))"],
    "while another thread has half of it": [
        f"other = threading.Thread(target=exec, args=({TARGETS!r}, globals())); other.start()",
        f"while other.is_alive() and {MODULE!r} not in sys.modules: pass",
        SHIM,
        "other.join()",
        "import transformers.models.gpt2.modeling_gpt2",
        LOOK,
    ],
}


@pytest.fixture(scope="module")
def answers():
    """What each script answered."""
    scripts = ["\n".join([HEAD, *steps]) for steps in SCRIPTS.values()]
    return dict(zip(SCRIPTS, answers_of(scripts)))


@pytest.fixture(scope="module")
def expected(answers):
    [states] = answers["shim, targets"]
    return states


def test_the_usual_order_patches_everything(expected):
    assert {state for state, _ in expected.values()} <= {"applied", "already-fixed"}, expected
    assert "applied" in {state for state, _ in expected.values()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_order_ends_in_the_same_states(answers, expected, name):
    assert answers[name][-1] == expected


def test_undo_restores_the_very_same_objects(answers, expected):
    applied, same_seams, changed, states, _ = answers["undo, redo"]
    assert applied == expected
    assert same_seams
    assert changed == []
    assert states == ["disabled"]


def test_what_is_undone_before_the_import_is_not_patched_by_it(answers):
    assert answers["undone before the import, redone after it, reload"][0] == ["disabled"]


def test_a_reload_is_told(answers, expected):
    after_reload = answers["undone before the import, redone after it, reload"][1]
    assert after_reload
    matrix = yaml.safe_load((Path(__file__).parents[2] / "compat_matrix.yaml").read_text("utf-8"))
    home = {seam["id"]: seam["implementation"].partition(".")[0] for seam in matrix["seams"]}
    for seam, state in after_reload.items():
        before, _ = expected[seam]
        # What the module takes from accelerate it takes again as it stands there: patched.
        gone = before == "applied" and home[seam] == "transformers"
        assert state == ("replaced" if gone else before), seam
