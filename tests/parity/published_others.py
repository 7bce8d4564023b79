"""Entries of further published config.json files: families with a class of their own, text parts, and refused ones.

DeepSeek-V2's and OLMo-2-0425-1B's files are quoted in public repositories. Entries that Gemma's multimodal files lack
are defaults of `transformers`. The others are written from memory of the published files, without entries for training.
"""

from __future__ import annotations

from typing import Any

from tests.parity.published_configs import _KIMI_ROPE, PUBLISHED, _deepseek, _entries, _granite


def _gemma2(*sizes: int, scalar: int, head_dim: int = 256) -> dict[str, Any]:
    entries = {
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    }
    return _entries("Gemma2ForCausalLM", "gemma2", (*sizes, 256000, 8192), **entries)


def _gemma3(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    return _entries("Gemma3ForCausalLM", "gemma3_text", (*sizes, 262144, 32768), **{**shared, **entries})


def _gemma3_whole(**text: Any) -> dict[str, Any]:
    """A file with pictures: most entries of the text part are the defaults of its class."""
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **rope, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
    }


def _olmo2(*sizes: int) -> dict[str, Any]:
    shared = {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False}
    return _entries("Olmo2ForCausalLM", "olmo2", (*sizes, 100352, 4096), rope_scaling=None, **shared)


