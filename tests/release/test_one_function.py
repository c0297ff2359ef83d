"""Names that lead to one function lead to one wrapper with the shim, in real releases."""

from __future__ import annotations

import pytest
from cell import installed
from own_process import answers_of

pytestmark = pytest.mark.skipif(
    installed("torch") is None, reason="the planners cannot be imported: no torch"
)

SHIM = "import bnb_dispatch_fix as shim"
HEAD = """
import importlib, logging, pkgutil, sys, tempfile, warnings
warnings.simplefilter("ignore")
logging.disable()
answers = []
answer = answers.append
NAMES = ("get_balanced_memory", "dispatch_model", "infer_auto_device_map", "_get_device_map",
         "get_quantized_model_device_map")

def load_all():
    import accelerate, transformers.integrations, transformers.modeling_utils
    for package in (accelerate, transformers.integrations):
        path = vars(package).get("__path__", ())  # transformers.integrations is a file until 4.32
        for _, name, _ in pkgutil.walk_packages(path, package.__name__ + "."):
            if ".commands" in name or ".test_utils" in name or name.endswith("memory_utils"):
                continue  # command lines; a module that warns that it has moved
            try:
                importlib.import_module(name)
            except Exception:  # needs a package that is not here
                continue

def groups():
    # Of each name the modules that hold it, by the object that they hold.
    found = {}
    for module in sorted(sys.modules):
        if module.partition(".")[0] in ("transformers", "accelerate"):
            variables = vars(sys.modules[module])
            for name in NAMES:
                if name in variables:
                    found.setdefault((name, id(variables[name])), []).append(module)
    return sorted([name, *modules] for (name, _), modules in found.items())

def kinds():
    own = {"transformers.integrations.accelerate.infer_auto_device_map"}
    return sorted({
        type(vars(module)[name]).__name__
        for key, module in list(sys.modules.items())
        if key.partition(".")[0] in ("transformers", "accelerate")
        for name in NAMES
        if name in vars(module) and key + "." + name not in FIXED and key + "." + name not in own
    })

def fixed():
    return [p.module + "." + p.attribute for p in shim.status().patches if p.state != "applied"]
"""
#: As unsloth does it: the function below the class method is kept, and called in a new one.
KEPT = """
from transformers import PreTrainedModel
kept = PreTrainedModel.from_pretrained.__func__
before = vars(PreTrainedModel)["from_pretrained"]
def around(function):
    return classmethod(lambda cls, *a, **k: function(cls, *a, **k))
PreTrainedModel.from_pretrained = around(kept)

from bnb_dispatch_fix.model import load
class Reached(Exception): pass
class Config:
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        raise Reached([(noted.device_map, noted.max_memory) for noted in load._loads.running])
class Model(PreTrainedModel):
    config_class = Config
    def __init__(self): pass
try:
    Model.from_pretrained(tempfile.mkdtemp(), device_map="auto", max_memory={0: 1})
except Reached as reached:
    answer(reached.args[0])
[patch] = [p for p in shim.status().patches if p.attribute.endswith("from_pretrained")]
answer([patch.state, "wraps our wrapper, which still works" in patch.reason])
shim.deactivate()
PreTrainedModel.from_pretrained = before
shim.deactivate()
answer(type(PreTrainedModel.from_pretrained.__func__).__name__)
"""
SCRIPTS = {
    "without": [HEAD, "load_all(); answer(groups())"],
    "first": [HEAD, SHIM, "load_all(); answer(groups()); FIXED = fixed(); answer(kinds())"],
    "last": [
        HEAD,
        f"load_all(); {SHIM}; answer(groups()); FIXED = fixed(); answer(kinds())",
        "answer(list(shim.status().holders))",
        "shim.deactivate(); FIXED = []; answer(kinds()); answer(groups())",
    ],
    "kept": [HEAD, SHIM, KEPT],
}


@pytest.fixture(scope="module")
def answers():
    return dict(zip(SCRIPTS, answers_of(["\n".join(steps) for steps in SCRIPTS.values()])))


@pytest.mark.parametrize("order", ["first", "last"])
def test_what_was_one_function_is_one_wrapper_under_every_name(answers, order):
    [without] = answers["without"]
    grouped, kinds, *_ = answers[order]
    assert len(without) >= 3
    assert grouped == without
    assert kinds == ["PatchedFunction"]


def test_nobody_of_upstream_holds_the_old_function(answers):
    assert answers["last"][2] == []


def test_undone_under_every_name(answers):
    assert answers["last"][3:] == [["function"], *answers["without"]]


def test_what_func_gives_leads_through_the_shim(answers):
    noted, state, after = answers["kept"]
    assert noted == [("auto", {0: 1})]
    assert state == ["replaced", True]
    assert after == "function"
