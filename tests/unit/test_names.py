"""One function under many names: one wrapper, however it is imported, reloaded and copied."""

from __future__ import annotations

import pytest
from fakes import (
    BACKPORTED,
    PLAN,
    PLANNER,
    SEAM,
    fake_packages,
    finished_python,
    shim_with,
    write_files,
)

#: Where transformers offers the planner of fakes.py, and a library that takes it by name.
MODULES = [PLANNER, "transformers.integrations", "transformers.utils"]
SEAMS = [{**SEAM, "id": module, "module": module} for module in MODULES]
HOLDER = {**SEAM, "id": "library", "package": "library", "versions": ">=1", "module": "library"}
SHIM = "import bnb_dispatch_fix\n" + PLAN
IMPORT = f"import transformers, {PLANNER}"
LOOK = f"""
import sys
def finders():
    return [finder for finder in sys.meta_path if type(finder).__name__ == "Tripwire"]
def names():
    return [vars(sys.modules[name])["get_balanced_memory"] for name in {MODULES}]
def look():
    found = names()
    states = sorted({{s for s, _ in state()}})
    print(len(set(map(id, found))), type(found[0]).__name__, states, plan())
"""
ONE = f"1 PatchedFunction ['applied'] {BACKPORTED}"
RAW = "1 function ['disabled'] installed"


@pytest.fixture
def folder(tmp_path):
    """A transformers with three names of one function, a library that takes it, and the shim."""
    fake_packages(tmp_path)
    taken = "from transformers.integrations.accelerate import get_balanced_memory\n"
    write_files(
        tmp_path,
        {
            "transformers/__init__.py": '__version__ = "5.12.1"\nfrom . import integrations, utils',
            "transformers/integrations/__init__.py": taken,
            "transformers/utils.py": taken,
            "library/__init__.py": f"__version__ = '1.0'\n{taken}",
            "other.py": taken,
        },
    )
    return shim_with(tmp_path, [*SEAMS, HOLDER])


def finish(folder, *steps):
    return finished_python("-c", "\n".join(steps), cwd=folder)  # its copy of the shim comes first


def run(folder, *steps):
    finished = finish(folder, *steps)
    assert (finished.returncode, finished.stderr) == (0, ""), finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.parametrize("order", [(SHIM, IMPORT), (IMPORT, SHIM)])
def test_names_that_were_one_function_are_one_wrapper(folder, order):
    assert run(folder, *order, LOOK, "look()") == [ONE]


@pytest.mark.parametrize("order", [(SHIM, IMPORT), (IMPORT, SHIM)])
def test_undo_puts_the_same_object_back_under_every_name(folder, order):
    steps = """
wrapper = names()[0]
bnb_dispatch_fix.deactivate()
look()
print(names()[0] is wrapper.__wrapped__, wrapper(None, {0: 1000, 1: 1000}))
bnb_dispatch_fix.activate()
look()
print(names()[0] is wrapper)
"""
    assert run(folder, *order, LOOK, steps) == [RAW, "True installed", ONE, "True"]


def test_who_wraps_it_wherever_it_is_the_same_finds_all_names(folder):
    """As unsloth does for several GPUs; the shim keeps working below."""
    steps = """
import functools
original = names()[0]
@functools.wraps(original)
def theirs(*args, **kwargs): return "theirs", original(*args, **kwargs)
changed = [name for name in %s if vars(sys.modules[name])["get_balanced_memory"] is original]
for name in changed: sys.modules[name].get_balanced_memory = theirs
print(len(changed), plan(), {s for s, _ in state()})
print({why.partition("wraps")[2] for _, why in state()})
bnb_dispatch_fix.activate()
print(plan(), {s for s, _ in state()})
"""
    assert run(folder, SHIM, IMPORT, LOOK, steps % MODULES) == [
        f"3 ('theirs', {BACKPORTED}) {{'replaced'}}",
        "{' our wrapper, which still works'}",
        f"('theirs', {BACKPORTED}) {{'replaced'}}",
    ]


def test_one_name_of_three_can_be_somebody_elses(folder):
    steps = """
import transformers.utils
transformers.utils.get_balanced_memory = lambda *args, **kwargs: "theirs"
bnb_dispatch_fix.activate()
print(sorted(s for s, _ in state()))
bnb_dispatch_fix.deactivate()
print([type(f).__name__ for f in names()], names()[2](None))
"""
    assert run(folder, "import logging; logging.disable()", SHIM, IMPORT, LOOK, steps) == [
        "['applied', 'applied', 'replaced']",
        "['function', 'function', 'function'] theirs",
    ]


