"""Broken surroundings: the program runs on, and the state says what happened."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import yaml
from fakes import PLAN, fake_packages, finished_python, run_python, shim_folder, write_files

from bnb_dispatch_fix import states
from bnb_dispatch_fix.patching import matrix as compat

SHIM = "import bnb_dispatch_fix\n" + PLAN
CHECK = "\nprint(plan(), bnb_dispatch_fix.status().problem, state())"


def bomb(value):
    """Nine levels of nine aliases: 387 million strings once somebody prints it."""
    levels = [f"a0: &a0 [{value}]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(levels)


def merge_bomb():
    """A mapping that merges nine copies of one that merges nine copies of one ..."""
    levels = ["m0: &m0 {k: v}"]
    levels += [f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}" for i in range(1, 10)]
    return "\n".join(levels)


def valid():
    return (shim_folder() / "bnb_dispatch_fix" / "compat_matrix.yaml").read_text()


def changed(**changes):
    return yaml.safe_dump({**yaml.safe_load(valid()), **changes})


def _seam():
    return yaml.safe_load(valid())["seams"][0]


def seam(**changes):
    return changed(seams=[{**_seam(), **changes}])


def fix(number):
    """The matrix with a number as it is written in its first fix."""
    return valid().replace("pr: 47203", f"pr: {number}", 1)


HOSTILE = {
    "empty": ("", "no mapping"),
    "binary": (b"\x00\xff\xfe" * 50, "no usable YAML"),
    "cut short": (lambda: valid()[: len(valid()) // 2], ""),
    "not YAML": ("a: [b", "no usable YAML"),
    "tabs": ("a:\n\t- b", "no usable YAML"),
    "a list": ("- 1\n- 2", "no mapping"),
    "a number": ("7", "no mapping"),
    "several documents": ("a: 1\n---\nb: 2", "no usable YAML"),
    "a newer schema": (lambda: changed(schema=2), "expected schema 1"),
    "a schema that is a text": (lambda: changed(schema="1"), "expected schema 1"),
    "a schema that is true": (lambda: changed(schema=True), "expected schema 1"),
    "a schema that is a fraction": (lambda: changed(schema=1.0), "expected schema 1"),
    "a schema that is a large text": (lambda: changed(schema="x" * 500_000), "expected schema 1"),
    "no seams": (lambda: changed(seams=None), "expected schema 1"),
    "seams that are texts": (lambda: changed(seams=["a", "b"]), "expected schema 1"),
    "a seam without a module": (lambda: seam(module=None), "module"),
    "a range that is none": (lambda: seam(versions="whenever"), "expected schema 1"),
    "a seam twice": (lambda: changed(seams=[_seam(), _seam()]), "share an id"),
    "features that are one text": (lambda: seam(features="backport"), "features"),
    "a feature nobody knows": (lambda: seam(features=["magic"]), "magic"),
    "fixes that are a nested list": (lambda: seam(fixes=[[[1]]]), "expected schema 1"),
    "bodies that are a number": (lambda: changed(implementations={"a": 7}), "expected schema 1"),
    "code": ("!!python/object/apply:os._exit [3]", "no usable YAML"),
    "a number without end": (lambda: fix(".inf"), "expected a whole number"),
    "a number that is none": (lambda: fix(".nan"), "expected a whole number"),
    "a number that is true": (lambda: fix("true"), "expected a whole number"),
    "a number that is a fraction": (lambda: fix("47203.5"), "expected a whole number"),
    "fixes that are true": (lambda: seam(fixes=[True]), "expected a whole number"),
    "a number in base 60": (lambda: fix("1:30"), "'1:30' is no number of ours"),
    "a long number in base 60": (lambda: fix("1" + ":1" * 400_000), "is no number of ours"),
    "a long number": (lambda: fix("9" * 900_000), "is no number of ours"),
    "a long number in a tag": (lambda: fix('!!int "' + "1:" * 400_000 + '1"'), "has the tag"),
    "an alias bomb": (lambda: f"schema: 1\n{bomb('lol')}", "aliases"),
    "a bomb where a text should be": (lambda: f"{bomb('x')}\nschema: *a8", "aliases"),
    "a merge bomb": (lambda: f"schema: 1\n{merge_bomb()}", "aliases"),
    "an alias to itself": ("&a [*a]", "aliases"),
    "nested deeply": ("[" * 100_000, "no usable YAML"),
    "nested deeply and closed": ("[" * 20_000 + "]" * 20_000, "no usable YAML"),
    "nested a little too deeply": ("[" * 17 + "]" * 17, "levels deep"),
    "nested deeply by indents": ("- " * 50_000 + "a", "levels deep"),
    "large": (lambda: "# " + "x" * compat.SIZE_LIMIT, "larger than"),
}


@pytest.fixture
def shim(tmp_path):
    """A copy of the shim that may be damaged."""
    shutil.copytree(str(shim_folder() / "bnb_dispatch_fix"), str(tmp_path / "bnb_dispatch_fix"))
    fake_packages(tmp_path)
    return tmp_path


def damaged(shim, content):
    content = content() if callable(content) else content
    path = shim / "bnb_dispatch_fix" / "compat_matrix.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class TestMatrix:
    @pytest.mark.parametrize("content, words", HOSTILE.values(), ids=HOSTILE)
    def test_an_unusable_file_is_refused_with_its_reason(self, shim, content, words):
        path = damaged(shim, content)
        with pytest.raises(compat.MatrixError) as refusal:
            compat.load_matrix(path)
        message = str(refusal.value)
        assert words in message
        assert str(path) in message
        assert "reinstall bnb-dispatch-fix" in message
        assert len(message) < 1000
        assert "\n" not in message

    @pytest.mark.parametrize("name", ["empty", "a newer schema", "an alias bomb", "code", "large"])
    def test_the_program_runs_on_and_one_warning_says_why(self, shim, name):
        damaged(shim, HOSTILE[name][0])
        finished = finished_python("-c", SHIM + CHECK + CHECK, cwd=shim)
        assert finished.returncode == 0
        assert finished.stdout.startswith("installed ")
        assert HOSTILE[name][1] in finished.stdout
        [line] = finished.stderr.splitlines()
        assert line.startswith("nothing is patched: ")

    def test_a_missing_file(self, shim):
        (shim / "bnb_dispatch_fix" / "compat_matrix.yaml").unlink()
        finished = finished_python("-c", SHIM + CHECK, cwd=shim)
        assert finished.stdout.startswith("installed ")
        assert "cannot be read" in finished.stdout
        assert len(finished.stderr.splitlines()) == 1

    def test_a_file_that_is_repaired_counts_at_the_next_activate(self, shim):
        path = damaged(shim, "")
        again = (
            f"open({str(path)!r}, 'w').write({valid()!r})\nbnb_dispatch_fix.activate()\n"
            "print(bnb_dispatch_fix.status().problem, [state for state, _ in state()])"
        )
        finished = finished_python("-c", SHIM + CHECK + "\n" + again, cwd=shim)
        assert finished.stdout.splitlines()[-1] == "None ['applied']"

    def test_an_implementation_that_this_release_cannot_replace(self, shim):
        damaged(shim, seam(implementation="of.tomorrow"))
        finished = finished_python("-c", SHIM + CHECK, cwd=shim)
        assert finished.stdout.startswith("installed None [('failed', \"KeyError: 'of.tomorrow'")

    def test_strict_raises(self, shim):
        damaged(shim, "")
        code = "import bnb_dispatch_fix; bnb_dispatch_fix.activate(strict=True)"
        finished = finished_python("-c", code, cwd=shim)
        assert "ActivationError" in finished.stderr.splitlines()[-1]

    def test_the_valid_one_is_read(self):
        matrix = compat.load_matrix(shim_folder() / "bnb_dispatch_fix" / "compat_matrix.yaml")
        assert [seam.id for seam in matrix.seams] == ["fake"]

    def test_the_released_one_is_read_and_small_enough(self):
        path = compat.matrix_path()
        assert compat.load_matrix(path).seams
        assert path.stat().st_size * 4 < compat.SIZE_LIMIT


class TestTargets:
    def test_without_the_function(self, shim):
        write_files(shim, {"transformers/integrations/accelerate.py": "VALUE = 1"})
        code = SHIM + "import transformers.integrations.accelerate\nprint(state())"
        finished = finished_python("-c", code, cwd=shim)
        assert "('skipped'" in finished.stdout
        assert "has no get_balanced_memory" in finished.stdout
        assert len(finished.stderr.splitlines()) == 1

    @pytest.mark.parametrize("value", ["None", "7", "len", "type", "object()", "lambda *a: 1"])
    def test_with_something_else_under_its_name(self, shim, value):
        write_files(
            shim, {"transformers/integrations/accelerate.py": f"get_balanced_memory = {value}"}
        )
        code = SHIM + (
            "import transformers.integrations.accelerate as planner\nprint(state())\n"
            "print(type(planner.get_balanced_memory).__name__)"
        )
        finished = finished_python("-c", code, cwd=shim)
        assert finished.returncode == 0, finished.stderr
        assert "('skipped'" in finished.stdout
        assert "PatchedFunction" not in finished.stdout

    @pytest.mark.parametrize(
        "stand_in",
        [
            "object()",
            "7",
            "type('Odd', (), {'__slots__': ()})()",
            "type('Odd', (), {'__getattr__': lambda *a: 1 / 0})()",
        ],
    )
    def test_that_are_no_modules(self, shim, stand_in):
        """Anything may stand in sys.modules."""
        code = (
            f"import sys\nsys.modules['transformers.integrations.accelerate'] = {stand_in}\n"
            + SHIM
            + "import logging; logging.disable()\nimport transformers\nprint(state())"
        )
        finished = finished_python("-c", code, cwd=shim)
        assert finished.returncode == 0, finished.stderr
        assert "failed" in finished.stdout or "skipped" in finished.stdout

    def test_that_are_no_modules_are_no_warning(self, shim):
        code = f"import sys\nsys.modules['transformers.integrations.accelerate'] = 7\n{SHIM}"
        finished = finished_python("-c", code + "import transformers\nprint(state())", cwd=shim)
        assert "'skipped', 'what stands as transformers.integrations.accelerate" in finished.stdout
        assert finished.stderr == ""

    @pytest.mark.parametrize("metadata", [None, "", "Name: transformers", "\xff\xfe", "Version: ?"])
    def test_whose_metadata_cannot_be_read(self, shim, metadata):
        """The code decides where no version can be had."""
        path = shim / "transformers-5.12.1.dist-info" / "METADATA"
        path.parent.mkdir()
        if metadata is None:
            path.mkdir()
        else:
            path.write_bytes(metadata.encode("latin-1"))
        write_files(shim, {"transformers/__init__.py": ""})
        lines = run_python(SHIM + "print(len(state()))\nprint(plan(), state()[0][0])", shim)
        assert lines == ["1", "{0: 100, 1: 1000} applied"]

    def test_that_are_blocked(self, shim):
        code = "import sys; sys.modules['transformers'] = None\n" + SHIM
        code += "print([state for state, _ in state()])\n"
        code += "try:\n    import transformers\nexcept ImportError: print('blocked')"
        finished = finished_python("-c", code, cwd=shim)
        assert finished.stderr == ""
        assert finished.stdout.splitlines()[-1] == "blocked"


class TestErrorsInOurOwnCode:
    @pytest.mark.parametrize(
        "place",
        [
            "activation.judge",
            "activation.found_at",
            "activation.Patch.apply",
        ],
    )
    @pytest.mark.parametrize("error", ["MemoryError()", "RecursionError('deep')", "KeyError(1)"])
    def test_an_error_in_a_hook_is_a_state(self, shim, place, error):
        code = f"""
