"""Activation in every order, on small packages; each order in a Python of its own."""

from __future__ import annotations

import itertools
import shutil

import pytest
from fakes import (
    BACKPORTED,
    PLAN,
    SEAM,
    fake_packages,
    finished_python,
    run_python,
    shim_with,
    write_files,
)

SHIM = "import bnb_dispatch_fix"
TARGETS = [
    "import transformers",
    "import transformers.integrations.accelerate",
    "from transformers.integrations.accelerate import get_balanced_memory as kept",
    "import accelerate",
]
METADATA = {"transformers-5.12.1.dist-info/METADATA": "Name: transformers\nVersion: 5.12.1"}
CHECK = "print(plan(), [state for state, _ in state()])"
APPLIED = f"{BACKPORTED} ['applied']"


def program(*steps):
    return "\n".join([SHIM, PLAN, *steps])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shim_first", [True, False])
@pytest.mark.parametrize("again", ["", "import bnb_dispatch_fix", "bnb_dispatch_fix.activate()"])
def test_either_may_come_first_and_the_shim_twice(tmp_path, target, shim_first, again):
    folder = fake_packages(tmp_path)
    steps = [SHIM, target] if shim_first else [target, SHIM]
    code = "\n".join([*steps, again or "pass", PLAN, CHECK])
    finished = finished_python("-c", code, paths=(folder,))
    assert finished.stdout.splitlines() == [APPLIED]
    too_late = ["__main__.kept"] if target.endswith("as kept") and not shim_first else []
    assert [line.partition(":")[0] for line in finished.stderr.splitlines()] == too_late


@pytest.mark.parametrize("steps", list(itertools.permutations(["activate", "deactivate"], 2)))
@pytest.mark.parametrize("when", range(3))
def test_what_is_asked_for_before_the_target_is_imported_counts(tmp_path, steps, when):
    """The tripwire must not overrule it later."""
    folder = fake_packages(tmp_path)
    calls = [f"bnb_dispatch_fix.{step}()" for step in steps]
    calls.insert(when, "import transformers.integrations.accelerate")
    on = steps[-1] == "activate"
    expected = f"{BACKPORTED} ['applied']" if on else "installed ['disabled']"
    assert run_python(program(*calls, CHECK), folder) == [expected]


def test_features_asked_for_before_the_import_are_kept(tmp_path):
    folder = fake_packages(tmp_path)
    steps = ["bnb_dispatch_fix.activate(['rescue'])", CHECK, "bnb_dispatch_fix.activate()", CHECK]
    assert run_python(program(*steps), folder) == ["installed ['disabled']", APPLIED]


def test_status_before_anything_is_imported_is_pending(tmp_path):
    folder = fake_packages(tmp_path)
    steps = ["print([state for state, _ in state()])", "import sys; print('torch' in sys.modules)"]
    write_files(
        folder, {"transformers-5.12.1.dist-info/METADATA": "Name: transformers\nVersion: 5.12.1"}
    )
    assert run_python(program(*steps, CHECK), folder) == ["['pending']", "False", APPLIED]


def test_undo_and_redo_bring_back_the_same_objects(tmp_path):
    folder = fake_packages(tmp_path)
    steps = """
import transformers.integrations.accelerate as planner
wrapper = planner.get_balanced_memory
bnb_dispatch_fix.deactivate()
original = planner.get_balanced_memory
print(type(original).__name__, plan(), wrapper(None, {0: 1000, 1: 1000}))
bnb_dispatch_fix.activate()
print(planner.get_balanced_memory is wrapper, wrapper(None, {0: 1000, 1: 1000}))
bnb_dispatch_fix.deactivate()
bnb_dispatch_fix.deactivate()
print(planner.get_balanced_memory is original, original is wrapper.__wrapped__)
"""
    assert run_python(program(steps), folder) == [
        "function installed installed",
        f"True {BACKPORTED}",
        "True True",
    ]


def test_a_reload_is_told_and_activate_applies_again(tmp_path):
    folder = fake_packages(tmp_path)
    steps = """
import importlib, transformers.integrations.accelerate as planner
importlib.reload(planner)
print(plan(), state()[0][0], "call activate()" in state()[0][1])
bnb_dispatch_fix.activate()
"""
    assert run_python(program(steps, CHECK), folder) == ["installed replaced True", APPLIED]


