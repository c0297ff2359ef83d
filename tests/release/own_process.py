"""Processes that start with torch imported and nothing of what is under test, one per script.

Importing torch is most of what a script would spend its time on; a server imports it once, and
every script runs in a fork of it.
"""

from __future__ import annotations

import multiprocessing
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from cell import QUIET

#: What transformers and accelerate import of torch; what a release of torch lacks is left out.
PRELOADED = ["torch", "torch.distributed.tensor", "torch._dynamo.aot_compile"]


def run(script, pipe):
    """In the process: run a script; answer what it has left in its list `answers`."""
    namespace = {}
    try:
        exec(script, namespace)
        pipe.send(namespace["answers"])
    except BaseException:  # noqa: BLE001  # the test tells what it was
        pipe.send(traceback.format_exc())


def answers(script, context):
    """What a script answers, in a process of its own."""
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(script, theirs))
    process.start()
    theirs.close()  # else nobody would notice a process that ends without an answer
    try:
        answered = ours.recv()
    except EOFError:
        answered = "no answer"
    process.join()
    assert isinstance(answered, list), f"exit code {process.exitcode}: {answered}"
    return answered


def answers_of(scripts):
    """What each script answers; two at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BNB_DISPATCH_FIX", raising=False)
        for name, value in QUIET.items():
            patch.setenv(name, value)
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda script: answers(script, context), scripts))
