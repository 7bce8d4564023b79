"""Entries of published config.json files that decide the numbers.

Shapes and rope are the publishers'. Entries for training, and lists of layers without quantization, are left out.
"""

from __future__ import annotations

from typing import Any


def _entries(architecture: str, model: str, sizes: tuple[int, ...], /, **entries: Any) -> dict[str, Any]:
    """The entries of a file; `sizes` has the order of `_SIZES`."""
    named = {"architectures": [architecture], "model_type": model, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    return named | dict(zip(_SIZES, sizes, strict=True)) | entries


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _llama(*sizes: int, **entries: Any) -> dict[str, Any]:
    return _entries("LlamaForCausalLM", "llama", sizes, **{"rms_norm_eps": 1e-5, "pretraining_tp": 1, **entries})


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return {"rope_theta": 500000.0, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}


def _qwen3(*sizes: int, **entries: Any) -> dict[str, Any]:
    return _entries(
        "Qwen3ForCausalLM",
        "qwen3",
        sizes,
        **{
            "head_dim": 128,
            "attention_bias": False,
            "max_window_layers": sizes[2],
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            **entries,
        },
    )


def _qwen2(*sizes: int, **entries: Any) -> dict[str, Any]:
    windows = {"max_window_layers": sizes[2], "sliding_window": sizes[6], "use_sliding_window": False}
    shared = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_mrope": False}
    return _entries("Qwen2ForCausalLM", "qwen2", sizes, **windows, **{**shared, **entries})


def _qwen2_moe(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
    }
    named = {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    return _qwen2(*sizes, **named, **{**shared, **entries})


def _mistral(*sizes: int, **entries: Any) -> dict[str, Any]:
    return _entries("MistralForCausalLM", "mistral", sizes, **{"rms_norm_eps": 1e-5, "sliding_window": None, **entries})


def _phi3(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e4}
    return _entries("Phi3ForCausalLM", "phi3", sizes, **{**shared, "attention_bias": False, **entries})


def _phi_longrope(pairs: int) -> dict[str, Any]:
    """Factors of made numbers, as many as the published ones."""
    factors = {
        "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
        "short_factor": [1.0 + i / 64 for i in range(pairs)],
    }
    return {"type": "longrope", **factors}


def _granite(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    }
    return _entries("GraniteForCausalLM", "granite", sizes, **shared, **entries)


def _qwen3_moe(*sizes: int, **entries: Any) -> dict[str, Any]:
    return _qwen3(
        *sizes,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        **{
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.001,
            **entries,
        },
    )


def _mixtral(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {"num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    return _entries("MixtralForCausalLM", "mixtral", sizes, **shared, sliding_window=None, **entries)


def _gpt_oss(layers: int, experts: int, **entries: Any) -> dict[str, Any]:
    return _entries(
        "GptOssForCausalLM",
        "gpt_oss",
        (2880, 2880, layers, 64, 8, 201088, 131072),
        head_dim=64,
        attention_bias=True,
        num_local_experts=experts,
        num_experts_per_tok=4,
        experts_per_token=4,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        rms_norm_eps=1e-5,
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
        **{"rope_scaling": {**_GPT_OSS_ROPE, "rope_type": "yarn"}, **entries},
    )


_GPT_OSS_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _glm(*sizes: int, **entries: Any) -> dict[str, Any]:
    shared = {
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
    }
    return _entries("Glm4MoeForCausalLM", "glm4_moe", sizes, **shared, **entries)


def _deepseek(*sizes: int, **entries: Any) -> dict[str, Any]:
    return _entries(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        sizes,
        **{
            "attention_bias": False,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
            **entries,
        },
    )


_KIMI_ROPE = {
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_YARN_OF_CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_SMALL = (64, 128, 2, 4, 2, 512, 40960)

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-1-7B": _llama(4096, 11008, 32, 32, 32, 32000, 2048, rms_norm_eps=1e-6, num_key_value_heads=None),
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096, rope_scaling=None),
    "Llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096, rope_scaling=None),
    "CodeLlama-34b": _llama(8192, 22016, 48, 64, 8, 32000, 16384, rope_theta=1000000),
    "Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=500000.0, rope_scaling=None),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072, mlp_bias=False, **_llama3(8.0)),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128, 8, 128256, 131072, mlp_bias=False, **_llama3(8.0)),
    "Llama-3.2-1B": _llama(
        2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True, **_llama3(32.0)
    ),
    "Llama-3.2-3B": _llama(
        3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True, **_llama3(32.0)
    ),
    "TinyLlama-1.1B": _llama(2048, 5632, 22, 32, 4, 32000, 2048, rope_scaling=None),
    "SmolLM2-135M": _llama(
        576, 1536, 30, 9, 3, 49152, 8192, rope_theta=100000, tie_word_embeddings=True, rope_interleaved=False
    ),
    "Yi-34B": _llama(7168, 20480, 60, 56, 8, 64000, 4096, rope_theta=5000000.0),
    "deepseek-coder-6.7b": _llama(
        4096, 11008, 32, 32, 32, 32256, 16384, rope_theta=100000, rope_scaling={"factor": 4.0, "type": "linear"}
    ),
    "Yarn-Llama-2-7b-64k": _llama(
        4096,
        11008,
        32,
        32,
        32,
        32000,
        65536,
        rope_scaling={"factor": 16.0, "original_max_position_embeddings": 4096, "type": "yarn", "finetuned": True},
    ),
    "DeepSeek-R1-Distill-Llama-8B": _llama(4096, 14336, 32, 32, 8, 128256, 131072, **_llama3(8.0)),
    "Qwen2-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, 131072, tie_word_embeddings=True),
    "Qwen2.5-0.5B-Instruct": _qwen2(896, 4864, 24, 14, 2, 151936, 32768, tie_word_embeddings=True),
    "Qwen2.5-7B-Instruct": _qwen2(3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen2.5-7B-Instruct, yarn of its card": _qwen2(
        3584, 18944, 28, 28, 4, 152064, 32768, rope_scaling={**_YARN_OF_CARD, "type": "yarn"}
    ),
    "Qwen2.5-Coder-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, 32768, rms_norm_eps=1e-6),
    "Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, 4096, rope_theta=10000),
    "QwQ-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, 40960, rms_norm_eps=1e-5),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, 131072, rope_theta=10000),
    "Mistral-7B-v0.1": _mistral(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096, rope_theta=10000.0),
    "Mistral-7B-Instruct-v0.3": _mistral(4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1000000.0),
    "Mistral-Nemo-2407": _mistral(5120, 14336, 40, 32, 8, 131072, 131072, head_dim=128, rope_theta=1000000.0),
    "Mistral-Small-24B-2501": _mistral(5120, 32768, 40, 32, 8, 131072, 32768, head_dim=128, rope_theta=100000000.0),
    "zephyr-7b-beta": _mistral(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096, pad_token_id=2),
    "Phi-3-mini-4k": _phi3(3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047),
    "Phi-3.5-mini": _phi3(3072, 8192, 32, 32, 32, 32064, 131072, sliding_window=262144, rope_scaling=_phi_longrope(48)),
    "Phi-4": _phi3(
        5120,
        17920,
        40,
        40,
        10,
        100352,
        16384,
        rope_theta=250000,
        sliding_window=None,
        original_max_position_embeddings=16384,
    ),
    "Phi-4-mini": _phi3(
        3072,
        8192,
        32,
        24,
        8,
        200064,
        131072,
        partial_rotary_factor=0.75,
        rope_scaling=_phi_longrope(48),
        sliding_window=262144,
        tie_word_embeddings=True,
    ),
    "Granite-3.3-2B": _granite(2048, 8192, 40, 32, 8, 49159, 131072, logits_scaling=8.0),
    "Granite-3.3-8B": _granite(4096, 12800, 40, 32, 8, 49159, 131072, logits_scaling=16.0),
    "SmolLM3-3B": _entries(
        "SmolLM3ForCausalLM",
        "smollm3",
        (2048, 11008, 36, 16, 4, 128256, 65536),
        attention_bias=False,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, 151936, 40960, tie_word_embeddings=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, 151936, 40960, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, 151936, 40960),
    "Qwen3-8B, yarn of its card": _qwen3(4096, 12288, 36, 32, 8, 151936, 40960, rope_scaling=_YARN_OF_CARD),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, 151936, 40960),
    "Qwen3-4B-Instruct-2507": _qwen3(
        2560, 9728, 36, 32, 8, 151936, 262144, tie_word_embeddings=True, rope_theta=5000000
    ),
    "Qwen3-0.6B, saved by transformers 5": _qwen3(
        1024,
        3072,
        28,
        16,
        8,
        151936,
        40960,
        torch_dtype=None,
        dtype="bfloat16",
        layer_types=["full_attention"] * 28,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    ),
    "Qwen3, saved by transformers 5, yarn of its card": _qwen3(
        *_SMALL, rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, rope_scaling=_YARN_OF_CARD
    ),
    "Qwen1.5-MoE-A2.7B": _qwen2_moe(2048, 5632, 24, 16, 16, 151936, 8192, num_experts=60, num_experts_per_tok=4),
    "Qwen2-57B-A14B": _qwen2_moe(
        3584,
        18944,
        28,
        28,
        4,
        151936,
        32768,
        moe_intermediate_size=2560,
        num_experts=64,
        num_experts_per_tok=8,
        shared_expert_intermediate_size=20480,
    ),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, 151936, 40960, moe_intermediate_size=1536),
    "Qwen3-Coder-480B-A35B": _qwen3_moe(
        6144,
        8192,
        62,
        96,
        8,
        151936,
        262144,
        moe_intermediate_size=2560,
        num_experts=160,
        rope_theta=10000000,
        shared_expert_intermediate_size=0,
        qkv_bias=False,
        use_qk_norm=True,
    ),
    "Mixtral-8x7B": _mixtral(4096, 14336, 32, 32, 8, 32000, 32768),
    "Mixtral-8x22B": _mixtral(6144, 16384, 56, 48, 8, 32000, 65536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b, saved by transformers 5": _gpt_oss(
        24, 32, rope_scaling=None, rope_parameters={**_GPT_OSS_ROPE, "rope_type": "yarn", "rope_theta": 150000}
    ),
    "GLM-4.5-Air": _glm(
        4096,
        10944,
        46,
        96,
        8,
        151552,
        131072,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "GLM-4.5": _glm(
        5120,
        12288,
        92,
        96,
        8,
        151552,
        131072,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "DeepSeek-V2-Lite": _deepseek(
        2048,
        10944,
        27,
        16,
        16,
        102400,
        163840,
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        q_lora_rank=None,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        num_nextn_predict_layers=0,
        norm_topk_prob=False,
        rope_scaling={**_KIMI_ROPE, "beta_fast": 32, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_method="greedy",
    ),
    "DeepSeek-V3": _deepseek(7168, 18432, 61, 128, 128, 129280, 163840),
    "Moonlight-16B-A3B": _deepseek(
        2048,
        11264,
        27,
        16,
        16,
        163840,
        8192,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        routed_scaling_factor=2.446,
        rope_scaling=None,
        rope_theta=50000.0,
        rms_norm_eps=1e-5,
    ),
    # transformers has no model_type kimi_k2: the checkpoint has its own code.
    "Kimi-K2": _deepseek(
        7168,
        18432,
        61,
        64,
        64,
        163840,
        131072,
        n_group=1,
        topk_group=1,
        n_routed_experts=384,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        routed_scaling_factor=2.827,
        rope_theta=50000.0,
        rope_scaling=_KIMI_ROPE,
    ),
    "DeepSeek-V3.2": _deepseek(
        7168,
        18432,
        61,
        128,
        128,
        129280,
        163840,
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        index_head_dim=128,
        index_n_heads=64,
        index_topk=2048,
    ),
}
