"""optimum: `load_quantized_model` of GPTQ calls accelerate; BetterTransformer plans itself."""

from __future__ import annotations

import contextlib
import json
import pathlib

import accelerate.big_modeling
import optimum.gptq.quantizer as gptq
import torch
from tiny import Load, PlannedParts, budgets, on_all_gpus, rooms, tensors_of
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from bnb_dispatch_fix.planning.simulation import replaced, simulated_gpus

try:
    from optimum.bettertransformer import transformation
except ImportError:
    transformation = None

PACKAGE = "optimum"
REFUSES = False
#: What it takes by name and keeps, where it was there before the shim.
HOLDS = (
    ()
    if transformation is None
    else (
        "optimum.bettertransformer.transformation.dispatch_model",
        "optimum.bettertransformer.transformation.infer_auto_device_map",
    )
)


def loads(folder):
    config = LlamaConfig.from_pretrained(folder)
    settings = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    (pathlib.Path(folder) / "quantize_config.json").write_text(json.dumps(settings))

    def call(strategy, max_memory):
        with planning():
            load_gptq(config, folder, strategy, max_memory)

    yield from on_all_gpus(call, {}, share=1.0, prefix="gptq ")
    if transformation is not None:
        yield from transformations()


def load_gptq(config, folder, strategy, max_memory):
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(config).half()
    gptq.load_quantized_model(
        model,
        folder,
        quant_config_name="quantize_config.json",
        device_map=strategy,
        max_memory=max_memory,
    )


@contextlib.contextmanager
def planning():
    """Simulated GPUs; ends with `Planned` where weights would be read, or a model dispatched."""

    def read(model, checkpoint, device_map=None, **_):
        raise PlannedParts(device_map, tensors_of(model))

    def dispatch(model, device_map, **_):
        raise PlannedParts(device_map, tensors_of(model))

    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated_gpus())
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        stack.enter_context(replaced(accelerate.big_modeling, "load_checkpoint_in_model", read))
        if transformation is not None:
            stack.enter_context(replaced(transformation, "dispatch_model", dispatch))
        yield


def transformations():
    """A model that was divided within what BetterTransformer makes one module of."""
    for mib in (0.5, 1.2, 8):
        max_memory = budgets(3, mib)

        def call(max_memory=max_memory):
            config = BertConfig(
                vocab_size=8192,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
            )
            model = BertModel(config).half()
            model.hf_device_map = {
                name: 0 for name, _ in model.state_dict().items() if "bias" not in name
            }
            with planning():
                transformation.BetterTransformer.transform(model, max_memory=dict(max_memory))

        yield Load(f"transform 3x{mib}", call, {}, rooms(max_memory, 1.0))
