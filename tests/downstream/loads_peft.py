"""peft: an adapter over a 4-bit base that is offloaded is planned anew, in `peft.peft_model`."""

from __future__ import annotations

import contextlib
import tempfile

import bitsandbytes
import peft.peft_model
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import PlannedParts, on_all_gpus, tensors_of
from transformers import AutoModelForCausalLM

from bnb_dispatch_fix.planning.simulation import replaced, simulated_gpus

PACKAGE = "peft"
#: A base that is offloaded already may stay so.
REFUSES = False


def loads(folder):
    adapter = tempfile.mkdtemp()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(adapter)

    def call(strategy, max_memory):
        plan(four_bit(folder), adapter, strategy, max_memory)

    # The adapter is planned, too, and nobody refuses the CPU.
    return on_all_gpus(call, {}, share=1.0)


def four_bit(folder):
    """The base as `from_pretrained` converts it, its weights left out, offloaded to the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float16)
    for parent in list(model.model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear):
                packed = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, quant_type="nf4"
                )
                half = torch.empty((layer.weight.numel() + 1) // 2, 1, dtype=torch.uint8)
                packed.weight = bitsandbytes.nn.Params4bit(half, requires_grad=False)
                setattr(parent, name, packed)
    model.hf_device_map = {"": "cpu"}
    return model


def plan(base, adapter, strategy, max_memory):
    """Ends with the map that peft would dispatch to."""

    def stop(model, device_map=None, **_):
        raise PlannedParts(device_map, tensors_of(model))

    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_gpus())
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: False))
        stack.enter_context(replaced(peft.peft_model, "dispatch_model", stop))
        PeftModel.from_pretrained(base, adapter, device_map=strategy, max_memory=max_memory)