def _olmo3(*sizes: int) -> dict[str, Any]:
    scaling = {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    }
    types = ["sliding_attention"] * 3 + ["full_attention"]
    shared = {"layer_types": types * (sizes[2] // 4), "rms_norm_eps": 1e-6, "rope_theta": 500000}
    entries = {"rope_scaling": scaling, "sliding_window": 4096, "tie_word_embeddings": False}
    return _entries("Olmo3ForCausalLM", "olmo3", (*sizes, 100278, 65536), **shared, **entries)


def _deepseek_v2(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**_KIMI_ROPE, "beta_fast": 32, "factor": 40},
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    }
    return _deepseek(*sizes, **{**shared, **entries})


def _kimi_k2_thinking() -> dict[str, Any]:
    """Experts in codes of 4 bits; all other layers in floats."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
    }
    weights |= {"observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    quantization = {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ignored,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    own = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_scaling": {**_KIMI_ROPE, "factor": 64.0}}
    return {**PUBLISHED["Kimi-K2"], **own, "quantization_config": quantization}


def _granite_moe(*sizes: int, **entries: Any) -> dict[str, Any]:
    named = {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_experts_per_tok": 8}
    shared = {"logits_scaling": 6.0, "output_router_logits": False, "router_aux_loss_coef": 0.0}
    return {**_granite(*sizes), **named, **shared, "rope_theta": 1500000.0, **entries}


def _named(architecture: str, model: str, **entries: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model, **entries}


def _qwen3_vl(hidden: int, inner: int, layers: int, heads: int, **entries: Any) -> dict[str, Any]:
    """Entries of a whole Qwen3-VL, of which the text part is served."""
    text = {
        **{"model_type": "qwen3_vl_text", "hidden_size": hidden, "intermediate_size": inner, "head_dim": 128},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 151936},
        **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "dtype": "bfloat16"},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
        **{"bos_token_id": 151643, "eos_token_id": 151645, "use_cache": True},
    }
    vision = {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl", "out_hidden_size": hidden}
    whole = _named("Qwen3VLForConditionalGeneration", "qwen3_vl", image_token_id=151655, **entries)
    return {**whole, "text_config": {**text, **entries}, "vision_config": vision}


SERVED: dict[str, dict[str, Any]] = {
    "granite-3.1-1b-a400m": _granite_moe(1024, 512, 24, 16, 8, 49155, 131072, num_local_experts=32),
    "granite-3.1-3b-a800m": _granite_moe(1536, 512, 32, 24, 8, 49155, 131072, num_local_experts=40),
    # Its published model_type is kimi_k2, as of Kimi-K2.
    "Kimi-K2-Thinking": _kimi_k2_thinking(),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, scalar=256),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, scalar=256),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, scalar=144, head_dim=128),
    "gemma-3-270m": _gemma3(
        640,
        2048,
        18,
        4,
        1,
        _sliding_window_pattern=6,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
        use_bidirectional_attention=False,
    ),
    "gemma-3-1b-it": _gemma3(1152, 6912, 26, 4, 1),
    "gemma-3-1b-it, saved by transformers 5": _gemma3(
        1152,
        6912,
        26,
        4,
        1,
        layer_types=([*["sliding_attention"] * 5, "full_attention"] * 5)[:26],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
    ),
    "gemma-3-4b-it": _gemma3_whole(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma-3-12b-it": _gemma3_whole(
        hidden_size=3840, intermediate_size=15360, num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8
    ),
    "gemma-3-27b-it": _gemma3_whole(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
    ),
    "Mistral-Small-3.1-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24},
    },
    "Qwen3-VL-4B-Instruct": _qwen3_vl(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-VL-8B-Instruct": _qwen3_vl(4096, 12288, 36, 32, tie_word_embeddings=False),
    "OLMo-2-0425-1B": _olmo2(2048, 8192, 16, 16, 16),
    "OLMo-2-1124-7B": _olmo2(4096, 11008, 32, 32, 32),
    "OLMo-2-1124-13B": _olmo2(5120, 13824, 40, 40, 40),
    "OLMo-2-0325-32B": _olmo2(5120, 27648, 64, 40, 8),
    "Olmo-3-7B-Instruct": _olmo3(4096, 11008, 32, 32, 32),
    "Olmo-3-32B-Think": _olmo3(5120, 27648, 64, 40, 8),
    "DeepSeek-V2": _deepseek_v2(5120, 12288, 60, 128, 128, 102400, 163840),
    "DeepSeek-Coder-V2-Instruct": _deepseek_v2(5120, 12288, 60, 128, 128, 102400, 163840),
    "DeepSeek-Coder-V2-Lite": _deepseek_v2(
        2048,
        10944,
        27,
        16,
        16,
        102400,
        163840,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_group=1,
        n_routed_experts=64,
        routed_scaling_factor=1.0,
        topk_group=1,
        topk_method="greedy",
    ),
}

_LINEAR = "layers of linear attention keep a state for each sequence"


# Files that are refused -> a part of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3-Next-80B-A3B": (_named("Qwen3NextForCausalLM", "qwen3_next", full_attention_interval=4), _LINEAR),
    "Kimi-Linear-48B-A3B": (_named("KimiLinearForCausalLM", "kimi_linear"), _LINEAR),
    "granite-4.0-h-small": (_named("GraniteMoeHybridForCausalLM", "granitemoehybrid"), _LINEAR),
    "Llama-4-Scout-17B-16E": (_named("Llama4ForConditionalGeneration", "llama4"), "its layers attend in chunks"),
    "embeddinggemma-300m": (
        {**_gemma3(768, 1152, 24, 3, 1), "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported for Gemma3TextModel",
    ),
    "Kimi-K2.5": (_named("KimiK25ForConditionalGeneration", "kimi_k25"), "architecture not supported: KimiK25"),
    "gemma-7b": (_named("GemmaForCausalLM", "gemma"), "architecture not supported: GemmaForCausalLM"),
    "gemma-3n-E4B": (_named("Gemma3nForConditionalGeneration", "gemma3n"), "architecture not supported: Gemma3n"),
    "gemma-4-31B": (_named("Gemma4ForConditionalGeneration", "gemma4"), "architecture not supported: Gemma4"),
    "phi-2": (_named("PhiForCausalLM", "phi"), "architecture not supported: PhiForCausalLM"),
    "Phi-3.5-MoE": (_named("PhimoeForCausalLM", "phimoe"), "architecture not supported: Phimoe"),
    "Qwen2.5-VL-7B": (
        _named("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        "architecture not supported: Qwen2_5_VL",
    ),
    "Qwen3-VL-30B-A3B": (_named("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"), "not supported: Qwen3VLMoe"),
    "c4ai-command-r7b": (_named("Cohere2ForCausalLM", "cohere2"), "architecture not supported: Cohere2"),
    "falcon-7b": (_named("FalconForCausalLM", "falcon"), "architecture not supported: Falcon"),
    "MiniMax-M2": (_named("MiniMaxM2ForCausalLM", "minimax_m2"), "architecture not supported: MiniMaxM2"),
    "Ministral-3-8B-Instruct": (
        _named("Mistral3ForConditionalGeneration", "mistral3", text_config={"model_type": "ministral3"}),
        "text_config: model_type 'ministral3' is not supported in Mistral3ForConditionalGeneration; supported: mistral",
    ),
    "Ministral-3-8B, text alone": (_named("Ministral3ForCausalLM", "ministral3"), "not supported: Ministral3"),
    "OLMoE-1B-7B": (_named("OlmoeForCausalLM", "olmoe"), "architecture not supported: OlmoeForCausalLM"),
    "GLM-4-9B-0414": (_named("Glm4ForCausalLM", "glm4"), "architecture not supported: Glm4ForCausalLM"),
    "mamba-2.8b": (_named("MambaForCausalLM", "mamba"), "architecture not supported: MambaForCausalLM"),
}
