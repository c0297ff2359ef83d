"""Processes that start with torch imported and nothing of what is under test, one per script.

Importing torch is most of what a script would spend its time on; a server imports it once, and
every script runs in a fork of it.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from cell import QUIET

#: What transformers and accelerate import of torch; what a release of torch lacks is left out.
PRELOADED = ["torch", "torch.distributed.tensor", "torch._dynamo.aot_compile"]


def answers(script):
    """Run a script; what it has left in its list `answers`."""
    namespace = {}
    exec(script, namespace)
    return namespace["answers"]


def answers_of(scripts):
    """What each script answers, in a process of its own; two at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BNB_DISPATCH_FIX", raising=False)
        for name, value in QUIET.items():
            patch.setenv(name, value)
        # One task per process: the next script must not find what this one has imported.
        with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
            return list(pool.map(answers, scripts))
