"""config.json of a model whose GGUF file has none, from the file's metadata.

An entry of the architecture is read, or is in `_KNOWN`, or is refused. Entries of sampling and of the tokenizer that
the worker cannot follow are refused too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from common.files import UnreadableFileError
from common.limits import MAX_MODEL_LAYERS
from worker.config.architectures import support_model_arch_dict
from worker.config.gguf_file import GgufArray, GgufModel, printable
from worker.config.gguf_tokenizer import end_ids, token_id

# Entries that are ignored where an architecture does not read them: they change no number of a text, or belong to a
# rope scaling that the model does not have.
_KNOWN: Final = frozenset(
    (
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        # Of images and videos.
        "rope.dimension_sections",
        "n_deepstack_layers",
        "pooling_type",
    )
)
_SOFTMAX: Final = 1
_SIGMOID: Final = 2
_WINDOW: Final = "attention.sliding_window"
# Entries for sampling -> parameters of a request that leaves them out.
_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Entries that change answers, and that the worker does not follow -> values without effect.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "general.sampling.sequence": ("",),
    "general.sampling.mirostat": (0,),
    "general.sampling.xtc_probability": (0,),
    "tokenizer.ggml.suppress_tokens": (),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
    "tokenizer.ggml.normalizer.strip_accents": (False,),
}
# Types in which a file may store all of its weights -> dtype of the model.
_DTYPES: Final = {frozenset(("F32",)): "float32", frozenset(("F16",)): "float16", frozenset(("F32", "F16")): "float16"}


class _Entries:
    """Metadata of one architecture; keeps account of what is read."""

    def __init__(self, model: GgufModel, architecture: str) -> None:
        self.model = model
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Reads an entry; of a list with one entry per layer the value that all layers have.

        Raises:
            UnreadableFileError: it differs by layer or has another number of them, or is missing and has no default.
        """
        self._read.add(name)
        key = self._prefix + name
        value: Any = self.model.metadata.get(key, default)
        if isinstance(value, GgufArray):
            layers = self.model.metadata.get(f"{self._prefix}block_count")
            if value.num_items != layers:
                raise self.fault(f"{key} lists {value.num_items} values for {printable(str(layers))} layers")
            values = set(self.model.numbers(key))
            if len(values) != 1:
                raise UnreadableFileError(f"{self.model.path}: {key} differs by layer, which is not supported")
            value = values.pop()
        if value is None:
            raise UnreadableFileError(f"{self.model.path} has no {key}")
        return value

    def has(self, name: str) -> bool:
        """True if there is such an entry; does not count as reading it."""
        return self._prefix + name in self.model.metadata

    def flags(self, name: str) -> list[bool]:
        """Reads a list with a flag for each layer; empty if the entry is something else, or absent."""
        if not isinstance(self.model.metadata.get(self._prefix + name), GgufArray):
            return []
        self._read.add(name)
        return [bool(each) for each in self.model.numbers(self._prefix + name)]

    def fault(self, what: str) -> UnreadableFileError:
        """Error about the model's metadata."""
        return UnreadableFileError(f"{self.model.path}: {what}")

    def number(self, name: str, default: float) -> float:
        """Reads a number.

        Raises:
            UnreadableFileError: it is something else.
        """
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise self.fault(f"{self._prefix}{name} is {printable(repr(value))}; it must be a number")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """Reads a positive whole number.

        Raises:
            UnreadableFileError: it is something else.
        """
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            key = self._prefix + name
            raise UnreadableFileError(f"{self.model.path}: {key} is {printable(repr(value))}; it must be at least 1")
        return value

    def check_all_read(self) -> None:
        """Refuses entries that were not read.

        Raises:
            UnreadableFileError: there are some.
        """
        of_model = {key.removeprefix(self._prefix) for key in self.model.metadata if key.startswith(self._prefix)}
        unknown = sorted(of_model - self._read - _KNOWN)
        if unknown:
            key = printable(self._prefix + unknown[0])
            raise UnreadableFileError(f"{self.model.path}: {key} is not supported for this architecture")


