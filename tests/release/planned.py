"""Models as planners see them: converted by the real `from_pretrained`, on the meta device."""

from __future__ import annotations

import functools
import importlib
from contextlib import contextmanager

import torch
import transformers

from bnb_dispatch_fix.planning.simulation import replaced
from bnb_dispatch_fix.wrappers import planners as rescue

GENERATION = int(transformers.__version__.split(".")[0])
HIDDEN, FFN, VOCABULARY, LAYERS, EXPERTS = 64, 128, 256, 3, 4

LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: Family → (configuration class, its arguments, model class).
FAMILIES = {
    "llama": ("LlamaConfig", LLAMA_LIKE, "LlamaForCausalLM"),
    "gemma2": ("Gemma2Config", {**LLAMA_LIKE, "head_dim": 16}, "Gemma2ForCausalLM"),
    "mixtral": (
        "MixtralConfig",
        {**LLAMA_LIKE, "num_local_experts": EXPERTS},
        "MixtralForCausalLM",
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "max_position_embeddings": 62,
        },
        "OPTForCausalLM",
    ),
    "t5": (
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": FFN,
            "num_layers": LAYERS,
            "num_heads": 4,
        },
        "T5ForConditionalGeneration",
    ),
}


class Stop(BaseException):
    """Ends `from_pretrained` once the planner was called."""


def available(family):
    return hasattr(transformers, FAMILIES[family][2])


def save(family, folder, dtype):
    """Write a checkpoint with random weights, some 0.3 MB."""
    config, arguments, model = FAMILIES[family]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    built.to(dtype).save_pretrained(folder)


def quantization(bits, **options):
    """bitsandbytes' configuration; None for 16 bits, and for a checkpoint that has its own."""
    if bits == 16:
        return None
    return transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, **options
    )


@contextmanager
def watched(look):
    """Call `look(model, arguments)` when the planner of the installed release is called."""
    names = {4: "transformers.modeling_utils", 5: "transformers.integrations.accelerate"}
    planner = importlib.import_module(names[GENERATION])
    installed = planner.infer_auto_device_map

    @functools.wraps(installed)
    def spy(model, **arguments):
        look(model, arguments)
        return installed(model, **arguments)

    with replaced(planner, "infer_auto_device_map", spy):
        yield


@contextmanager
def quantizers(found):
    """Append the quantizers that `from_pretrained` makes to `found` (transformers 4.38+)."""
    try:
        from transformers.quantizers.base import HfQuantizer
    except ImportError:
        yield
        return
    installed = HfQuantizer.preprocess_model

    @functools.wraps(installed)
    def spy(self, *args, **kwargs):
        found.append(self)
        return installed(self, *args, **kwargs)

    with replaced(HfQuantizer, "preprocess_model", spy):
        yield


@contextmanager
def requests():
    """What the shim reads of the planners' calls meanwhile, in a list."""
    found, read = [], rescue._read

    def spy(*call):
        found.append(read(*call))
        return found[-1]

    with replaced(rescue, "_read", spy):
        yield found


def plan(
    family, folder, bits, dtype, look, *, stop=True, device_map="auto", max_memory=None, **options
):
    """Run `from_pretrained` on `save`'s checkpoint and `look(model, quantizer, arguments)`.

    Unless `stop`, the model is loaded (on the CPU) and returned.
    """
    found = []

    def at_planner(model, arguments):
        look(model, found[-1] if found else None, arguments)
        if stop:
            raise Stop

    default = torch.get_default_dtype()
    with quantizers(found), watched(at_planner):
        try:
            return getattr(transformers, FAMILIES[family][2]).from_pretrained(
                folder,
                device_map=device_map,
                torch_dtype=dtype,
                max_memory=max_memory,
                quantization_config=quantization(bits, **options),
            )
        except Stop:
            return None
        finally:  # 4.x leaves its own behind when it is stopped
            torch.set_default_dtype(default)
