"""A plugin of pytest: every test sees GPUs, as far as planning goes; the shim is there, too."""

from __future__ import annotations

import contextlib

import torch

from bnb_dispatch_fix.planning.simulation import replaced, simulated_gpus

STACK = contextlib.ExitStack()


def pytest_configure():
    STACK.enter_context(simulated_gpus())
    STACK.enter_context(replaced(torch.cuda, "is_available", lambda: True))


def pytest_unconfigure():
    STACK.close()
