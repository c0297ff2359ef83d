"""`run` against `python` itself: everything a program can see of its start is the same."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from fakes import fake_packages, finished_python, write_files

from bnb_dispatch_fix import cli
from bnb_dispatch_fix.startup import runner

PROGRAM = """
import os, sys
import __main__
print(sys.argv, sys.path[0], sys.flags)
print(__name__, __file__, __package__, __spec__ and (__spec__.name, __spec__.origin), __doc__)
print(sorted(vars(__main__)), globals() is vars(__main__))
print(sys.path, "sitecustomize" in sys.modules)
"""
FAILING = (
    PROGRAM
    + """
def fail():
    raise KeyError("deep inside")
fail()
"""
)


@pytest.fixture
def project(tmp_path):
    write_files(
        tmp_path,
        {
            "program.py": PROGRAM,
            "failing.py": FAILING,
            "pack/__init__.py": "",
            "pack/__main__.py": PROGRAM,
            "pack/module.py": FAILING,
            "bad.py": "def (",
        },
    )
    return tmp_path


def both(project, *program, **environment):
    """Run a program with `python` and with `run`: (exit code, output, errors) of each."""
    answers = []
    for before in ((), ("-m", "bnb_dispatch_fix", "run")):
        finished = finished_python(*before, *program, cwd=project, **environment)
        answers.append((finished.returncode, finished.stdout, finished.stderr))
    return answers


@pytest.mark.parametrize(
    "program",
    [
        ["program.py"],
        ["program.py", "-m", "--help", "-h", "--", "-", "a b", "--", "", "--version"],
        ["./program.py", "x"],
        ["-m", "program", "--help"],
        ["-m", "pack", "-m", "--", "x"],
        ["-m", "pack.module", "1"],
        ["pack"],
        ["failing.py"],
        ["bad.py"],
        ["not_there.py"],
        ["-m", "not_there"],
        ["-m", "pack.not_there"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_sees_under_python(project, program):
    plain, ours = both(project, *program)
    assert ours == plain


@pytest.mark.parametrize(
    "ending, code",
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('message')", 1),
        ("os._exit(9)", 9),
        ("raise SystemExit", 0),
        ("raise KeyboardInterrupt", None),
        ("os.kill(os.getpid(), signal.SIGTERM)", -int(signal.SIGTERM)),
    ],
)
def test_exit_codes(project, ending, code):
    write_files(project, {"ending.py": f"import os, signal, sys\n{ending}\n"})
    plain, ours = both(project, "ending.py")
    assert ours == plain
    assert code is None or ours[0] == code


def test_the_shim_is_active_in_the_program_and_in_its_children(project):
    fake_packages(project)
    child = (
        "import transformers.integrations.accelerate as planner\n"
        "print(type(planner.get_balanced_memory).__name__, end=' ')\n"
    )
    parent = "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)\n"
    write_files(
        project,
        {
            "child.py": "import sys; assert 'bnb_dispatch_fix' in sys.modules\n" + child,
            "parent.py": "import sys; assert 'bnb_dispatch_fix' in sys.modules\n" + child + parent,
        },
    )
    finished = finished_python("-m", "bnb_dispatch_fix", "run", "parent.py", cwd=project)
    assert (finished.stderr, finished.returncode) == ("", 0)
    assert finished.stdout.split() == ["PatchedFunction", "PatchedFunction"]


def test_off(project):
    write_files(project, {"off.py": "import bnb_dispatch_fix as b; print(b.status().features)"})
    finished = finished_python(
        "-m", "bnb_dispatch_fix", "run", "off.py", cwd=project, BNB_DISPATCH_FIX="off"
    )
    assert (finished.stdout, finished.stderr) == ("()\n", "")


class TestSitecustomize:
    def test_one_of_the_environment_runs_as_well_and_only_once(self, project):
        own = project / "own"
        write_files(own, {"sitecustomize.py": "print('own')\nVALUE = 1"})
        write_files(project, {"look.py": "import sitecustomize; print(sitecustomize.VALUE)"})
        finished = finished_python(
            "-m", "bnb_dispatch_fix", "run", "look.py", cwd=project, paths=(own,)
        )
        assert (finished.stderr, finished.returncode) == ("", 0)
        assert finished.stdout.split() == ["own", "own", "1"]  # of `run` itself, of the program

    def test_one_that_fails_fails_as_under_python(self, project):
        own = project / "own"
        write_files(own, {"sitecustomize.py": "import no_such_module"})
        plain, ours = both(project, "program.py", PYTHONPATH=str(own), PYTHONVERBOSE="")
        assert "no_such_module" in plain[2]
        assert "no_such_module" in ours[2]

    def test_the_documented_line_is_silent_without_the_package(self, project):
        own = project / "own"
        line = "try:\n    import bnb_dispatch_fix\nexcept ImportError:\n    pass\n"
        write_files(own, {"sitecustomize.py": line})
        finished = finished_python(
            "-c", "print(1)", cwd=own, options=("-W", "error"), PYTHONPATH=str(own)
        )
        assert (finished.stdout, finished.stderr) == ("1\n", "")


class TestCommandLine:
    @pytest.mark.parametrize("arguments", [[], ["-m"], ["-I", "program.py"], ["--no-such"]])
    def test_without_a_program_it_says_what_is_missing(self, arguments, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", *arguments])
        assert stop.value.code == 2
        assert capsys.readouterr().err

    @pytest.mark.parametrize("option", ["-h", "--help"])
    def test_help(self, option, capsys):
        assert cli.main(["run", option]) == 0
        assert "(SCRIPT | -m MODULE) [ARGS ...]" in capsys.readouterr().out

    def test_where_a_process_cannot_be_replaced_the_code_comes_back(self, monkeypatch, project):
        write_files(project, {"seven.py": "import sys; sys.exit(7)"})
        monkeypatch.setattr(runner.os, "name", "nt")
        monkeypatch.setattr(runner.os, "execve", None)
        program = [str(project / "seven.py")]
        monkeypatch.setattr(runner, "_FOLDER", runner.__file__)  # Path needs the true os.name
        assert runner.run_program(program) == 7

    def test_pythonpath_is_kept_behind_ours(self):
        with_one = runner.environment_with_shim({"PYTHONPATH": "/a", "HOME": "/h"})
        ours, _, rest = with_one["PYTHONPATH"].partition(os.pathsep)
        assert rest == "/a"
        assert with_one["HOME"] == "/h"
        assert runner.environment_with_shim({})["PYTHONPATH"] == ours
        assert (Path(ours) / "sitecustomize.py").exists()


def test_it_is_the_same_python(project):
    write_files(project, {"which.py": "import sys; print(sys.executable, sys.version_info[:3])"})
    _, ours = both(project, "which.py")
    assert ours[1] == f"{sys.executable} {sys.version_info[:3]}\n"
