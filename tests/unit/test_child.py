"""A process that is asked: it has this program's modules, never the current folder's, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from fakes import finished_python, shim_folder, write_files

from bnb_dispatch_fix import child

TASKS = """
import os, sys, time
from bnb_dispatch_fix import child

def echo(question):
    child.answer(question)

def path(_):
    child.answer(sys.path)

def stdin(_):
    child.answer(sys.stdin.read())

def flags(_):
    child.answer([sys.flags.isolated, sys.dont_write_bytecode, sys.flags.utf8_mode,
                  sys.pycache_prefix, sys.warnoptions])

def hang(_):
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch):
    write_files(tmp_path / "tasks", {"child_tasks.py": TASKS})
    monkeypatch.syspath_prepend(str(tmp_path / "tasks"))
    return tmp_path


def asked(task, question=None, **options):
    ending = child.ask(f"child_tasks:{task}", question, **options)
    assert ending.code == 0, ending
    (answer,) = ending.answers
    return answer


def test_a_question_of_any_size_comes_back():
    question = {"text": "é\udcff\x1b\n" * 200_000}
    assert asked("echo", question) == question


def test_it_has_this_program_s_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "", "relative", "/ö\udcff"])
    assert asked("path") == sys.path


def test_a_path_of_any_length(monkeypatch):
    long = [f"/{'x' * 200}/{number}" for number in range(2_000)]
    monkeypatch.setattr(sys, "path", [*sys.path, *long])
    assert asked("path")[-2_000:] == long


def test_entries_that_importing_passes_over_are_left_out(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/a/path"), b"/some/bytes", None])
    assert asked("path")[-2:] == [sys.path[-4], "/some/bytes"]


def test_whoever_reads_stdin_there_gets_its_end():
    assert asked("stdin") == ""


def test_it_is_isolated_and_otherwise_as_this_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    found = asked("flags", environment={"PYTHONWARNINGS": "ignore,error::UserWarning"})
    utf8 = sys.flags.utf8_mode
    warnings = ["ignore", "error::UserWarning"]
    assert found == [1, True, utf8, str(tmp_path / "cache"), warnings]


def test_one_that_hangs_before_it_reads_is_ended_in_time(monkeypatch, tmp_path):
    """A start-up file may hang; the question is larger than a pipe."""
    write_files(tmp_path / "bin", {"python": "#!/bin/sh\nexec sleep 3600\n"})
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    ending = child.ask("child_tasks:echo", "x" * 1_000_000, timeout=0.5)
    assert ending == child.Ending([], None, "")


@pytest.mark.parametrize("timeout", [0.5, float("nan")])
def test_a_time_limit_that_is_none_does_not_hang(timeout):
    assert child.ask("child_tasks:hang", timeout=timeout).code is None


def test_what_a_signal_s_handler_raises_leaves_no_lock_behind(monkeypatch):
    """Raised inside `Popen.wait` it could: only threads wait there, in which no handler runs."""
    waiting, wait = [], subprocess.Popen.wait

    def noted(process, *args, **kwargs):
        waiting.append(threading.current_thread())
        return wait(process, *args, **kwargs)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", noted)
    with pytest.raises(KeyboardInterrupt):
        child.ask("child_tasks:hang", on_wait=interrupt)
    assert waiting
    assert threading.main_thread() not in waiting


def test_where_no_thread_can_be_started_it_says_so(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(child.CannotAsk, match="can't start new thread"):
        child.ask("child_tasks:hang")


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_where_no_python_can_be_started_it_says_so(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(child.CannotAsk) as refusal:
        child.ask("child_tasks:echo")
    assert "\n" not in str(refusal.value)
    assert (executable or "sys.executable is not set") in str(refusal.value)


ASK = """
from bnb_dispatch_fix import child
print(child.ask("child_tasks:echo", 7).answers, child.__file__)
"""


def test_the_package_is_found_where_it_is(tmp_path):
    """It is on nobody's path: neither the program's nor the current folder's copy is taken."""
    other = {"bnb_dispatch_fix/__init__.py": "raise SystemExit('the wrong one')"}
    write_files(tmp_path / "here", other)
    code = (
        f"import sys; sys.path.insert(0, {str(shim_folder())!r})\nimport bnb_dispatch_fix.child\n"
    )
    code += f"sys.path[0] = {str(tmp_path / 'here')!r}\n{ASK}"
    finished = finished_python("-c", code, paths=(tmp_path / "tasks",), cwd=tmp_path / "here")
    assert finished.stdout.startswith(f"[7] {shim_folder()}"), finished.stderr


def test_the_package_in_an_archive(tmp_path):
    archive = tmp_path / "shim.zip"
    with zipfile.ZipFile(archive, "w") as out:
        for path in shim_folder().rglob("*.py"):
            out.write(path, str(path.relative_to(shim_folder())))
    code = f"import sys; sys.path.insert(0, {str(archive)!r})\n{ASK}"
    finished = finished_python("-c", code, paths=(tmp_path / "tasks",), cwd=tmp_path)
    assert finished.stdout.startswith(f"[7] {archive}"), finished.stderr


@pytest.mark.skipif(os.name == "nt", reason="the user's folder is elsewhere there")
def test_start_up_files_of_the_user_s_folder_are_read(tmp_path):
    """Editable installs are found by what these files put in place."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folder = tmp_path / "user" / "lib" / version / "site-packages"
    hook = "import sys; sys.editable_hook = 'in place'"
    write_files(folder, {"editable.pth": f"{hook}\n"})
    write_files(
        tmp_path / "tasks",
        {"asks.py": "import sys\nfrom bnb_dispatch_fix import child\n"
         "def hook(_): child.answer(getattr(sys, 'editable_hook', None))\n"},
    )  # fmt: skip
    code = (
        "import site, sys; site.ENABLE_USER_SITE = True; site.getusersitepackages = lambda: "
        f"{str(folder)!r}\nfrom bnb_dispatch_fix import child\n"
        "print(child.ask('asks:hook').answers)"
    )
    finished = finished_python("-c", code, paths=(tmp_path / "tasks",))
    assert finished.stdout == "['in place']\n", finished.stderr