def test_a_module_that_is_deleted_and_imported_again_is_patched_again(tmp_path):
    folder = fake_packages(tmp_path)
    steps = """
import sys, transformers.integrations.accelerate as old
for name in [name for name in sys.modules if name.startswith("transformers")]:
    del sys.modules[name]
import transformers.integrations.accelerate as new
print(old is new, plan(), [state for state, _ in state()])
bnb_dispatch_fix.deactivate()
print([module.get_balanced_memory(None, {0: 1000, 1: 1000}) for module in (old, new)])
bnb_dispatch_fix.activate()
"""
    assert run_python(program(steps, CHECK), folder) == [
        f"False {BACKPORTED} ['applied']",
        "['installed', 'installed']",
        APPLIED,
    ]


def test_a_failing_import_that_is_tried_again(tmp_path):
    folder = fake_packages(tmp_path)
    broken = folder / "transformers" / "utils.py"
    broken.write_text("raise ImportError('no tokenizers')")
    steps = f"""
try:
    import transformers
except ImportError as error:
    print(error)
open({str(broken)!r}, "w").close()
import importlib; importlib.invalidate_caches()
"""
    assert run_python(program(steps, CHECK), folder) == ["no tokenizers", APPLIED]


@pytest.mark.parametrize(
    "place", ["transformers/__init__.py", "transformers/integrations/accelerate.py"]
)
def test_imported_while_the_target_is_half_imported(tmp_path, place):
    folder = fake_packages(tmp_path)
    path = folder / place
    path.write_text("import bnb_dispatch_fix\n" + path.read_text())
    more = "import transformers.integrations.accelerate, transformers.integrations"
    write_files(folder, {"transformers/later.py": ""})
    code = "\n".join([more, "import transformers.later", SHIM, PLAN, CHECK])
    assert run_python(code, folder) == [APPLIED]


def test_strict_raises_for_what_is_missing_and_only_for_that(tmp_path):
    folder = fake_packages(tmp_path, planner="def get_balanced_memory(other): pass\n")
    steps = """
bnb_dispatch_fix.activate(strict=True)
import transformers.integrations.accelerate
try:
    bnb_dispatch_fix.activate(strict=True)
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    code = program("import logging; logging.disable()", steps)
    [line] = run_python(code, folder)
    assert line.startswith(
        "ActivationError transformers.integrations.accelerate.get_balanced_memory is skipped"
    )


def test_an_unknown_feature_is_the_callers_error(tmp_path):
    folder = fake_packages(tmp_path)
    steps = """
try:
    bnb_dispatch_fix.activate("backprot")
except ValueError as error:
    print(error)
"""
    [line] = run_python(program(steps), folder)
    assert "backprot is unknown" in line


class TestStrict:
    STRICT = """
try:
    bnb_dispatch_fix.activate(strict=True)
    print("complete")
except RuntimeError as error:
    print(error)
"""

    def test_what_is_not_imported_yet_is_no_failure(self, tmp_path):
        folder = fake_packages(tmp_path)
        write_files(folder, METADATA)
        lines = run_python(program(self.STRICT, "print(state()[0][0])", CHECK), folder)
        assert lines == ["complete", "pending", APPLIED]

    def test_what_is_imported_and_not_patched_is(self, tmp_path):
        """Whatever kept it from being patched."""
        folder = fake_packages(tmp_path)
        steps = """
