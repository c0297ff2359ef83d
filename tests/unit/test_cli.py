"""The command as a part of a pipeline: what goes to stdout, and a reader that has seen enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fakes import PLANNER_SOURCE, fake_packages, finished_python, shim_folder, write_files

#: As bitsandbytes 0.42.0 does where there is no GPU.
NOISY = "print('libbitsandbytes_cpu.so: undefined symbol')\n" + PLANNER_SOURCE


def noisy(folder):
    fake_packages(folder, NOISY)
    files = {
        "transformers-5.12.1.dist-info/METADATA": "Name: transformers\nVersion: 5.12.1",
        "transformers/modeling_utils.py": "",  # or the doctor finds it broken and goes no further
    }
    write_files(folder, files)
    return folder


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_what_packages_print_while_imported_is_no_part_of_the_answer(tmp_path, command):
    asked = ["-m", "bnb_dispatch_fix", command, "--json"]

    finished = finished_python(*asked, paths=(noisy(tmp_path),))

    assert json.loads(finished.stdout)["version"]


def test_it_is_said_on_stderr_all_the_same(tmp_path):
    finished = finished_python("-m", "bnb_dispatch_fix", "status", paths=(noisy(tmp_path),))

    assert "undefined symbol" in finished.stderr
    assert "undefined symbol" not in finished.stdout
    assert finished.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="pipes there have no reader that leaves early")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--help"]])
def test_a_reader_that_leaves_early_is_one_line(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "bnb_dispatch_fix", *arguments],
        cwd=str(shim_folder()),
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)

    _, errors = process.communicate(timeout=120)

    assert errors == ("bnb-dispatch-fix: the answer cannot be written: nobody reads it any more\n")
    assert process.returncode == 2
