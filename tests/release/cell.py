"""What a cell has installed, and Python processes of its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

HERE = Path(__file__).parent
#: No network, no chatter; several processes on few cores: more threads would only wait.
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


TRANSFORMERS = Version(installed("transformers") or "0")
#: The rest is as old as its torch: these environments are alike to no other.
LEGACY = Version(installed("torch") or "99") < Version("2.9")
#: One release of each way to plan, and the newest ones: for what takes long and is alike in others.
STANDS_FOR_OTHERS = (
    LEGACY
    or TRANSFORMERS.release[:2] in {(4, 44), (4, 57), (5, 12)}
    or Version("5.24") <= TRANSFORMERS
)


def run(command, **environment):
    """Run Python with arguments in a clean environment; its stdout, or a failure that tells all."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BNB_DISPATCH")}
    result = subprocess.run(
        [sys.executable, *command],
        env={**clean, **QUIET, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if result.returncode:
        pytest.fail(f"{command} ended with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout
