"""Models on the meta device that every release must size alike; built of torch.nn only.

They have real sizes and no weights. `MODELS` names them; `quantizer()` is the real bitsandbytes
quantizer that goes with those named "... nf4".
"""

from __future__ import annotations

import torch
from meta import on_meta
from torch import nn

#: The class that may not be split, where a model has one.
BLOCK = "Block"
#: The classes that `largest_made_first` gives the largest block and the largest leaf.
LABELS = {"LargestBlock", "LargestLeaf"}
#: How callers pass the classes that may not be split.
FORMS = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "str": lambda names: names[0] if names else None,
    "None": lambda names: None,
}


class Block(nn.Module):
    """A decoder block: attention, feed-forward or fused experts, norms, a scale of its own."""

    def __init__(self, hidden, ffn, linear, experts=0):
        super().__init__()
        self.attention = nn.ModuleList(linear(hidden, hidden) for _ in range(4))
        if experts:
            self.experts = Experts(hidden, ffn, experts)
        else:
            self.feed_forward = nn.ModuleList([linear(hidden, ffn), linear(ffn, hidden)])
        self.norm = nn.LayerNorm(hidden)
        self.scale = nn.Parameter(torch.empty(hidden))


class Experts(nn.Module):
    """Experts in one tensor each way, as transformers 5 holds them: bitsandbytes skips these."""

    def __init__(self, hidden, ffn, experts):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, 2 * ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, hidden))


class Decoder(nn.Module):
    """Embedding, blocks, norm, a non-persistent buffer, and a head."""

    def __init__(self, blocks, hidden, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("frequencies", torch.empty(hidden), persistent=False)
        self.head = nn.Linear(hidden, vocabulary, bias=False)


def decoder(*, layers, hidden, ffn, vocabulary, experts_after=None, linear=nn.Linear):
    """A decoder whose blocks from `experts_after` on have 8 experts instead of one."""
    first_with_experts = layers if experts_after is None else experts_after
    blocks = [
        Block(hidden, ffn, linear, experts=0 if index < first_with_experts else 8)
        for index in range(layers)
    ]
    return Decoder(blocks, hidden, vocabulary)


def four_bit(inputs, outputs):
    import bitsandbytes

    return bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False)


def quantizer():
    """The 4-bit quantizer of the installed transformers, as `from_pretrained` makes it."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_4bit=True))


def tiny(**changes):
    return decoder(**{"layers": 8, "hidden": 64, "ffn": 176, "vocabulary": 8192, **changes})


def tied():
    model = tiny()
    model.head.weight = model.embed.weight
    return model


def declared_tied():
    """Not tied yet, but said to be: the state of a 5.x model when it is planned."""
    model = tiny()
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    return model


def moe(**changes):
    """The first of six blocks has no experts: the first instance is far from the largest."""
    return tiny(layers=6, hidden=1024, ffn=2048, vocabulary=32000, experts_after=1, **changes)


def big_embedding(**changes):
    return tiny(layers=4, hidden=2304, ffn=9216, vocabulary=256000, **changes)


def root_parameter():
    model = tiny(layers=2)
    model.prompt = nn.Parameter(torch.empty(1000, 64))
    return model


def one_leaf():
    return nn.Linear(4096, 4096)


def no_parameters():
    return nn.Sequential(nn.GELU(), nn.Dropout())


MODELS = {
    "tiny": tiny,
    "tied": tied,
    "declared tied": declared_tied,
    "moe": moe,
    "big embedding": big_embedding,
    "root parameter": root_parameter,
    "one leaf": one_leaf,
    "no parameters": no_parameters,
    "tiny nf4": lambda: tiny(linear=four_bit),
    "moe nf4": lambda: moe(linear=four_bit),
    "big embedding nf4": lambda: big_embedding(linear=four_bit),
}


def largest_made_first(name, classes, sizes):
    """The model, and the class names to pass, so that the first instances are the largest."""
    model = build(name)
    modules = {key: module for key, module in model.named_modules() if key}
    wanted = [classes] if isinstance(classes, str) else list(classes or ())
    blocks = [key for key, module in modules.items() if type(module).__name__ in wanted]
    leaves = [key for key, module in modules.items() if not list(module.children())]
    for label, keys in (("LargestBlock", blocks), ("LargestLeaf", leaves)):
        if keys:
            module = modules[max(keys, key=lambda key: sizes.get(key, 0))]
            module.__class__ = type(label, (type(module),), {})
    return model, list({type(module).__name__ for module in modules.values()} & LABELS)


def sizing(model):
    """How accelerate is told the true sizes: only weights that bitsandbytes packs are 4-bit."""
    packed = {n for n, tensor in model.named_parameters() if type(tensor).__name__ == "Params4bit"}
    if not packed:
        return {}
    from accelerate.utils import CustomDtype

    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers()]
    kept = {name: torch.float16 for name in names if name not in packed}
    return {"dtype": CustomDtype.INT4, "special_dtypes": kept}


def build(name):
    """The model of that name on the meta device, in fp16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with on_meta():
            return MODELS[name]()
    finally:
        torch.set_default_dtype(before)
