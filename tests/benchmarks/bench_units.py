"""Time to size a 4-bit model of 61,000 modules, as a ratio to the installed `compute_module_sizes`.

Run it in an environment with transformers, accelerate and bitsandbytes:
`python tests/benchmarks/bench_units.py`. The model has the shape of Qwen3-235B with one module per
expert, on the meta device. Both are timed in turns, the best of several runs counts.
"""

from __future__ import annotations

import json
import sys
import time

import bitsandbytes
import torch
import transformers
from accelerate.utils import CustomDtype
from torch import nn

from bnb_dispatch_fix.model.sizers import call_sizer, sizer_for
from bnb_dispatch_fix.model.units import measure

LAYERS, EXPERTS, HIDDEN, FFN = 94, 128, 4096, 1536
ROUNDS = 5


def four_bit(inputs, outputs):
    return bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = four_bit(HIDDEN, FFN)
        self.up_proj = four_bit(HIDDEN, FFN)
        self.down_proj = four_bit(FFN, HIDDEN)
        self.act = nn.SiLU()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(four_bit(HIDDEN, HIDDEN) for _ in range(4))
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(151_936, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(HIDDEN, 151_936, bias=False)

    def get_input_embeddings(self):
        return self.embed_tokens


def contestants(model):
    """The installed way to size the model and ours, each as a call."""
    if transformers.__version__.startswith("4."):
        from accelerate.utils import compute_module_sizes

        special = {"lm_head.weight": torch.float16}
        options = {"dtype": CustomDtype.INT4, "special_dtypes": special}
        return (
            lambda: compute_module_sizes(model, **options),
            lambda: units(model, call_sizer(model, **options)),
        )
    from transformers.integrations.accelerate import compute_module_sizes
    from transformers.quantizers.auto import AutoHfQuantizer

    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    return (
        lambda: compute_module_sizes(model, quantizer),
        lambda: units(model, sizer_for(model, quantizer, torch.float16)),
    )


def units(model, sizer):
    return measure(model, no_split_module_classes=["Layer"], sizer=sizer)


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def main():
    torch.set_default_dtype(torch.float16)
    with torch.device("meta"):
        model = Model()
    theirs, ours = contestants(model)
    timed = [(seconds(theirs), seconds(ours)) for _ in range(ROUNDS)]
    best_theirs, best_ours = (min(column) for column in zip(*timed))
    result = {
        "transformers": transformers.__version__,
        "modules": sum(1 for _ in model.modules()),
        "compute_module_sizes_s": round(best_theirs, 3),
        "measure_s": round(best_ours, 3),
        "ratio": round(best_ours / best_theirs, 3),
    }
    json.dump(result, sys.stdout)
    print()


if __name__ == "__main__":
    main()