import logging; logging.disable()
from bnb_dispatch_fix import activation
def fail(*args, **kwargs): raise {error}
{place} = fail
import transformers.integrations.accelerate as planner
print(planner.get_balanced_memory(None, {{0: 1000, 1: 1000}}))
print(activation.status().patches[0].state)
"""
        assert run_python(code, shim)[0] == "installed"

    def test_the_state_is_failed_until_it_works(self, shim):
        code = (
            SHIM
            + """
import logging; logging.disable()
from bnb_dispatch_fix import activation
judge = activation.judge
calls = []
def once(*args):
    calls.append(1)
    if len(calls) == 1: raise MemoryError
    return judge(*args)
activation.judge = once
bnb_dispatch_fix.activate()
import transformers.integrations.accelerate
print(state())
bnb_dispatch_fix.activate()
print(state()[0][0])
"""
        )
        lines = run_python(code, shim)
        assert lines[0].startswith("[('failed', 'MemoryError")
        assert lines[1] == "applied"

    def test_a_failure_of_before_is_forgotten_when_the_module_is_another(self, shim):
        """Repaired, or fixed by then: nothing of the error is left."""
        code = (
            SHIM
            + """
import logging; logging.disable()
from bnb_dispatch_fix import activation
judge = activation.judge
activation.judge = lambda *args: 1 / 0
bnb_dispatch_fix.activate()
import transformers.integrations.accelerate as planner
activation.judge = judge
print(state()[0][0])
planner.get_balanced_memory = 7
bnb_dispatch_fix.activate()
print(state())
"""
        )
        lines = run_python(code, shim)
        assert lines[0] == "failed"
        assert lines[1].startswith("[('skipped', ")
        assert "ZeroDivisionError" not in lines[1]

    @pytest.mark.parametrize(
        "module", ["activation", "patching/matrix", "patching/patches", "patching/verdict"]
    )
    def test_a_module_of_ours_that_cannot_be_imported(self, shim, module):
        """As with a wrapt that is broken, or too old for this Python."""
        broken = "raise AttributeError('formatargspec')"
        write_files(shim, {f"bnb_dispatch_fix/{module}.py": broken})
        code = (
            "import bnb_dispatch_fix\nimport transformers.integrations.accelerate as planner\n"
            "print(planner.get_balanced_memory(None))"
        )
        finished = finished_python("-c", code, cwd=shim)
        assert finished.stdout == "installed\n"
        [line] = finished.stderr.splitlines()
        assert "could not activate" in line
        assert "formatargspec" in line

    def test_an_error_while_a_plan_is_made(self, shim):
        """The installed function answers, and the log says so."""
        write_files(
            shim,
            {
                "bnb_dispatch_fix/backport/balanced.py": "def __getattr__(name):\n"
                "    if name.startswith('__'): raise AttributeError(name)\n"
                "    def fail(*args, **kwargs): raise MemoryError\n    return fail\n"
            },
        )
        finished = finished_python("-c", SHIM + "print(plan(), state()[0][0])", cwd=shim)
        assert finished.stdout == "installed applied\n", finished.stderr
        assert "the installed function answered instead" in finished.stderr


class TestSparedTheCaller:
    """A fault of ours that costs nobody a load: one WARNING of a kind, and the status has it."""

    LOOKED_AFTER = """
