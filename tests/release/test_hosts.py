"""Programs that start programs: does the shim reach the process that plans?

Each host runs a script that asks, in the process that would plan, whether the planner is ours.
The shim comes in by `import bnb_dispatch_fix` at the top of the main script, by a start-up file
(`autoload enable`), or by `bnb-dispatch-fix run`. All of it runs in `nox -s hosts`, which
installs the hosts; a cell of the matrix runs the children that every program may have.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipapp
from pathlib import Path

import pytest
from cell import QUIET, installed

import bnb_dispatch_fix
from bnb_dispatch_fix.patching.matrix import matrix_path
from bnb_dispatch_fix.startup import autoload

pytestmark = pytest.mark.skipif(
    installed("torch") is None, reason="the planners cannot be imported: no torch"
)
PACKAGE = Path(bnb_dispatch_fix.__file__).parent
PURELIB = Path(sysconfig.get_paths()["purelib"])

#: accelerate's function is unfixed in every release, so that it is ours wherever the shim is.
ASK = """
def ask(_=None):
    import accelerate.utils.modeling as planner
    return type(vars(planner)["get_balanced_memory"]).__name__
"""
SHIM = "import bnb_dispatch_fix\n"
BARE = ASK + "print([ask()])\n"
#: For -S: what it leaves out, put on the path by hand.
PATH = f"import sys; sys.path += {[entry for entry in sys.path if entry]!r}\n"


def main(inside):
    return f"if __name__ == '__main__':\n    {inside}\n"


def children(method):
    """Children by multiprocessing."""
    pool = f"multiprocessing.get_context('{method}').Pool(1)"
    return ASK + main(f"import multiprocessing; print({pool}.map(ask, [0]))")


GUARDED = main("import bnb_dispatch_fix")
TORCH = "import torch.multiprocessing\ndef work(rank): print([ask()])\n"
TORCH += ASK + main("torch.multiprocessing.spawn(work, nprocs=1)")
FUTURES = ASK + main(
    "from concurrent.futures import ProcessPoolExecutor as P; print(list(P(1).map(ask, [0])))"
)
LOKY = ASK + main("import loky; print(list(loky.ProcessPoolExecutor(1).map(ask, [0])))")
XDIST = ASK + "def test_it():\n    print([ask()])\n"
KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
try:
    def show(message):
        if message["msg_type"] == "stream": print(message["content"]["text"], end="")
    client.execute_interactive(open(sys.argv[1]).read(), output_hook=show, timeout=240)
finally:
    client.stop_channels(); manager.shutdown_kernel(now=True)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "SCRIPT")
LAUNCH = "-m accelerate.commands.launch --cpu --num_processes=1 --num_machines=1"
LAUNCH = (*LAUNCH.split(), "--mixed_precision=no", "--dynamo_backend=no", "SCRIPT")
WORKERS = ("-m", "pytest", "-q", "-rP", "-n1", "-p", "no:cacheprovider", "SCRIPT")

OURS, PLAIN = "['PatchedFunction']", "['function']"


def host(name, text, command=("SCRIPT",), output=OURS, needs=("loky", "ipykernel", "xdist")):
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    reason = f"runs in nox -s hosts; not installed here: {', '.join(missing)}"
    marks = [pytest.mark.skipif(bool(missing), reason=reason)]
    if "fork" in name:
        marks.append(pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"))
    return pytest.param(text, command, output, id=name, marks=marks)


IMPORTED = [
    host("script", SHIM + BARE, needs=()),
    host("-I", SHIM + BARE, ("-I", "SCRIPT")),
    host("-E", SHIM + BARE, ("-E", "SCRIPT")),
    host("-S", PATH + SHIM + BARE, ("-S", "SCRIPT")),
    host("spawn", SHIM + children("spawn"), needs=()),
    host("fork", SHIM + children("fork"), needs=()),
    host("forkserver", SHIM + children("forkserver")),
    host("spawn, imported under the main guard", GUARDED + children("spawn"), output=PLAIN),
    host("fork, imported under the main guard", GUARDED + children("fork")),
    host("concurrent.futures", SHIM + FUTURES),
    host("loky, whose workers do not import the main script", SHIM + LOKY, output=PLAIN),
    host("torch.multiprocessing", SHIM + TORCH),
    host("torchrun", SHIM + BARE, TORCHRUN, f"{OURS}\n{OURS}"),
    host("accelerate launch", SHIM + BARE, LAUNCH),
    host("pytest-xdist", SHIM + XDIST, WORKERS),
    host("ipykernel", SHIM + BARE, ("KERNEL", "SCRIPT")),
    host("zipapp", SHIM + BARE, ("ZIPAPP",)),
    host("zipapp with the shim inside", SHIM + BARE, ("ZIPAPP_WITH_SHIM",)),
]

STARTED = [
    host("script", BARE, needs=()),
    host("-I", BARE, ("-I", "SCRIPT")),
    host("-E", BARE, ("-E", "SCRIPT")),
    host("-S, which leaves start-up files out", PATH + BARE, ("-S", "SCRIPT"), PLAIN),
    host("spawn", children("spawn")),
    host("fork", children("fork")),
    host("forkserver", children("forkserver")),
    host("concurrent.futures", FUTURES),
    host("loky", LOKY),
    host("torch.multiprocessing", TORCH),
    host("torchrun", BARE, TORCHRUN, f"{OURS}\n{OURS}"),
    host("accelerate launch", BARE, LAUNCH),
    host("pytest-xdist", XDIST, WORKERS),
    host("ipykernel", BARE, ("KERNEL", "SCRIPT")),
    host("zipapp", BARE, ("ZIPAPP",)),
]

RUN = [
    host("script", BARE, needs=()),
    host("spawn", children("spawn"), needs=()),
    host("fork", children("fork")),
    host("forkserver", children("forkserver")),
    host("concurrent.futures", FUTURES),
    host("loky", LOKY),
    host("torch.multiprocessing", TORCH),
    host("torchrun", BARE, TORCHRUN, f"{OURS}\n{OURS}"),
    host("accelerate launch", BARE, LAUNCH),
    host("pytest-xdist", XDIST, WORKERS),
    host("ipykernel", BARE, ("KERNEL", "SCRIPT")),
    host("zipapp", BARE, ("ZIPAPP",)),
]


def answer(folder, text, command, *before):
    """What a host printed of the answers, in the order of their processes."""
    script = folder / "script_test.py"
    script.write_text(text)
    (folder / "kernel.py").write_text(KERNEL)
    files = {"SCRIPT": script, "KERNEL": folder / "kernel.py"}
    for word in ("ZIPAPP", "ZIPAPP_WITH_SHIM"):
        if word in command:
            files[word] = zipped(folder, text, with_shim="SHIM" in word)
    finished = subprocess.run(
        [sys.executable, *before, *(str(files.get(word, word)) for word in command)],
        env={**os.environ, **QUIET, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return "\n".join(line for line in finished.stdout.splitlines() if line.startswith("['"))


def zipped(folder, text, with_shim):
    app = folder / "app"
    app.mkdir()
    (app / "__main__.py").write_text(text)
    if with_shim:
        inside = app / "bnb_dispatch_fix"
        shutil.copytree(PACKAGE, inside, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(matrix_path(), inside)
    zipapp.create_archive(app, folder / "app.pyz")
    return folder / "app.pyz"


@pytest.mark.parametrize("text, command, output", IMPORTED)
def test_with_an_import_at_the_top(tmp_path, text, command, output):
    assert answer(tmp_path, text, command) == output


@pytest.fixture(scope="module")
def autoloaded():
    if PACKAGE.parent != PURELIB:
        pytest.skip(f"the shim is not in {PURELIB}: it is a checkout or a user install")
    before = autoload.state(PURELIB)
    autoload.enable(PURELIB)
    yield
    if before != "enabled":
        autoload.disable(PURELIB)


@pytest.mark.usefixtures("autoloaded")
@pytest.mark.parametrize("text, command, output", STARTED)
def test_unedited_with_a_start_up_file(tmp_path, text, command, output):
    assert answer(tmp_path, text, command) == output


@pytest.mark.parametrize("text, command, output", RUN)
def test_unedited_under_run(tmp_path, text, command, output):
    assert answer(tmp_path, text, command, "-m", "bnb_dispatch_fix", "run") == output
