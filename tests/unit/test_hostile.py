"""The command in hostile surroundings: nothing of the current folder runs, and one line is said."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import finished_python, shim_folder, write_files

fcntl = pytest.importorskip("fcntl", reason="pipes, signals and /dev are POSIX's")
termios = pytest.importorskip("termios", reason="terminals are POSIX's")

ESCAPE = "\x1b]0;x\x07\x1b[2J"
#: What the installed command is: a file in a folder of its own.
SCRIPT = "import sys\nfrom bnb_dispatch_fix.__main__ import main\nsys.exit(main())\n"
PACKAGES = (
    *("torch", "transformers", "accelerate", "bitsandbytes", "rich", "psutil", "numpy"),
    *("yaml", "wrapt", "packaging", "bnb_dispatch_fix", "_bnb_dispatch_fix_start", "site"),
    *("sitecustomize", "usercustomize"),
)
#: Imports without harm, and stays until the file beside it is removed.
SLEEPING = """
import fcntl, os, time
lock = open({lock!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
open({ready!r}, "w").close()
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path):
    write_files(tmp_path / "bin", {"command.py": SCRIPT})
    return tmp_path / "bin" / "command.py"


@pytest.fixture
def command(script):
    """Run the command as it is installed; what it gives back, and no traceback."""

    def run(*arguments, **options):
        finished = finished_python(str(script), *map(str, arguments), **options)
        assert "Traceback" not in finished.stderr, finished.stderr
        return finished

    return run


def refused(finished, said=""):
    """One line on stderr, and exit code 2."""
    assert finished.returncode == 2, finished
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stderr.startswith("bnb-dispatch-fix")
    assert said in finished.stderr
    assert finished.stdout == ""
    return True


# --- code of the current folder ---------------------------------------------------------------


def standard_library():
    names = getattr(sys, "stdlib_module_names", None)
    if names is None:
        names = {module.name for module in pkgutil.iter_modules([str(Path(os.__file__).parent)])}
        names |= set(sys.builtin_module_names)
    return {name for name in names if name.isidentifier()}


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    """A checkpoint's folder with a module for every name; each leaves a trace when it runs."""
    folder = tmp_path_factory.mktemp("trap")
    traces = tmp_path_factory.mktemp("traces")
    for name in {*standard_library(), *PACKAGES}:
        text = f"open({str(traces / name)!r}, 'w').close()\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder, traces


@pytest.fixture
def stays_shut(trap):
    folder, traces = trap
    yield folder
    run = sorted(path.name for path in traces.iterdir())
    for path in traces.iterdir():
        path.unlink()
    assert run == []


COMMANDS = [
    ["plan", ".", "--max-memory", "1x1GiB"],
    ["plan", "config.json"],
    ["plan", "--example", "llama-3-8b", "--max-memory", "1x1GiB", "--json"],
    ["doctor"],
    ["demo"],
    ["status"],
    ["autoload", "status"],
    ["autoload", "enable", "--path", "site"],
    ["autoload", "disable", "--path", "site"],
    ["--help"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_nothing_of_the_folder_runs(stays_shut, command, arguments):
    finished = command(*arguments, cwd=stays_shut)
    assert finished.stdout + finished.stderr


@pytest.mark.parametrize("path", ["", ".", None], ids=["empty", "dot", "in full"])
@pytest.mark.parametrize("arguments", COMMANDS[:4], ids=" ".join)
def test_nothing_of_it_runs_where_the_environment_names_it(trap, script, arguments, path):
    """Python itself looks there first then; the names it needs to start are left in peace."""
    folder, traces = trap
    path = str(folder) if path is None else path
    dependencies = Path(__import__("yaml").__file__).parent.parent
    search = os.pathsep.join([path, str(shim_folder()), str(dependencies)])
    quiet = {*sys.modules, "site", "runpy", "pkgutil", "sitecustomize", "usercustomize"}
    moved = [folder / f"{name}.py" for name in quiet if (folder / f"{name}.py").exists()]
    for each in moved:
        each.rename(each.with_suffix(".txt"))
    try:
        subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": search},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        found = sorted(trace.name for trace in traces.iterdir())
    finally:
        for each in moved:
            each.with_suffix(".txt").rename(each)
        for trace in traces.iterdir():
            trace.unlink()
    assert found == []


def test_as_a_module_only_what_python_needs_for_that_is_looked_for_there(trap, tmp_path):
    """`python -m` has the current folder on its path before anything of ours is asked."""
    folder, traces = trap
    code = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    write_files(tmp_path, {"bare.py": code})
    bare = finished_python("-m", "bare", cwd=tmp_path)
    loaded = {*bare.stdout.split(), "bnb_dispatch_fix"}
    assert "runpy" in loaded
    moved = [folder / f"{name}.py" for name in loaded if (folder / f"{name}.py").exists()]
    for each in moved:
        each.rename(each.with_suffix(".txt"))
    try:
        finished = finished_python("-m", "bnb_dispatch_fix", *COMMANDS[0], cwd=folder)
        found = sorted(trace.name for trace in traces.iterdir())
    finally:
        for each in moved:
            each.with_suffix(".txt").rename(each)
        for trace in traces.iterdir():
            trace.unlink()
    assert found == []
    assert refused(finished, "transformers cannot be imported")


def test_site_packages_stay_where_the_command_is_used_inside_them(tmp_path):
    code = (
        "import os, sys; from bnb_dispatch_fix.__main__ import leave_out_current_folder\n"
        f"os.chdir({str(tmp_path)!r}); standard = os.path.dirname(os.__file__)\n"
        f"sys.path[:] = ['', {str(tmp_path)!r}, 'x', standard, {str(tmp_path)!r}, b'y', None]\n"
        "leave_out_current_folder(); print(sys.path[0], sys.path[2:], sys.path[1] == standard)"
    )
    finished = finished_python("-c", code)
    assert finished.stdout == f"x ['{tmp_path}', b'y', None] True\n", finished.stderr


# --- config.json ------------------------------------------------------------------------------

BUDGET = ("--max-memory", "1x1GiB")


def test_a_pipe_is_not_waited_for(tmp_path, command):
    os.mkfifo(tmp_path / "config.json")
    assert refused(command("plan", tmp_path, *BUDGET), "no regular file")
    assert refused(command("plan", tmp_path / "config.json", *BUDGET), "no regular file")


def test_a_file_without_end(tmp_path, command):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert refused(command("plan", tmp_path, *BUDGET), "at most 16 MiB")
    assert refused(command("plan", "/dev/zero", *BUDGET), "at most 16 MiB")


def test_a_file_that_is_too_large(tmp_path, command):
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(17 * 2**20)
    assert refused(command("plan", tmp_path, *BUDGET), "larger than 16 MiB")


def test_another_release_s_configuration_is_looked_at_as_well(tmp_path, command):
    os.mkfifo(tmp_path / "config.9.0.0.json")
    names = {"configuration_files": ["config.9.0.0.json", 7]}
    (tmp_path / "config.json").write_text(json.dumps(names), encoding="utf-8")
    assert refused(command("plan", tmp_path, *BUDGET), "config.9.0.0.json: is no regular file")


@pytest.mark.parametrize("sign", ["[", '{"a":'])
def test_a_tree_that_is_too_deep(tmp_path, command, sign):
    (tmp_path / "config.json").write_text(sign * 200_000, encoding="utf-8")
    assert refused(command("plan", tmp_path, *BUDGET), "nested too deeply")


def test_a_folder_s_name_cannot_steer_the_terminal(tmp_path, command):
    folder = tmp_path / ESCAPE
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    finished = command("plan", ESCAPE, *BUDGET, cwd=tmp_path)
    assert refused(finished, r"\x1b]0;x\x07\x1b[2J/config.json: is no regular file")
    finished = command("autoload", "enable", "--path", f"/dev/null/{ESCAPE}")
    assert finished.returncode == 1
    assert r"\x1b]0;x\x07\x1b[2J: cannot be written" in finished.stderr
    for action in ("enable", "status", "disable"):
        finished = command("autoload", action, "--path", folder)
        assert r"\x1b]0;x\x07\x1b[2J" in finished.stdout
        assert finished.stdout.replace("\n", "").isprintable()


@pytest.mark.parametrize("arguments", [["status", ESCAPE], ["plan", "--bits", ESCAPE], [ESCAPE]])
def test_arguments_that_are_none_cannot_either(command, arguments):
    finished = command(*arguments)
    assert finished.returncode == 2
    assert finished.stderr.replace("\n", "").isprintable()


# --- a time limit, a folder, a Python ---------------------------------------------------------


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf"])
def test_a_time_limit_that_is_none(command, seconds):
    assert refused(command("doctor", "--timeout", seconds), "--timeout: expected a number")


@pytest.mark.parametrize("action", ["enable", "disable", "status"])
def test_an_empty_folder_name(command, tmp_path, action):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(command("autoload", action, "--path", "", cwd=empty), "expected a folder")
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("arguments", [["status"], ["plan", "."], ["autoload", "status"]])
def test_a_current_folder_that_is_gone(tmp_path, script, arguments):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
        f"os.execv(sys.executable, [sys.executable, {str(script)!r}, *{arguments!r}])"
    )
    assert refused(finished_python("-c", code), "the current folder cannot be used")


# --- output -----------------------------------------------------------------------------------


def shell(script, line):
    """Run a line of sh in which COMMAND stands for the command."""
    dependencies = Path(__import__("yaml").__file__).parent.parent
    run = f"{sys.executable} {script}"
    return subprocess.run(
        ["/bin/sh", "-c", line.replace("COMMAND", run)],
        env={**os.environ, "PYTHONPATH": f"{shim_folder()}{os.pathsep}{dependencies}"},
        capture_output=True,
        text=True,
        check=False,
    )


PLAN = "plan /no/such/model --max-memory 1x1GiB"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk here is always full")
@pytest.mark.parametrize("unbuffered", ["", "PYTHONUNBUFFERED=1 "])
@pytest.mark.parametrize("arguments", ["status", "status --json", "--help", "--version"])
def test_a_full_disk(script, arguments, unbuffered):
    finished = shell(script, f"{unbuffered}COMMAND {arguments} > /dev/full")
    assert refused(finished, "cannot be written: No space left on device")


@pytest.mark.parametrize("arguments", ["status", "autoload status", "--version"])
def test_stdout_that_is_closed(script, arguments):
    finished = shell(script, f"COMMAND {arguments} >&-")
    assert finished.returncode in (0, 2)
    assert (finished.returncode, finished.stderr) in (
        (2, "bnb-dispatch-fix: the answer cannot be written: stdout is closed\n"),
        (0, ""),  # --version: argparse says it and ends
    )
    assert (arguments == "--version") == (finished.returncode == 0)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_where_nothing_can_be_said_the_exit_code_is_right(script, closed):
    finished = shell(script, f"COMMAND {PLAN} {closed}")
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", "")


def test_an_answer_without_stderr(script):
    finished = shell(script, "COMMAND status 2>&-")
    assert finished.stdout.startswith("bnb-dispatch-fix ")
    assert finished.returncode == 0


def test_ascii_where_nothing_else_can_be_written(command):
    code = (
        "from bnb_dispatch_fix.planning import demo\nimport sys\n"
        "answer = {'versions': ['a 1'], 'applied': [], 'error': 'cut \\u2026', 'device_map': "
        "{'model.layers.0': 0, 'model.layers.1': 0}, 'loads_on_gpus': True}\n"
        "demo._run_child = lambda switch: answer\nsys.exit(demo.run_demo())"
    )
    finished = finished_python("-c", code, PYTHONIOENCODING="ascii:strict")
    assert finished.returncode == 0, finished.stderr
    assert "model.layers.0-1" in finished.stdout
    assert finished.stdout.isascii()


@pytest.mark.parametrize("columns", ["60", "", "nonsense", "0"])
def test_on_a_terminal_text_is_wrapped_at_words(script, tmp_path, columns):
    pty = pytest.importorskip("pty", reason="there are no terminals to pretend here")
    primary, secondary = pty.openpty()
    size = struct.pack("HHHH", 24, 72, 0, 0)
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, size)
    dependencies = Path(__import__("yaml").__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, str(script), "autoload", "enable", "--path", str(tmp_path / "site")],
        env={**os.environ, "COLUMNS": columns, "PYTHONPATH": f"{shim_folder()}:{dependencies}"},
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so where the other side is closed
        while True:
            part = os.read(primary, 4096)
            if not part:
                break
            shown += part
    os.close(primary)
    assert process.wait() == 1
    lines = shown.decode().splitlines()
    width = int(columns) if columns == "60" else 72
    spaced = [line for line in lines if " " in line.strip()]
    assert max(map(len, (line for line in spaced if str(tmp_path) not in line))) <= width
    words = " ".join(" ".join(lines).split())
    assert "it does not look at that folder, or does not find the package" in words


# --- signals ----------------------------------------------------------------------------------


@pytest.fixture
def planning(tmp_path, script):
    """A plan whose other process imports a transformers that never ends, and its lock."""
    lock, ready = str(tmp_path / "lock"), tmp_path / "ready"
    package = tmp_path / "package"
    write_files(package, {"transformers.py": SLEEPING.format(lock=lock, ready=str(ready))})
    write_files(tmp_path, {"config.json": '{"model_type": "llama"}'})
    dependencies = Path(__import__("yaml").__file__).parent.parent
    search = os.pathsep.join(map(str, (package, shim_folder(), dependencies)))
    process = subprocess.Popen(
        [sys.executable, str(script), "plan", str(tmp_path), *BUDGET],
        env={**os.environ, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ready.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    yield process, lock
    process.kill()
    process.communicate()


def wait_until_released(lock):
    """The other process held it from its first line on; it is free once that has ended."""
    with Path(lock).open("w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_to_the_command_alone_ends_the_other_process(planning, name):
    process, lock = planning
    number = getattr(signal, name)
    process.send_signal(number)
    output, errors = process.communicate()
    wait_until_released(lock)
    assert (process.returncode, output, errors) == (-number, "", "")


def test_ctrl_c_is_130_and_nothing_else(planning):
    process, lock = planning
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    wait_until_released(lock)
    assert (process.returncode, output, errors) == (130, "", "")


def test_a_program_that_plans_may_end_as_it_likes(tmp_path):
    """In Python nobody handles signals: the other process sees that its asker is gone."""
    lock, ready = str(tmp_path / "lock"), tmp_path / "ready"
    text = SLEEPING.format(lock=lock, ready=str(ready))
    write_files(tmp_path, {"transformers.py": text, "config.json": '{"model_type": "llama"}'})
    code = (
        "import os, threading, time, bnb_dispatch_fix\n"
        "def end():\n"
        f"    while not os.path.exists({str(ready)!r}): time.sleep(0.05)\n"
        "    os._exit(7)\n"
        "threading.Thread(target=end).start()\n"
        f"bnb_dispatch_fix.plan({str(tmp_path)!r}, max_memory='1x1GiB')"
    )
    assert finished_python("-c", code, paths=(tmp_path,)).returncode == 7
    wait_until_released(lock)


def test_a_signal_that_somebody_ignores_stays_ignored(script):
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from bnb_dispatch_fix import cli\n"
        "cli._status = lambda arguments: print(signal.getsignal(signal.SIGHUP), "
        "signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) or 0\n"
        "cli.main(['status']); print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    finished = finished_python("-c", code)
    words = re.sub(r"\s+", " ", finished.stdout)
    assert words.endswith("SIG_IGN True True ") or words == "1 True True ", finished