from bnb_dispatch_fix import activation
activation._board._patch = lambda seam, module: None
import transformers.integrations.accelerate
"""
        [line] = run_python(program(steps, self.STRICT), folder)
        assert line.startswith(
            "transformers.integrations.accelerate.get_balanced_memory is pending"
        )

    def test_a_release_that_is_too_old_is(self, tmp_path):
        folder = fake_packages(tmp_path)
        write_files(folder, {"transformers/__init__.py": '__version__ = "4.29.2"'})
        [line] = run_python(program("import transformers", self.STRICT), folder)
        assert "transformers 4.29.2 is not covered; expected >=5" in line


class TestVersions:
    """Absence that is to be expected is a state, not a warning; the code decides about the rest."""

    @pytest.mark.parametrize(
        "version, state, words",
        [
            ("'5.12.1+cu121'", "applied", "transformers 5.12.1+cu121 lacks #47203, #47211"),
            ("'5.12.0.dev0'", "applied", "transformers 5.12.0.dev0 lacks #47203, #47211"),
            ("'unknown'", "applied", "transformers of version 'unknown' lacks #47203, #47211"),
            ("''", "applied", "transformers of version '' lacks #47203, #47211"),
            ("None", "applied", "transformers of unknown version lacks #47203, #47211"),
            ("object()", "applied", "transformers of unknown version lacks #47203, #47211"),
            ("'4.29.2'", "skipped", "4.29.2 is not covered; expected >=5; nothing is patched"),
        ],
    )
    def test_one_clear_line(self, tmp_path, version, state, words):
        folder = fake_packages(tmp_path)
        write_files(folder, {"transformers/__init__.py": f"__version__ = {version}"})
        [line] = run_python(program("plan()", "print(*state()[0], sep='|')"), folder)
        assert line.startswith(f"{state}|")
        assert words in line

    @pytest.mark.parametrize("version", ["unknown", "", "5.x", "5.12.1.post"])
    def test_a_version_that_nobody_can_read_is_not_taken_for_a_fixed_one(self, tmp_path, version):
        folder = fake_packages(tmp_path)
        name = "transformers-5.12.1.dist-info/METADATA"
        write_files(folder, {name: f"Name: transformers\nVersion: {version}"})
        steps = "print(bnb_dispatch_fix.status().complete, len(state()))"
        assert run_python(program(steps, CHECK), folder) == ["False 1", APPLIED]

    @pytest.mark.parametrize(
        "order", [("import transformers", SHIM), (SHIM, "import transformers")]
    )
    def test_nothing_is_touched_where_one_of_both_is_too_old(self, tmp_path, order):
        """The other would take what is patched in this one, and be patched in half."""
        fake_packages(tmp_path)
        write_files(
            tmp_path,
            {
                "accelerate/__init__.py": '__version__ = "0.19.0"',
                "accelerate/utils.py": "def get_balanced_memory(): pass",
            },
        )
        older = {"id": "other", "package": "accelerate", "versions": ">=0.20.0.dev0"}
        shim_with(tmp_path, [SEAM, {**SEAM, **older, "module": "accelerate.utils"}])
        steps = [*order, "import accelerate.utils", PLAN, "print(plan(), state())"]
        finished = finished_python("-c", "\n".join(steps), cwd=tmp_path)
        reason = "accelerate 0.19.0 is not covered; expected >=0.20.0; nothing is patched"
        assert finished.stdout == f"installed {[('skipped', reason)] * 2}\n", finished.stderr
        assert finished.stderr == ""

    def test_no_accelerate_where_transformers_would_take_a_function_of_it(self, tmp_path):
        fake_packages(tmp_path)
        shutil.rmtree(str(tmp_path / "accelerate"))
        taken = {"id": "taken", "attribute": "dispatch_model"}
        taken["implementation"] = "accelerate.dispatch_model"
        shim_with(tmp_path, [SEAM, {**SEAM, **taken, "fixes": [4083]}])
        code = program("plan()", "print(*state()[1], bnb_dispatch_fix.status().complete)")
        finished = finished_python("-c", code, cwd=tmp_path)
        where = "transformers.integrations.accelerate has no dispatch_model"
        assert finished.stdout == f"skipped {where}: accelerate is not installed True\n"
        assert finished.stderr == ""

    def test_a_stand_in_for_transformers(self, tmp_path):
        """As the builders of documentation make it: modules by hand, with nothing in them."""
        write_files(tmp_path, METADATA)
        code = f"""
