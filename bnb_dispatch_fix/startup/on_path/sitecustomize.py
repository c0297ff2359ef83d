"""Activates the shim in a program begun with `bnb-dispatch-fix run`, and in its children.

Python imports this file because runner.py put its folder on PYTHONPATH. It leaves `sys.path` as
it would be without, and gives way to a `sitecustomize` that the environment has of its own.
"""

# ruff: noqa: PTH100, PTH120  # pathlib is not to be loaded at every start

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_here)))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
sys.path.insert(0, _root)  # the package may be there by virtue of the current folder only
try:
    import bnb_dispatch_fix  # noqa: F401
except Exception:  # noqa: BLE001, S110  # it may be broken: the program runs without it
    pass  # it may be broken: the program runs without it
finally:
    sys.path.remove(_root)

# Python takes it for none being there when this import finds none.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: E402, F401
