"""Generates from a checkpoint that lies on the disk as a whole, and prints what came of it.

Run in a process of its own: `python whole_disk.py`; the shim is imported unless it is switched off.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import bnb_dispatch_fix  # noqa: F401

NAMES = {"model": "disk", "lm_head": "disk"}
ROOT = {"": "disk"}


def model(tied):
    """A Llama of four small layers, fp32 so that tokens do not depend on rounding."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(model):
    ids = torch.arange(1, 9)[None]
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False).tolist()


def attempt(load):
    """Tokens, where the weights are and the map of the model that `load` gives; or its error."""
    try:
        loaded = load()
        return {
            "tokens": tokens(loaded),
            "weights": sorted({parameter.device.type for parameter in loaded.parameters()}),
            "device_map": loaded.hf_device_map,
        }
    except Exception as error:  # noqa: BLE001  # any error is the outcome
        return {"error": f"{type(error).__name__}: {error}"}


def attempts(tied, folder):
    """Each way that leads to `dispatch_model`."""
    import accelerate

    whole = model(tied)
    checkpoint = folder / "checkpoint"
    whole.save_pretrained(checkpoint)

    def from_pretrained(device_map):
        return transformers.LlamaForCausalLM.from_pretrained(
            checkpoint, device_map=device_map, offload_folder=str(folder / "offload")
        )

    return {
        "expected": tokens(whole),
        "from_pretrained names": attempt(lambda: from_pretrained(dict(NAMES))),
        "from_pretrained root": attempt(lambda: from_pretrained(dict(ROOT))),
        "dispatch_model": attempt(
            lambda: accelerate.dispatch_model(model(tied), dict(ROOT), offload_dir=folder / "own")
        ),
    }


if __name__ == "__main__":
    answers = {}
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            answers["tied" if tied else "untied"] = attempts(tied, Path(folder))
    json.dump(answers, sys.stdout)