import sys, types
for name in ("transformers", "transformers.integrations", "transformers.integrations.accelerate"):
    sys.modules[name] = types.ModuleType(name)
{SHIM}
{PLAN}
print(state())
"""
        [line] = run_python(code, tmp_path)
        assert "skipped" in line
        assert "has no get_balanced_memory" in line


class TestShadows:
    """A local file or folder called transformers: nothing breaks, and the state says what it is."""

    @pytest.mark.parametrize(
        "files, words",
        [
            ({"transformers.py": "import json.tool"}, "single file"),
            ({"transformers/mine.py": ""}, "without __init__.py"),
        ],
    )
    def test_the_state_names_it(self, tmp_path, files, words):
        folder = fake_packages(tmp_path / "fakes")
        project = tmp_path / "project"
        write_files(project, files)
        write_files(
            folder,
            {"transformers-5.12.1.dist-info/METADATA": "Name: transformers\nVersion: 5.12.1"},
        )
        code = program("import transformers", "print(state())").replace(
            SHIM, f"{SHIM}\nimport sys; sys.path.insert(0, {str(project)!r})"
        )
        [line] = run_python(code)
        assert "skipped" in line
        assert words in line
        assert str(project) in line

    def test_a_single_file_costs_nothing(self, tmp_path):
        write_files(tmp_path, {"transformers.py": "import json.tool"})
        code = (
            f"{SHIM}\nimport transformers, sys\nprint('bnb_dispatch_fix.activation' in sys.modules)"
        )
        assert run_python(code, tmp_path) == ["False"]


#: Ctrl-C at a place that is reached while the shim activates, once.
INTERRUPT = """
import builtins, importlib, sys
def interrupted(owner, name, kind=KeyboardInterrupt):
    function = getattr(owner, name)
    left = [kind("Ctrl-C")]
    def once(*args, **kwargs):
        if left:
            raise left.pop()
        return function(*args, **kwargs)
    setattr(owner, name, once)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "bnb_dispatch_fix." + PLACE:
            sys.meta_path.remove(self)
            raise KIND("Ctrl-C")

def cell(code):
    try:
        exec(compile(code, "cell", "exec"), globals())
    except (KeyboardInterrupt, SystemExit) as error:
        print(type(error).__name__)
"""
PLACES = ["activation", "patching.matrix", "patching.patches", "wrappers.planners", "wording"]


class TestInterrupts:
    """Ctrl-C in a notebook cell while the shim activates; the cell is run again."""

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
    @pytest.mark.parametrize("first", [SHIM, "import transformers"])
    def test_while_it_is_imported(self, tmp_path, place, kind, first):
        folder = fake_packages(tmp_path)
        write_files(folder, {"transformers/other.py": ""})
        second = "import transformers, transformers.other" if first == SHIM else SHIM
        code = f"""
{INTERRUPT}
PLACE, KIND = {place!r}, {kind}
cell({first!r})
sys.meta_path.insert(0, Finder())
cell({second!r})
cell({second!r})
import bnb_dispatch_fix
{PLAN}
{CHECK}
"""
        assert run_python(code, folder) == [kind, APPLIED]

    @pytest.mark.parametrize(
        "order, place",
        [
            *itertools.product(
                ["shim", "target"], ["_load", "_patch_module", "_patch", "_announce", "_wrapper_of"]
            ),
            ("target", "_name_holders"),
        ],
    )
    def test_while_it_patches(self, tmp_path, order, place):
        start, target = "bnb_dispatch_fix._start()", TARGETS[1]
        first, second = (start, target) if order == "shim" else (target, start)
        code = f"""
{INTERRUPT}
import os
os.environ["BNB_DISPATCH_FIX"] = "off"
import bnb_dispatch_fix
from bnb_dispatch_fix import activation
del os.environ["BNB_DISPATCH_FIX"]
interrupted(activation._board, {place!r})
for code in ({first!r}, {second!r}, {second!r}):
    cell(code)
{PLAN}
{CHECK}
"""
        assert run_python(code, fake_packages(tmp_path)) == ["KeyboardInterrupt", APPLIED]

    def test_of_activate_itself_the_next_import_does_what_was_asked_for(self, tmp_path):
        folder = fake_packages(tmp_path)
        code = f"""
{INTERRUPT}
{SHIM}
from bnb_dispatch_fix import activation
interrupted(activation._board, "_load")
cell("bnb_dispatch_fix.activate(['backport'])")
{PLAN}
import transformers
print(bnb_dispatch_fix.status().features)
{CHECK}
"""
        assert run_python(code, folder) == ["KeyboardInterrupt", "('backport',)", APPLIED]

    def test_an_unknown_feature_leaves_it_waiting(self, tmp_path):
        code = f"""
{SHIM}
try:
    bnb_dispatch_fix.activate(["backprot"])
except ValueError:
    pass
{PLAN}
{CHECK}
"""
        assert run_python(code, fake_packages(tmp_path)) == [APPLIED]