def get_max_memory(max_memory=None):
    return dict(max_memory)

def _get_device_map(model, device_map, max_memory, hf_quantizer):
    return {"": device_map}
"""
    CALLS = """
import transformers.integrations.accelerate as planner
for _ in range(3):
    print(planner._get_device_map(None, "auto", None, None))
print(bnb_dispatch_fix.status().patches[0].state)
print(bnb_dispatch_fix.status().patches[0].reason)
"""

    @pytest.fixture
    def looked_after(self, shim):
        write_files(shim, {"transformers/integrations/accelerate.py": self.LOOKED_AFTER})
        name = {"attribute": "_get_device_map", "implementation": "transformers._get_device_map"}
        damaged(shim, seam(features=["rescue", "explain"], fixes=[], **name))
        return shim

    def test_a_request_that_cannot_be_read(self, looked_after):
        finished = finished_python("-c", SHIM + self.CALLS, cwd=looked_after)
        assert finished.stdout.splitlines()[:4] == ["{'': 'auto'}"] * 3 + ["applied"]
        reason = finished.stdout.splitlines()[4]
        assert "last went wrong: request unread: AttributeError: 'NoneType' object" in reason
        [line] = finished.stderr.splitlines()
        assert "AttributeError(\"'NoneType' object" in line

    def test_nothing_went_wrong_where_nothing_did(self, looked_after):
        calls = self.CALLS.replace('"auto"', '"cpu"')
        finished = finished_python("-c", SHIM + calls, cwd=looked_after)
        assert "went wrong" not in finished.stdout
        assert finished.stderr == ""

    def test_it_stands_at_the_seam_where_it_was_with_the_last_of_its_kind(self):
        with states.at("here"):
            assert states.contained("one", KeyError("first")) == logging.WARNING
            with states.at("inside"):
                assert states.contained("one", KeyError("other")) == logging.WARNING
            assert states.contained("one", ValueError("a\nb")) == logging.DEBUG
            assert states.contained("two", KeyError("c")) == logging.WARNING
            assert states.contained("one", ValueError("a\nb")) == logging.DEBUG
        assert states.last_fault("here") == "one: ValueError: a b"
        assert states.last_fault("inside") == "one: KeyError: 'other'"
        assert states.last_fault("elsewhere") is None


class TestLoaders:
    """Modules that a loader compiles under a name of its own: out of an archive, the network."""

    FINDER = """
