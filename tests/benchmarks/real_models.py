"""Six public configurations as 4-bit models on the meta device, as the planner sees them."""

from __future__ import annotations

import math

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer

from bnb_dispatch_fix.planning.examples import configuration

GENERATION = int(transformers.__version__.split(".")[0])

CONFIGS = {
    "Llama-3-8B": configuration("llama-3-8b"),
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "OPT-125m": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
        "tie_word_embeddings": True,
    },
    "Gemma-2-27B": configuration("gemma-2-27b"),
    "Mixtral-8x7B": configuration("mixtral-8x7b"),
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def build(name):
    """(model, quantizer): nf4, fp16, converted by the real quantizer, tied as for the planner."""
    quantizer = AutoHfQuantizer.from_config(
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), pre_quantized=False
    )
    config = AutoConfig.for_model(**CONFIGS[name])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)  # as while loading: new layers get their bias in it
    try:
        return converted(config, quantizer), quantizer
    finally:
        torch.set_default_dtype(before)


def converted(config, quantizer):
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        except TypeError:
            model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float16)
    quantizer.preprocess_model(
        model=model,
        dtype=torch.float16,
        torch_dtype=torch.float16,
        device_map="auto",
        keep_in_fp32_modules=[],
        checkpoint_files=None,
    )
    if GENERATION < 5:
        model.tie_weights()
    return model


def parts(model):
    """(name, bytes) of what goes to one device whole, in model order: sums of its tensors.

    A part is a block, or a leaf outside of the blocks. What is tied counts in the first of them.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    blocks = set(model._no_split_modules)
    seen, found = set(), []
    for name, module in model.named_modules():
        if any(name.startswith(f"{part}.") for part, _ in found[-1:]):
            continue
        if type(module).__name__ in blocks or not list(module.children()):
            size = 0
            for leaf, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if id(tensor) in seen or f"{name}.{leaf}" in tied:
                    continue
                seen.add(id(tensor))
                halved = type(tensor).__name__ == "Params4bit"
                size += tensor.numel() * (0.5 if halved else tensor.element_size())
            found.append((name, math.ceil(size)))
    return found


def fits_in_device_order(sizes, budget, count):
    """Whether filling `count` equal devices one after the other, each to the brim, is enough."""
    used, load = 1, 0
    for size in sizes:
        if load + size > budget:
            used, load = used + 1, 0
        load += size
        if size > budget or used > count:
            return False
    return True
