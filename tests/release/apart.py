"""Loads modules of the package without importing the package itself, which would activate the shim.

For control runs: what they use of it, such as the simulated GPUs, must not repair anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types


def module(name):
    """`bnb_dispatch_fix.NAME`, loaded under a stand-in for the package that is gone afterwards."""
    assert "bnb_dispatch_fix" not in sys.modules, "the shim is active already"
    package = importlib.util.find_spec("bnb_dispatch_fix")
    stand_in = types.ModuleType("bnb_dispatch_fix")
    stand_in.__path__ = list(package.submodule_search_locations)
    sys.modules["bnb_dispatch_fix"] = stand_in
    try:
        return importlib.import_module(f"bnb_dispatch_fix.{name}")
    finally:
        for loaded in [key for key in sys.modules if key.partition(".")[0] == "bnb_dispatch_fix"]:
            del sys.modules[loaded]