import importlib.abc, importlib.machinery, sys
class Loader(importlib.abc.InspectLoader):
    def __init__(self, path): self.path = path
    def get_source(self, name):
        if not SHOWS_SOURCE: raise ImportError("no source here")
        return open(self.path).read()
    def get_code(self, name): return compile(open(self.path).read(), NAME, "exec")
    def is_package(self, name): return False
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.integrations.accelerate":
            place = path[0] + "/accelerate.py"
            spec = importlib.machinery.ModuleSpec(name, Loader(place), origin=place)
            spec.has_location = True
            return spec
sys.meta_path.insert(0, Finder())
"""

    @pytest.mark.parametrize("order", ["shim", "target"])
    @pytest.mark.parametrize("name", ["archive/accelerate.py", "<network>/accelerate.py"])
    def test_are_judged_by_their_source(self, shim, name, order):
        lines = self.run(shim, name, order, True)
        judged = "[('applied', 'transformers 5.12.1 lacks #47203, #47211')]"
        assert lines == ["{0: 100, 1: 1000}", judged]

    @pytest.mark.parametrize("order", ["shim", "target"])
    def test_without_source_are_judged_by_behaviour(self, shim, order):
        """Not taken for somebody's patch; without torch nothing can be told, and it says that."""
        answer, state = self.run(shim, "<network>/accelerate.py", order, False)
        assert answer == "installed"
        assert state.startswith("[('skipped', ")
        assert "unknown source in transformers.integrations.accelerate.get_balanced_memory" in state
        assert "and a toy model could not tell" in state
        assert "would be lost" not in state

    def run(self, shim, name, order, shows_source):
        start = SHIM if order == "shim" else "import transformers.integrations.accelerate\n" + SHIM
        code = f"SHOWS_SOURCE, NAME = {shows_source}, {name!r}\n{self.FINDER}\n"
        code += f"import logging; logging.disable()\n{start}\nprint(plan())\nprint(state())"
        finished = finished_python("-c", code, cwd=shim)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.splitlines()


