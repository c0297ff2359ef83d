"""What `import bnb_dispatch_fix` loads in a program that never uses transformers."""

from __future__ import annotations

import pytest
from fakes import fake_packages, finished_python, run_python, shim_folder

OWN = ["bnb_dispatch_fix", "bnb_dispatch_fix.features", "bnb_dispatch_fix.tripwire"]
LOADED = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, {str(shim_folder())!r})
import bnb_dispatch_fix
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-s",)])
def test_only_the_package_itself_is_loaded(options):
    [loaded] = run_python(LOADED, options=options)

    assert loaded.split() == OWN


def test_a_bare_interpreter_loads_nothing_more_than_os():
    bare = "import sys; before = set(sys.modules); import os; print(*set(sys.modules) - before)"
    [os_and_its_own] = run_python(bare, options=("-I", "-S"))
    [loaded] = run_python(LOADED, options=("-I", "-S"))

    assert set(loaded.split()) == {*OWN, *os_and_its_own.split()}


def test_importtime_lists_three_modules_more():
    def listed(code):
        finished = finished_python("-X", "importtime", "-c", code)
        return [line.split("|")[-1].strip() for line in finished.stderr.splitlines()]

    bare = listed("pass")
    more = [name for name in listed("import bnb_dispatch_fix") if name not in bare]

    assert more == [*OWN[1:], OWN[0]]


def test_off_means_that_nothing_waits(tmp_path):
    code = """
import sys
line = list(sys.meta_path)
import bnb_dispatch_fix
import transformers.integrations.accelerate
print(sys.meta_path == line, "wrapt" in sys.modules)
"""
    folder = fake_packages(tmp_path)
    for off in ("off", "0", " OFF ", "false", "no", "none"):
        assert run_python(code, folder, BNB_DISPATCH_FIX=off) == ["True False"], off


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_probe_loads_nothing(tmp_path, package):
    code = f"""
import importlib.util, sys
import bnb_dispatch_fix
assert importlib.util.find_spec({package!r}) is not None
print([name for name in ("wrapt", "yaml", "packaging", {package!r}) if name in sys.modules])
import {package}
print("bnb_dispatch_fix.activation" in sys.modules)
"""
    assert run_python(code, fake_packages(tmp_path)) == ["[]", "True"]