def test_who_takes_somebodys_wrapper_of_ours_has_both(folder):
    """A name that came later, and leads to us through another's wrapper: no word about a loss."""
    steps = """
import functools
import transformers.integrations.accelerate as planner
ours = planner.get_balanced_memory
@functools.wraps(ours)
def theirs(*args, **kwargs): return "theirs", ours(*args, **kwargs)
planner.get_balanced_memory = theirs
import library
print(library.get_balanced_memory(None, {0: 1000, 1: 1000}))
print([(p.state, p.reason.partition("wraps")[2]) for p in bnb_dispatch_fix.status().patches][-1])
"""
    assert run(folder, SHIM, steps) == [
        f"('theirs', {BACKPORTED})",
        "('replaced', ' our wrapper, which still works')",
    ]


class TestReloads:
    def test_of_a_module_that_took_the_function_by_name(self, folder):
        """It takes the wrapper: nothing is lost, and nothing else is said."""
        steps = "import importlib\nfor name in %s[1:]: importlib.reload(sys.modules[name])\nlook()"
        assert run(folder, SHIM, IMPORT, LOOK, steps % MODULES) == [ONE]

    def test_of_the_module_that_has_it_the_next_import_inside_the_package_puts_it_back(
        self, folder
    ):
        write_files(folder, {"transformers/later.py": ""})
        steps = f"""
import importlib
importlib.reload(sys.modules[{PLANNER!r}])
print(plan(), sorted(s for s, _ in state()))
import transformers.later
print(plan(), sorted(s for s, _ in state()))
bnb_dispatch_fix.deactivate()
print([type(f).__name__ for f in names()], plan())
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == [
            "installed ['applied', 'applied', 'replaced']",
            f"{BACKPORTED} ['applied', 'applied', 'applied']",
            "['function', 'function', 'function'] installed",
        ]

    def test_of_the_package_imported_anew(self, folder):
        steps = """
for name in [n for n in sys.modules if n.startswith("transformers")]: del sys.modules[name]
import transformers
look()
bnb_dispatch_fix.deactivate()
look()
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == [ONE, RAW]

    @pytest.mark.parametrize("names", ["sorted(ours)", "sorted(ours, reverse=True)", "list(ours)"])
    def test_of_everything_of_ours(self, folder, names):
        steps = f"""
import importlib
ours = [n for n in sys.modules if n.startswith("bnb_dispatch_fix.")]
for name in {names}: importlib.reload(sys.modules[name])
look()
bnb_dispatch_fix.deactivate()
look()
bnb_dispatch_fix.activate()
look()
print(len(finders()))
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == [ONE, RAW, ONE, "1"]

    def test_of_the_package_of_ours_and_all_in_it(self, folder):
        steps = """
import importlib
for name in [n for n in sys.modules if n.startswith("bnb_dispatch_fix")]:
    importlib.reload(sys.modules[name])
look()
importlib.reload(bnb_dispatch_fix)
look()
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == [ONE, ONE]


FORGET = """
import sys
for name in [n for n in sys.modules if n.startswith("bnb_dispatch_fix")]: del sys.modules[name]
"""


class TestSecondCopy:
    """It takes over from the first, without a word, and each can undo all of it."""

    @pytest.mark.parametrize("undone_by", ["first", "bnb_dispatch_fix"])
    def test_imported_after_the_targets(self, folder, undone_by):
        steps = f"""
first, kept = bnb_dispatch_fix, names()[0]
{FORGET}
import bnb_dispatch_fix
print(first is bnb_dispatch_fix, kept is names()[0])
look()
print([bool(finder._watched) for finder in finders()])
{undone_by}.deactivate()
print([type(f).__name__ for f in names()], plan(), kept(None, {{0: 1000, 1: 1000}}))
for name in [n for n in sys.modules if n.startswith("transformers")]: del sys.modules[name]
print(plan())
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == [
            "False False",
            ONE,
            "[True, False]",
            "['function', 'function', 'function'] installed installed",
            "installed",
        ]

    @pytest.mark.parametrize("undone_by", ["first", "bnb_dispatch_fix"])
    def test_imported_before_the_targets(self, folder, undone_by):
        steps = f"""