class TestLogging:
    @pytest.mark.parametrize(
        "broken",
        [
            "logging.getLogger('bnb_dispatch_fix').addFilter(lambda record: 1 / 0)",
            "logging.getLogger('bnb_dispatch_fix').log = None",
            "logging.getLogger = None",
            "sys.modules['logging'] = None",
            "logging.setLoggerClass(type('L', (logging.Logger,), {'log': lambda *a: 1 / 0}))",
        ],
    )
    @pytest.mark.parametrize("matrix_too", [False, True])
    def test_broken(self, shim, broken, matrix_too):
        if matrix_too:
            damaged(shim, "")
        code = f"import logging, sys\n{broken}\nimport bnb_dispatch_fix\n"
        code += "import transformers.integrations.accelerate as planner\nprint(planner.__name__)"
        finished = finished_python("-c", code, cwd=shim, BNB_DISPATCH_FIX="typo")
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout == "transformers.integrations.accelerate\n"

    def test_a_typo_in_the_switch_is_one_warning(self, shim):
        code = SHIM + "plan()\nbnb_dispatch_fix.activate()\nbnb_dispatch_fix.status()"
        finished = finished_python("-c", code, cwd=shim, BNB_DISPATCH_FIX="backprot")
        [line] = finished.stderr.splitlines()
        for word in ("backprot", "off", "backport", "rescue", "explain"):
            assert word in line

    def test_one_info_line_says_what_was_patched(self, shim):
        code = f"import logging; logging.basicConfig(level='INFO')\n{SHIM}plan()\nplan()"
        finished = finished_python("-c", code, cwd=shim)
        [line] = finished.stderr.splitlines()
        assert line.startswith("INFO:bnb_dispatch_fix:patched ")
        assert "#47203, #47211" in line


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_holds_our_lock(shim):
    """The child must not wait for a thread that it does not have."""
    code = (
        SHIM
        + """
import os, threading
from bnb_dispatch_fix import activation
board = activation._board
held, go_on = threading.Event(), threading.Event()
def hold():
    with board._lock:
        held.set(); go_on.wait(60)
thread = threading.Thread(target=hold); thread.start(); held.wait(60)
child = os.fork()
if child == 0:
    import faulthandler; faulthandler.dump_traceback_later(30, exit=True)
    bnb_dispatch_fix.activate()
    print(plan(), state()[0][0], flush=True)
    os._exit(0)
_, code = os.waitpid(child, 0)
go_on.set(); thread.join()
print(code)
"""
    )
    lines = run_python(code, shim, options=("-W", "ignore::DeprecationWarning"))
    assert lines == ["{0: 100, 1: 1000} applied", "0"]


def test_a_read_only_site_packages(shim):
    """Nothing is written at run time, byte code aside."""
    before = sorted(path.name for path in shim.rglob("*") if "__pycache__" not in path.parts)
    assert run_python(SHIM + "print(state()[0][0], plan())", shim)
    after = sorted(path.name for path in shim.rglob("*") if "__pycache__" not in path.parts)
    assert after == before


def test_a_zipped_package_reads_its_matrix(shim, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "zipped"), "zip", str(shim), "bnb_dispatch_fix")
    shutil.rmtree(str(shim / "bnb_dispatch_fix"))
    code = f"import sys; sys.path.insert(0, {archive!r})\n{SHIM}"
    code += "print(plan(), state()[0][0], bnb_dispatch_fix.__file__.startswith(sys.path[0]))"
    assert run_python(code, shim) == ["{0: 100, 1: 1000} applied True"]
