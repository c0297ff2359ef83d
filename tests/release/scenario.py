"""Runs steps in the order given, in a fresh process, and prints one JSON list of their answers.

    python scenario.py transformers shim plan:auto:4 status

Steps: see `STEPS`. Order matters: nothing is imported before the step that needs it. The
simulation is loaded so that it does not activate the shim (see apart.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
import warnings
from functools import lru_cache

import apart


@lru_cache(maxsize=None)
def simulation():
    if "bnb_dispatch_fix" in sys.modules:
        return importlib.import_module("bnb_dispatch_fix.planning.simulation")
    return apart.module("planning.simulation")


@lru_cache(maxsize=None)
def checkpoint(**changes):
    folder = tempfile.TemporaryDirectory()
    simulation().build_checkpoint(folder.name, **changes)
    return folder


def plan(strategy="auto", bits="4"):
    """`from_pretrained` on eight small simulated GPUs."""
    budgets = simulation().EIGHT_SMALL_GPUS
    outcome = simulation().plan_checkpoint(
        checkpoint().name, budgets, device_map=strategy, bits=int(bits)
    )
    return {
        "device_map": outcome.device_map,
        "error": outcome.error and f"{type(outcome.error).__name__}: {outcome.error}",
        "loads_on_gpus": outcome.loads_on_gpus,
    }


def generate(device):
    """Tokens of a 4-bit model that is really loaded, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(intermediate_size=192).name,
        device_map="auto" if device == "auto" else {"": device},
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    linear = type(model.model.layers[0].self_attn.q_proj).__name__
    tokens = model.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)
    return {"linear": linear, "tokens": tokens.tolist()}


def planner():
    """The function that plans balanced caps, where the installed release calls it."""
    import transformers

    old = transformers.__version__.startswith("4.")
    name = "transformers.modeling_utils" if old else "transformers.integrations.accelerate"
    return importlib.import_module(name).get_balanced_memory


@lru_cache(maxsize=None)
def original():
    """The planner when this step first ran: put it before "shim"."""
    return planner()


def shim():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import bnb_dispatch_fix
    return bnb_dispatch_fix.__file__


def status():
    import bnb_dispatch_fix

    return bnb_dispatch_fix.status().as_dict()


def call(name):
    """`activate` or `deactivate`."""
    import bnb_dispatch_fix

    getattr(bnb_dispatch_fix, name)()


def import_auto_model():
    from transformers import AutoModelForCausalLM  # noqa: F401


STEPS = {
    "shim": shim,
    "transformers": import_auto_model,
    "remember": lambda: bool(original()),
    "same": lambda: planner() is original(),
    "plan": plan,
    "generate": generate,
    "status": status,
    "call": call,
}


def main(steps):
    logging.disable(logging.WARNING)
    answers = []
    for step in steps:
        name, *arguments = step.split(":")
        answers.append(STEPS[name](*arguments))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
