"""Models of many architectures, so small that they generate on the CPU in a moment."""

from __future__ import annotations

import transformers

VOCABULARY, HIDDEN = 96, 32
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SIDE = {"head_dim": 16, "sliding_window": 16}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def _t5():
    return {
        "vocab_size": VOCABULARY,
        "d_model": HIDDEN,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }


def _llava():
    return {
        "vision_config": transformers.CLIPVisionConfig(**_VISION),
        "text_config": transformers.LlamaConfig(**_PLAIN),
        "image_token_index": 95,
    }


def _qwen2_vl():
    text = {
        **_PLAIN,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
        "rope_theta": 10000.0,
    }
    vision = {"depth": 2, "embed_dim": HIDDEN, "hidden_size": HIDDEN, "num_heads": 4}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
    return {**text, **tokens, "vision_config": vision}


#: Name → class of the model, and what its configuration says.
MODELS = {
    "llama": ("LlamaForCausalLM", lambda: _PLAIN),
    "mistral": ("MistralForCausalLM", lambda: {**_PLAIN, **_SIDE}),
    "qwen2": ("Qwen2ForCausalLM", lambda: _PLAIN),
    "gemma2": ("Gemma2ForCausalLM", lambda: {**_PLAIN, **_SIDE, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda: {**_PLAIN, **_SIDE, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
    ),
    "mixtral": ("MixtralForCausalLM", lambda: {**_PLAIN, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        lambda: {
            **_PLAIN,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        lambda: {
            **_PLAIN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        lambda: {
            **_PLAIN,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "bamba": ("BambaForCausalLM", lambda: {**_PLAIN, **_MAMBA, "attn_layer_indices": [1, 3]}),
    "jamba": (
        "JambaForCausalLM",
        lambda: {
            **_PLAIN,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        lambda: {
            **_PLAIN,
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba"] * 2 + ["hybrid"] * 2 + ["mamba"] * 2,
            "chunk_size": 16,
            "use_mem_eff_path": False,
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", lambda: {**_PLAIN, **_MAMBA, "mamba_d_ssm": 64}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        lambda: {
            **_PLAIN,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "mamba": (
        "MambaForCausalLM",
        lambda: {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "state_size": 8,
            "use_mambapy": False,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        lambda: {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        lambda: {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        lambda: {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", lambda: {**_PLAIN, "rotary_pct": 0.5}),
    "phi3": ("Phi3ForCausalLM", lambda: _PLAIN),
    "t5": ("T5ForConditionalGeneration", _t5),
    "bart": (
        "BartForConditionalGeneration",
        lambda: {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 128,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
    "llava": ("LlavaForConditionalGeneration", _llava),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl),
}


def known(name):
    """Whether the installed release has this architecture."""
    return hasattr(transformers, MODELS[name][0])


def configuration(name):
    model, settings = MODELS[name]
    return getattr(transformers, model).config_class(**settings())


def build(name, config=None):
    """The model with random weights, or on whatever device is the default."""
    return getattr(transformers, MODELS[name][0])(config or configuration(name)).eval()
