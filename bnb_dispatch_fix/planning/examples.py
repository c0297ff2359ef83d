"""Shapes of well-known models for `plan --example`: public configurations, no weights."""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple


class Example(NamedTuple):
    """A configuration as in the model's config.json, and the transformers that first knew it."""

    since: str
    config: Mapping[str, Any]


def _llama(**shape: int) -> Dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        **shape,
    }


EXAMPLES: Mapping[str, Example] = {
    "llama-3-8b": Example(
        "4.30",
        _llama(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32
        ),
    ),
    "llama-3-70b": Example(
        "4.30",
        _llama(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
        ),
    ),
    "gemma-2-27b": Example(
        "4.42",
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 46,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-8x7b": Example(
        "4.36",
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
    ),
    "qwen3-30b-a3b": Example(
        "4.51",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek-v3": Example(
        "4.51",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
        },
    ),
}
#: What all of them are published in, and do not share unless they say so.
DEFAULTS: Mapping[str, Any] = {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