first = bnb_dispatch_fix
{FORGET}
import bnb_dispatch_fix
{IMPORT}
look()
{undone_by}.deactivate()
print([type(f).__name__ for f in names()], plan())
"""
        assert run(folder, SHIM, LOOK, steps) == [
            ONE,
            "['function', 'function', 'function'] installed",
        ]

    def test_from_another_folder(self, folder, tmp_path):
        other = shim_with(tmp_path / "other", SEAMS)
        steps = f"""
{FORGET}
sys.path.insert(0, {str(other)!r})
import bnb_dispatch_fix
print(bnb_dispatch_fix.__file__.startswith({str(other)!r}))
look()
bnb_dispatch_fix.deactivate()
look()
"""
        assert run(folder, SHIM, IMPORT, LOOK, steps) == ["True", ONE, RAW]

    def test_the_first_neither_patches_nor_undoes_behind_its_back(self, folder):
        """What is imported later is the second copy's."""
        steps = f"""
import transformers.utils
first = bnb_dispatch_fix
{FORGET}
import bnb_dispatch_fix
bnb_dispatch_fix.deactivate()
for name in [n for n in sys.modules if n.startswith("transformers")]: del sys.modules[name]
import transformers.utils
print(plan())
first.activate()
print(plan(), {{p.state for p in first.status().patches if p.module in sys.modules}})
"""
        assert run(folder, SHIM, steps) == ["installed", f"{BACKPORTED} {{'applied'}}"]


class TestTooLate:
    def test_a_library_that_is_known_is_patched_at_its_own_name(self, folder):
        steps = """
print(library.get_balanced_memory(None, {0: 1000, 1: 1000}))
print([(p.module, p.state) for p in bnb_dispatch_fix.status().patches if p.module == "library"])
bnb_dispatch_fix.deactivate()
print(library.get_balanced_memory(None), type(library.get_balanced_memory).__name__)
"""
        assert run(folder, "import library", SHIM, steps) == [
            str(BACKPORTED),
            "[('library', 'applied')]",
            "installed function",
        ]

    def test_a_library_that_is_not_here_is_not_spoken_of(self, folder):
        steps = "print([p.module for p in bnb_dispatch_fix.status().patches])"
        assert run(folder, IMPORT, SHIM, steps) == [str(MODULES)]

    def test_who_is_not_known_is_named_in_one_warning_and_in_the_status(self, folder):
        finished = finish(
            folder,
            "import other",
            "from transformers.utils import get_balanced_memory as kept",
            SHIM,
            "print(bnb_dispatch_fix.status().holders, bnb_dispatch_fix.status().complete)",
            "bnb_dispatch_fix.activate(); import transformers.utils; plan()",
            "print(bnb_dispatch_fix.status().as_dict()['holders'])",
        )
        assert finished.stdout.splitlines() == [
            "('__main__.kept', 'other.get_balanced_memory') True",
            "['__main__.kept', 'other.get_balanced_memory']",
        ]
        [line] = finished.stderr.splitlines()
        assert line.startswith("__main__.kept, other.get_balanced_memory: ")
        assert "import bnb_dispatch_fix first" in line

    def test_nobody_is_named_where_the_shim_came_first(self, folder):
        steps = """
import other
from transformers.utils import get_balanced_memory as kept
print(bnb_dispatch_fix.status().holders, kept(None, {0: 1000, 1: 1000}))
"""
        assert run(folder, SHIM, steps) == [f"() {BACKPORTED}"]

    def test_the_main_script_is_named_once(self, folder):
        """In a spawned child it has two names."""
        finished = finish(
            folder,
            "import sys; sys.modules['__mp_main__'] = sys.modules['__main__']",
            "from transformers.utils import get_balanced_memory as kept",
            SHIM,
            "print(bnb_dispatch_fix.status().holders)",
        )
        assert finished.stdout == "('__main__.kept',)\n"

    def test_nothing_is_imported_or_looked_up_for_that(self, folder):
        steps = """
import sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        raise SystemExit("looked up " + name)
sys.modules["lazy"] = Lazy("lazy")
sys.modules["odd"] = 7
"""
        look = "print(bnb_dispatch_fix.status().holders)"
        assert run(folder, steps, IMPORT, SHIM, look) == ["()"]