Settings = Callable[[_Entries, dict[str, Any]], dict[str, Any]]


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """Entries of config.json.

    Raises:
        UnreadableFileError: the architecture or a setting of it is not supported, or an entry is missing.
    """
    name = model.metadata.get("general.architecture")
    served = {each: found for each, found in ARCHITECTURES.items() if found[0] in support_model_arch_dict}
    if name not in served:
        found = printable(name) if isinstance(name, str) else "without a name"
        raise UnreadableFileError(f"{model.path} has the architecture {found}; supported: {', '.join(served)}")
    _check_without_effect(model)
    architecture, settings = served[str(name)]
    entries = _Entries(model, str(name))
    config = _common(entries) | {"architectures": [architecture]}
    config |= settings(entries, config)
    entries.check_all_read()
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    if rope["rope_type"] == "longrope" and "long_factor" not in rope:
        raise entries.fault("rope.scaling.type longrope is supported for phi3 alone, with factors")
    return config


def gguf_sampling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of generation_config.json that a GGUF file has; empty for settings from another file."""
    found = config.get("gguf_sampling")
    return found if isinstance(found, dict) else {}


def sampling_entries(model: GgufModel) -> dict[str, Any]:
    """Values of a GGUF file for parameters that a request leaves out, as entries of generation_config.json."""
    return {
        ours: _rounded(value)
        for theirs, ours in _SAMPLING.items()
        if isinstance(value := model.metadata.get(f"general.sampling.{theirs}"), int | float)
    }


def _check_without_effect(model: GgufModel) -> None:
    for key, ignored in _WITHOUT_EFFECT.items():
        value = model.metadata.get(key)
        is_empty = isinstance(value, GgufArray) and not value.num_items
        if value is not None and value not in ignored and not is_empty:
            raise UnreadableFileError(f"{model.path}: {key} is not supported")
    repeat = model.metadata.get("general.sampling.penalty_repeat", 1)
    # llama.cpp's default is 64.
    last = model.metadata.get("general.sampling.penalty_last_n", 64)
    if repeat != 1 and last != -1:
        has = f"penalty_repeat {printable(str(_rounded(repeat)))} for the last {printable(str(last))} tokens"
        raise UnreadableFileError(f"{model.path}: general.sampling has {has}; valid: penalty_last_n -1, all tokens")


def _common(entries: _Entries) -> dict[str, Any]:
    model = entries.model
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnreadableFileError(f"{model.path} has no tensor token_embd.weight")
    hidden, heads = entries.count("embedding_length"), entries.count("attention.head_count")
    head_dim = entries.count("attention.key_length", hidden // heads)
    # Latent attention has values of another width than keys.
    if not entries.has("attention.kv_lora_rank") and entries.count("attention.value_length", head_dim) != head_dim:
        raise UnreadableFileError(f"{model.path}: attention.value_length differs from attention.key_length")
    if entries.get("attention.causal", True) is not True:
        raise UnreadableFileError(f"{model.path}: attention.causal is false, which is not supported")
    weights = frozenset(tensor.type for tensor in model.tensors.values() if len(tensor.shape) > 1)
    return {
        "hidden_size": hidden,
        "intermediate_size": entries.count("feed_forward_length"),
        "num_hidden_layers": entries.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _rounded(entries.get("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": entries.count("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "rope_parameters": _rope(entries),
        "dtype": _DTYPES.get(weights, "bfloat16"),
        "bos_token_id": token_id(model, "bos"),
        "eos_token_id": end_ids(model),
        # Marks settings that come from a GGUF file.
        "gguf_sampling": sampling_entries(model),
    }


def _rounded(value: Any) -> Any:
    """The shortest decimal number of a float32, as config.json of the original had it: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) and math.isfinite(value) else value


