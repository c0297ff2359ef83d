"""Models without memory, also under torch before 2.0, where a device is no context manager."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from bnb_dispatch_fix.planning.simulation import replaced

#: What modules and models make their tensors with.
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def on_meta():
    """Within it, tensors are made on the meta device, unless another one is named."""
    return torch.device("meta") if hasattr(torch.device, "__enter__") else _factories_on_meta()


@contextmanager
def _factories_on_meta():
    with ExitStack() as stack:
        for name in _FACTORIES:
            stack.enter_context(replaced(torch, name, partial(_make, getattr(torch, name))))
        yield


def _make(factory, *args, device=None, **kwargs):
    return factory(*args, device="meta" if device is None else device, **kwargs)
