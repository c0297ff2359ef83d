"""unsloth_zoo: transformers' `from_pretrained` beside what it patches, its guard included."""

from __future__ import annotations

import contextlib
import os

os.environ["UNSLOTH_ZOO_DISABLE_GPU_INIT"] = "1"

import bitsandbytes  # noqa: F401  # older ones put a stub there where it is not loaded
import unsloth_zoo  # noqa: F401
from tiny import PARTS, in_nf4, on_all_gpus
from transformers import AutoModelForCausalLM

from bnb_dispatch_fix.planning.simulation import simulated_gpus

PACKAGE = "unsloth_zoo"
#: Names that it wraps itself, where it was there first.
WRAPS: tuple[str, ...] = ()

with contextlib.suppress(ImportError, AttributeError):  # older ones do not
    from unsloth_zoo.temporary_patches import mxfp4

    mxfp4.patch_mxfp4_offload_guard()
    WRAPS = ("transformers.modeling_utils._get_device_map",)


def loads(folder):
    def call(strategy, max_memory):
        with simulated_gpus():
            AutoModelForCausalLM.from_pretrained(folder, **in_nf4(strategy, max_memory))

    return on_all_gpus(call, PARTS)
