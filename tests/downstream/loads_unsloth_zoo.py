"""unsloth_zoo: transformers' `from_pretrained` beside what it patches, its guard included."""

from __future__ import annotations

import contextlib
import os

os.environ["UNSLOTH_ZOO_DISABLE_GPU_INIT"] = "1"

import bitsandbytes  # noqa: F401  # older ones put a stub there where it is not loaded
import unsloth_zoo  # noqa: F401
from tiny import GPUS, PARTS, STRATEGIES, Load, budgets, nf4, rooms
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
    for strategy in STRATEGIES:
        for count, mib in GPUS:
            max_memory = budgets(count, mib)

            def call(strategy=strategy, max_memory=max_memory):
                with simulated_gpus():
                    AutoModelForCausalLM.from_pretrained(
                        folder,
                        device_map=strategy,
                        max_memory=dict(max_memory),
                        quantization_config=nf4(),
                    )

            yield Load(f"{strategy} {count}x{mib}", call, PARTS, rooms(max_memory))