def _rope(entries: _Entries) -> dict[str, Any]:
    theta = {"rope_theta": _rounded(entries.get("rope.freq_base", 10000.0))}
    # As in llama.cpp, a factor without a type is linear.
    kind = entries.get("rope.scaling.type", "linear" if entries.get("rope.scaling.factor", 0.0) else "none")
    factors = entries.model.floats("rope_freqs.weight")
    if factors:
        if kind != "none":
            what = f"rope_freqs.weight together with rope.scaling.type {printable(str(kind))}"
            raise UnreadableFileError(f"{entries.model.path} has {what}, which is not supported")
        # Llama 3's scaling: factors for each wavelength, whatever the length of a sequence.
        length = entries.count("context_length")
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return theta | {"rope_type": "longrope", "original_max_position_embeddings": length} | both
    if kind in ("none", "longrope"):
        return theta | {"rope_type": "default" if kind == "none" else kind}
    scaling = {"rope_type": kind, "factor": _rounded(entries.get("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = entries.count("rope.scaling.original_context_length")
        optional = {
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        keys = {name: f"rope.scaling.{key}" for name, key in optional.items()}
        there = {name: key for name, key in keys.items() if entries.get(key, 0.0)}
        scaling |= {name: _rounded(entries.get(key)) for name, key in there.items()}
    return theta | scaling


def _whole_heads(entries: _Entries, config: dict[str, Any]) -> None:
    rotated = entries.count("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        what = f"rope.dimension_count is {rotated} of {config['head_dim']}"
        raise UnreadableFileError(f"{entries.model.path}: {what}, which is not supported for this architecture")


def _llama(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    if not entries.get("expert_count", 0) and not entries.get("expert_used_count", 0):
        return {"model_type": "llama"}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": entries.count("expert_count"),
        "num_experts_per_tok": entries.count("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {"model_type": "qwen3", "use_sliding_window": False}


def _mixture(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    if (entries.get("expert_gating_func", 0) or _SOFTMAX) != _SOFTMAX:
        raise entries.fault(f"expert_gating_func must be {_SOFTMAX}, softmax")
    return {
        "num_experts": entries.count("expert_count"),
        "num_experts_per_tok": entries.count("expert_used_count"),
        "moe_intermediate_size": entries.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2moe(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    shared = entries.count("expert_shared_feed_forward_length")
    own = {"model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    return _mixture(entries, config) | own | {"qkv_bias": config["attention_bias"]}


def _qwen3moe(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    return _mixture(entries, config) | {"model_type": "qwen3_moe", "norm_topk_prob": True}


def _part(rotated: int, head_dim: int) -> float:
    """Factor that rotates `rotated` of `head_dim` dimensions."""
    factor = min(rotated, head_dim) / head_dim
    return factor if int(head_dim * factor) >= min(rotated, head_dim) else math.nextafter(factor, 1.0)


def _phi3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    head_dim, rope = config["head_dim"], dict(config["rope_parameters"])
    rope["partial_rotary_factor"] = _part(entries.count("rope.dimension_count", head_dim), head_dim)
    longs, shorts = (entries.model.floats(f"rope_factors_{each}.weight") for each in ("long", "short"))
    factor = entries.get("rope.scaling.attn_factor", 1.0)
    if longs or shorts:
        if not longs or not shorts or "long_factor" in rope or rope["rope_type"] not in ("default", "longrope"):
            raise entries.fault("rope_factors_long and rope_factors_short need each other, and no further rope scaling")
        rope |= {"rope_type": "longrope", "attention_factor": _rounded(factor), "long_factor": longs}
        rope["short_factor"] = shorts
        rope["original_max_position_embeddings"] = entries.count("rope.scaling.original_context_length")
    window = entries.get(_WINDOW, 0)
    return {"model_type": "phi3", "rope_parameters": rope, "sliding_window": window or None}


def _granite(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    # Granite 4 without linear attention has settings of it all the same, and 0 experts if it is no mixture.
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        entries.get(f"ssm.{name}", 0)
    counts = [entries.get(name, 0) for name in ("expert_count", "expert_used_count")]
    if config["architectures"] == ["GraniteForCausalLM"] and any(counts):
        raise entries.fault("granite.expert_count is not 0, which is not supported")
    entries.get("expert_shared_feed_forward_length", 0)
    # For these two architectures llama.cpp rotates heads unless this entry is false.
    if entries.get("rope.scaling.finetuned", True) is not True:
        raise entries.fault("rope.scaling.finetuned is false, which is not supported for this architecture")
    names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    names |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    return {"model_type": "granite"} | {name: _rounded(entries.get(key)) for name, key in names.items()}


def _granitemoe(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    if entries.get("expert_shared_feed_forward_length", 0):
        raise entries.fault("granitemoe.expert_shared_feed_forward_length is not 0, which is not supported")
    mixture = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    counts = {name: entries.count(key) for name, key in mixture.items()}
    return _granite(entries, config) | {"model_type": "granitemoe"} | counts


def _smollm3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of SmolLM3: three of four layers rotate, which no entry says."""
    _whole_heads(entries, config)
    layers = range(1, min(config["num_hidden_layers"], MAX_MODEL_LAYERS) + 1)
    return {"model_type": "smollm3", "no_rope_layers": [int(layer % 4 > 0) for layer in layers]}


def _gemma(entries: _Entries, config: dict[str, Any], largest: int) -> dict[str, Any]:
    """Settings of both Gemmas; the model with the `largest` number of layers scales its scores in its own way."""
    head_dim = config["head_dim"]
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scalar if config["num_hidden_layers"] == largest else head_dim,
        "final_logit_softcapping": entries.get("final_logit_softcapping", 0.0) or None,
        "tie_word_embeddings": True,
    }


def _layer_types(entries: _Entries, config: dict[str, Any], pattern: int) -> list[str]:
    """Layers with a sliding window: from a list, or every layer but each `pattern`-th."""
    name = f"{_WINDOW}_pattern"
    count = min(config["num_hidden_layers"], MAX_MODEL_LAYERS)
    slides = entries.flags(name)
    if not slides:
        pattern = entries.count(name, pattern)
        slides = [layer % pattern > 0 for layer in range(1, count + 1)]
    if len(slides) < count:
        raise entries.fault(f"{name} lists {len(slides)} of {count} layers")
    return ["sliding_attention" if each else "full_attention" for each in slides[:count]]


def _gemma2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {
        "model_type": "gemma2",
        "sliding_window": entries.count(_WINDOW),
        "layer_types": _layer_types(entries, config, 2),
        "attn_logit_softcapping": entries.get("attn_logit_softcapping", 0.0) or None,
        **_gemma(entries, config, 46),
    }


def _gemma3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    local = {"rope_type": "default", "rope_theta": _rounded(entries.get("rope.freq_base_swa", 10000.0))}
    return {
        "model_type": "gemma3_text",
        "sliding_window": entries.count(_WINDOW),
        "layer_types": _layer_types(entries, config, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        **_gemma(entries, config, 62),
    }


def _olmo2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 2, or OLMo 3, which has windows; rope is scaled in layers without one alone."""
    _whole_heads(entries, config)
    if not entries.get(_WINDOW, 0):
        return {"model_type": "olmo2"}
    theta = config["rope_parameters"]["rope_theta"]
    local = {"rope_type": "default", "rope_theta": _rounded(entries.get("rope.freq_base_swa", theta))}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": entries.count(_WINDOW),
        "layer_types": _layer_types(entries, config, 4),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _gpt_oss(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of gpt-oss: its yarn does not round borders, which no entry says."""
    _whole_heads(entries, config)
    rope = config["rope_parameters"]
    return {
        "model_type": "gpt_oss",
        "intermediate_size": entries.count("expert_feed_forward_length"),
        "num_local_experts": entries.count("expert_count"),
        "num_experts_per_tok": entries.count("expert_used_count"),
        "sliding_window": entries.count(_WINDOW),
        "layer_types": _layer_types(entries, config, 2),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _grouped(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """Dense layers first, then mixtures with shared experts, then layers that draft."""
    drafts = entries.get("nextn_predict_layers", 0)
    if type(drafts) is not int or not 0 <= drafts < config["num_hidden_layers"]:
        raise entries.fault(f"nextn_predict_layers is {printable(str(drafts))}, not fewer than block_count")
    return {
        "num_hidden_layers": config["num_hidden_layers"] - drafts,
        "num_nextn_predict_layers": drafts,
        "first_k_dense_replace": entries.get("leading_dense_block_count", 0),
        "n_routed_experts": entries.count("expert_count"),
        "num_experts_per_tok": entries.count("expert_used_count"),
        "n_shared_experts": entries.count("expert_shared_count"),
        "moe_intermediate_size": entries.count("expert_feed_forward_length"),
        "routed_scaling_factor": _rounded(entries.get("expert_weights_scale", 0.0)) or 1.0,
        "norm_topk_prob": entries.get("expert_weights_norm", False),
        "n_group": entries.count("expert_group_count", 1),
        "topk_group": entries.count("expert_group_used_count", 1),
    }


def _glm4moe(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    if (entries.get("expert_gating_func", 0) or _SIGMOID) != _SIGMOID:
        raise entries.fault(f"expert_gating_func must be {_SIGMOID}, sigmoid")
    rotated = entries.count("rope.dimension_count", config["head_dim"])
    rope = config["rope_parameters"] | {"partial_rotary_factor": _part(rotated, config["head_dim"])}
    own = {"model_type": "glm4_moe", "use_qk_norm": "blk.0.attn_q_norm.weight" in entries.model.tensors}
    return _grouped(entries, config) | own | {"rope_parameters": rope}


def _deepseek2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2, or V3's form: experts scored by sigmoid, with a bias for their choice."""
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in entries.model.tensors)
    gating = entries.get("expert_gating_func", 0) or (_SIGMOID if has_bias else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise entries.fault(f"expert_gating_func must be {_SOFTMAX}, softmax, or {_SIGMOID}, sigmoid")
    rope = dict(config["rope_parameters"])
    rotated = entries.count("rope.dimension_count")
    mscale = _rounded(10.0 * entries.number("rope.scaling.yarn_log_multiplier", 0.0))
    if mscale and rope["rope_type"] == "yarn":
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    lengths = {name: entries.count(f"attention.{name}_length") for name in ("key", "value")}
    width, value_width = (entries.count(f"attention.{name}_length_mla", each) for name, each in lengths.items())
    if width <= rotated:
        raise entries.fault(f"rope.dimension_count is {rotated}; keys have only {width} numbers")
    mixture = _grouped(entries, config)
    own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    if gating == _SOFTMAX:
        method = "group_limited_greedy" if mixture["n_group"] > 1 else "greedy"
        own = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method}
    is_plain = "blk.0.attn_q.weight" in entries.model.tensors
    rank = entries.get("attention.q_lora_rank", 0)
    return {
        **mixture,
        **own,
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": None if is_plain else rank or entries.count("attention.q_lora_rank"),
        "kv_lora_rank": entries.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": value_width,
        "attention_bias": False,
        "rope_parameters": rope,
    }


# `general.architecture` -> the architecture here, and its own settings.
ARCHITECTURES: Final[Mapping[str, tuple[str, Settings]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3vl": ("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3moe),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "granite": ("GraniteForCausalLM", _granite),
    "granitemoe": ("GraniteMoeForCausalLM", _granitemoe),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "glm4moe": ("Glm4MoeForCausalLM", _glm4moe),
    "deepseek2": ("DeepseekV3ForCausalLM", _deepseek2),
}
