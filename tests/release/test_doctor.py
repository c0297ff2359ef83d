"""The doctor in the installed release: healthy, with a library that came first, with a ruin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from cell import STANDS_FOR_OTHERS

pytest.importorskip("torch", reason="its findings of torch are the subject")

if not STANDS_FOR_OTHERS:
    pytest.skip("it looks at the same things in every release", allow_module_level=True)

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
    assert levels(topics["transformers"]) == {"PASS"}


def test_a_broken_torch_breaks_all_and_is_named(tmp_path):
    source = "raise OSError('libcudart.so.12: cannot open shared object file')"
    (tmp_path / "torch.py").write_text(source, encoding="utf-8")
    code, topics = doctor(path=tmp_path)
    assert code == 1
    assert "libcudart.so.12" in topics["torch"][0]["text"]
    assert topics["accelerate"][0]["level"] == "ERROR"
    assert "seams" not in topics or levels(topics["seams"]) <= {"PASS", "WARN"}
