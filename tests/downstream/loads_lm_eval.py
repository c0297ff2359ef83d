"""lm-evaluation-harness: `HFLM(parallelize=True)` makes budgets of its own for transformers."""

from __future__ import annotations

import json
import os
import pathlib

import torch
from lm_eval.models.huggingface import HFLM
from tiny import GPUS, PARTS, Load, budgets, nf4, rooms, tokenizer

from bnb_dispatch_fix.planning.simulation import replaced, simulated_gpus

PACKAGE = "lm_eval"
#: Its Accelerator would wake a GPU up.
os.environ["ACCELERATE_USE_CPU"] = "true"


def loads(folder):
    folder = quantized(folder)
    for count, mib in GPUS:
        max_memory = budgets(count, mib)

        def given(count=count, max_memory=max_memory):
            with simulated_gpus(), replaced(torch.cuda, "device_count", lambda: count):
                harness(folder, max_memory_per_gpu=max_memory[0], max_cpu_memory=max_memory["cpu"])

        def free(max_memory=max_memory):
            with simulated_gpus(max_memory):
                harness(folder)

        yield Load(f"given {count}x{mib}", given, PARTS, rooms(max_memory))
        # accelerate takes a tenth of what is free, the harness gives the rest as max_memory.
        yield Load(f"free {count}x{mib}", free, PARTS, rooms(max_memory))


def quantized(folder):
    """A checkpoint whose configuration says nf4: newer harnesses take no argument that does."""
    file = pathlib.Path(folder) / "config.json"
    settings = {**json.loads(file.read_text()), "quantization_config": nf4().to_dict()}
    file.write_text(json.dumps(settings))
    return folder


def harness(folder, **asked):
    return HFLM(pretrained=folder, tokenizer=tokenizer(), parallelize=True, **asked)
