"""A small Flux transformer of diffusers, loaded up to the moment when weights would be copied."""

from __future__ import annotations

import contextlib

import diffusers
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from diffusers.models import modeling_utils
from packaging.version import Version

from bnb_dispatch_fix.planning.simulation import Planned, replaced, simulated_gpus

RELEASE = Version(diffusers.__version__)
STRATEGIES = ("auto", "balanced_low_0", "sequential")
#: 50 loads: as many GPUs as that, and so many times the room the model takes.
FIFTY = [
    (count, times)
    for count in (2, 3, 4, 6, 8)
    for times in (1.02, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 4, 6)
]
HOST = 2**40


def build():
    """2 + 6 blocks, 1.4 MiB in 4-bit."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=2,
        num_single_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def parts(model):
    """(name, bytes in nf4) of what goes to one device whole: blocks, and leaf modules elsewhere."""
    whole = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    found = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{before}.") for before, _ in found):
            continue
        if type(module).__name__ in whole or not list(module.children()):
            size = sum(
                parameter.numel()
                * (0.5 if isinstance(leaf, torch.nn.Linear) and key == "weight" else 2)
                for leaf in module.modules()
                for key, parameter in leaf.named_parameters(recurse=False)
            )
            if size:
                found.append((name, size))
    return found


def budgets(total, count, times):
    """Like GPUs with `times` the room for `total` bytes, once bitsandbytes has taken its tenth."""
    return {**dict.fromkeys(range(count), int(times * total / count / 0.9) + 1), "cpu": HOST}


def nf4(**changes):
    return BitsAndBytesConfig(
        **{
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": torch.float16,
            **changes,
        }
    )


@contextlib.contextmanager
def gpus():
    """Simulated GPUs for diffusers; loading ends with `Planned` where weights would be read."""

    def stop(cls, *args, **kwargs):
        raise Planned(kwargs["device_map"])

    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_gpus())
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        if hasattr(modeling_utils.ModelMixin, "_load_pretrained_model"):
            stopped = classmethod(stop)
            stack.enter_context(
                replaced(modeling_utils.ModelMixin, "_load_pretrained_model", stopped)
            )
        yield


def load(folder, model_class=FluxTransformer2DModel, **arguments):
    """The device map that `from_pretrained` would load to, or the error it raises."""
    asked = {"torch_dtype": torch.float16, "quantization_config": nf4(), **arguments}
    with gpus():
        try:
            model_class.from_pretrained(folder, **asked)
        except Planned as planned:
            return planned.device_map
        except Exception as error:  # noqa: BLE001  # any error is the outcome
            return error
    raise AssertionError("from_pretrained returned, although its loading step was replaced")
