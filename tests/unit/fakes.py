"""Small packages called transformers and accelerate, and programs that run beside them.

Their functions are this file's own, and programs get a copy of the shim whose matrix knows them.
What real releases do is tested in tests/release.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import bnb_dispatch_fix
from bnb_dispatch_fix.patching.recognition import fingerprint_text

PLANNER = "transformers.integrations.accelerate"

#: A planner with a signature and helpers as the backport needs them; it answers "installed".
PLANNER_SOURCE = '''
def get_max_memory(max_memory=None):
    return dict(max_memory)

def compute_module_sizes(model, hf_quantizer=None):
    return {"": 100, "block": 20}, {"head": 40}

def get_balanced_memory(model, max_memory=None, no_split_module_classes=None, hf_quantizer=None,
                        low_zero=False):
    """Fake planner."""
    return "installed"
'''
#: 100 bytes on two devices, the largest leaf 40: 100 // 2 + int(1.25 * 40).
BACKPORTED = {0: 100, 1: 1000}

SEAM = {
    "id": "fake",
    "features": ["backport"],
    "package": "transformers",
    "versions": ">=5",
    "module": PLANNER,
    "attribute": "get_balanced_memory",
    "implementation": "transformers.get_balanced_memory",
    "fixes": [47203, 47211],
}

#: Asks the planner in the way that leads to BACKPORTED or "installed".
PLAN = """
def plan():
    import transformers.integrations.accelerate as planner
    return planner.get_balanced_memory(None, {0: 1000, 1: 1000})

def state():
    return [(patch.state, patch.reason) for patch in bnb_dispatch_fix.status().patches]
"""


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def fake_packages(folder: Path, planner: str = PLANNER_SOURCE) -> Path:
    """A folder with transformers 5.12.1 and accelerate 1.14.0."""
    write_files(
        folder,
        {
            "transformers/__init__.py": '__version__ = "5.12.1"\nfrom . import utils\n',
            "transformers/utils.py": "",
            "transformers/integrations/__init__.py": "",
            "transformers/integrations/accelerate.py": planner,
            "accelerate/__init__.py": '__version__ = "1.14.0"\nfrom . import state\n',
            "accelerate/state.py": "",
        },
    )
    return folder


@functools.lru_cache(maxsize=None)
def shim_folder() -> Path:
    """A folder with a copy of the shim whose matrix knows the planner above, and only that."""
    folder = Path(tempfile.mkdtemp(prefix="bnb-dispatch-fix-"))
    atexit.register(shutil.rmtree, str(folder), ignore_errors=True)
    copy = folder / "bnb_dispatch_fix"
    shutil.copytree(str(Path(bnb_dispatch_fix.__file__).parent), str(copy))
    fingerprint = fingerprint_text(PLANNER_SOURCE, "get_balanced_memory")
    body = {"fingerprint": fingerprint, "lacks": [47203, 47211], "releases": ["5.12.1"]}
    matrix: dict[str, Any] = {
        "schema": 1,
        "fixes": [
            {"pr": 47203, "package": "transformers", "first": "5.14.0", "what": "a"},
            {"pr": 47211, "package": "transformers", "first": "5.18.0", "what": "b"},
        ],
        "seams": [SEAM],
        "implementations": {SEAM["implementation"]: [body]},
    }
    (copy / "compat_matrix.yaml").write_text(yaml.safe_dump(matrix), encoding="utf-8")
    return folder


def shim_with(folder: Path, seams: list[dict[str, Any]]) -> Path:
    """A copy of the shim of `shim_folder` in a folder of its own, with these seams."""
    shutil.copytree(str(shim_folder() / "bnb_dispatch_fix"), str(folder / "bnb_dispatch_fix"))
    path = folder / "bnb_dispatch_fix" / "compat_matrix.yaml"
    matrix = {**yaml.safe_load(path.read_text("utf-8")), "seams": seams}
    path.write_text(json.dumps(matrix), encoding="utf-8")  # YAML would have aliases
    return folder


def run_python(
    code: str, *paths: Path, options: tuple[str, ...] = (), **environment: str
) -> list[str]:
    """Run a program in a Python of its own; its lines of output. It must end well and in time."""
    finished = finished_python("-c", code, paths=paths, options=options, **environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr == "", finished.stderr
    return finished.stdout.splitlines()


def finished_python(
    *arguments: str,
    paths: tuple[Path, ...] = (),
    options: tuple[str, ...] = (),
    cwd: Path | None = None,
    python: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python, this one or another; `paths` and the shim come first on its path."""
    dependencies = () if python is None else (Path(yaml.__file__).parent.parent,)
    path = os.pathsep.join(map(str, (*paths, shim_folder(), *dependencies)))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BNB_DISPATCH_FIX")}
    return subprocess.run(
        [str(python or sys.executable), *options, *arguments],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd or shim_folder(),  # where `python -c` looks first
    )
