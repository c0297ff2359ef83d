"""The doctor in the installed release: healthy, with a library that came first, with a ruin."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cell import STANDS_FOR_OTHERS, installed
from packaging.version import Version

pytest.importorskip("torch", reason="its findings of torch are the subject")

if not STANDS_FOR_OTHERS:
    pytest.skip("it looks at the same things in every release", allow_module_level=True)

ACCELERATE = Version(installed("accelerate") or "0")

#: A library that takes accelerate's function by name before the shim is imported.
LATE = """
import sys, types, json
import accelerate.utils.modeling
library = types.ModuleType("some_library")
library.balance = accelerate.utils.modeling.get_balanced_memory
sys.modules["some_library"] = library
from bnb_dispatch_fix import doctor
print(json.dumps(doctor.examine().as_dict()))
"""


def doctor(*command, path="", **environment):
    """The exit code and the findings by topic."""
    python_path = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    finished = subprocess.run(
        [sys.executable, *(command or ("-m", "bnb_dispatch_fix", "doctor", "--json"))],
        env={**os.environ, "PYTHONPATH": python_path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout, finished.stderr
    told = json.loads(finished.stdout[finished.stdout.index("{") :])
    topics = {}
    for finding in told["findings"]:
        topics.setdefault(finding["topic"], []).append(finding)
    return finished.returncode, topics


def levels(findings):
    return {finding["level"] for finding in findings}


@pytest.fixture(scope="module")
def healthy():
    return doctor("-c", LATE)[1]


def test_a_cell_is_healthy_but_for_its_gpu(healthy):
    assert levels(healthy["torch"]) == levels(healthy["transformers"]) == {"PASS"}
    assert levels(healthy["accelerate"]) == levels(healthy["tested"]) == {"PASS"}
    assert levels(healthy["devices"]) == levels(healthy["bitsandbytes"]) == {"WARN"}
    assert "without its GPU library" in healthy["bitsandbytes"][0]["text"]


def test_every_seam_is_applied_or_fixed(healthy):
    assert healthy["seams"]
    for finding in healthy["seams"]:
        assert finding["level"] == "PASS", finding
        assert finding["text"].startswith(("applied: ", "already-fixed: "))
    assert levels(healthy["patchers"]) == {"PASS"}


def test_a_library_that_came_first_is_named(healthy):
    assert [finding["text"] for finding in healthy["references"]] == [
        "some_library.balance holds the unpatched function"
    ]
    assert levels(healthy["references"]) == {"WARN"}


def test_a_broken_bitsandbytes(tmp_path):
    source = "raise RuntimeError('CUDA Setup failed despite GPU being available')"
    (tmp_path / "bitsandbytes.py").write_text(source, encoding="utf-8")
    code, topics = doctor(path=tmp_path)
    assert code == 1
    (finding,) = topics["bitsandbytes"]
    assert finding["level"] == "ERROR"
    assert "CUDA Setup failed" in finding["text"]
    assert_only_bitsandbytes_is_broken(topics)


def assert_only_bitsandbytes_is_broken(topics):
    """transformers is well; accelerate 0.21 imports bitsandbytes, and transformers imports that."""
    for package in ("accelerate", "transformers"):
        broken = [finding for finding in topics[package] if finding["level"] == "ERROR"]
        hints = {finding["hint"] for finding in broken}
        assert hints <= {"bitsandbytes is what breaks it, see above"}
        if Version("0.21.0") != ACCELERATE:
            assert not broken


#: The installed torch, built for CUDA and with a GPU that answers; one that triton is not made for.
WITH_A_GPU = """
import importlib.util, sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
here = str(Path(__file__).parent)
spec = PathFinder.find_spec("torch", [path for path in sys.path if path != here])
module = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.version.cuda = module.version.cuda or "12.6"
module.cuda.is_available = lambda: True
module._C._cuda_getCurrentRawStream = lambda *_: 0
module.cuda.device_count = lambda: 1
module.cuda.get_device_name = lambda *_: "Tesla P40"
module.cuda.current_device = lambda: 0
module.cuda.get_device_capability = lambda *_: (6, 1)
module.cuda.get_device_properties = lambda *_: SimpleNamespace(major=6, minor=1)
module.cuda.mem_get_info = lambda *_: (14 * 2**30, 15 * 2**30)
"""


def test_a_bitsandbytes_for_the_cpu_beside_a_gpu(tmp_path):
    """The installed bitsandbytes without its libraries for CUDA: old ones raise at the import."""
    (tmp_path / "torch.py").write_text(WITH_A_GPU, encoding="utf-8")
    origin = importlib.util.find_spec("bitsandbytes").origin
    no_cuda = shutil.ignore_patterns("libbitsandbytes_cuda*", "libbitsandbytes_rocm*")
    shutil.copytree(Path(origin).parent, tmp_path / "bitsandbytes", ignore=no_cuda)
    code, topics = doctor(path=tmp_path)
    assert code == 1
    assert topics["devices"][0]["text"] == "0: Tesla P40, 14.00 of 15.00 GiB free"
    (finding,) = topics["bitsandbytes"]
    assert finding["level"] == "ERROR"
    version = installed("bitsandbytes")
    assert finding["text"].startswith(f"{version}, without its GPU library") or (
        f"{version} cannot be imported: RuntimeError: CUDA Setup failed" in finding["text"]
    )
    assert finding["hint"].startswith("it was installed without any library for CUDA")
    assert finding["hint"].endswith(f"bitsandbytes=={version}")


def test_a_broken_torch_breaks_all_and_is_named(tmp_path):
    source = "raise OSError('libcudart.so.12: cannot open shared object file')"
    (tmp_path / "torch.py").write_text(source, encoding="utf-8")
    code, topics = doctor(path=tmp_path)
    assert code == 1
    assert "libcudart.so.12" in topics["torch"][0]["text"]
    assert topics["accelerate"][0]["level"] == "ERROR"
    assert "seams" not in topics or levels(topics["seams"]) <= {"PASS", "WARN"}
