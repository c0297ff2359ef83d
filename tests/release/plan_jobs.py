"""Jobs of `plan` about small models, to be carried out in this process."""

from __future__ import annotations

import planned
import pytest
import torch
import transformers

import bnb_dispatch_fix

MIB = 2**20


@pytest.fixture(autouse=True)
def as_before():
    default = torch.get_default_dtype()
    yield
    torch.set_default_dtype(default)
    bnb_dispatch_fix.deactivate()


def job(family, budget, **changes):
    """What `plan` is asked to do with one of the small models."""
    config, arguments, model = planned.FAMILIES[family]
    settings = getattr(transformers, config)(**arguments).to_dict()
    own = {"model_type": settings["model_type"], "architectures": [model]}
    return {
        "config": {**arguments, **own, "tie_word_embeddings": False},
        "strategy": "auto",
        "dtype": "bfloat16",
        "quantization": None,
        "max_memory": [[0, budget], [1, budget], ["cpu", 2**40]],
        **changes,
    }
