"""config.json of a model whose GGUF file has none, from the file's metadata.

Every entry that an architecture's converter in llama.cpp may write is either read or known to have no effect; any other
entry of the architecture is refused.
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
from worker.config.gguf_tokenizer import end_ids

# Entries that any architecture may have and that need not be read: without effect on numbers, or of a rope scaling that
# the model does not have.
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
        "pooling_type",
    )
)
_SOFTMAX: Final = 1
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
            UnreadableFileError: it differs by layer, or is missing and there is no default.
        """
        self._read.add(name)
        key = self._prefix + name
        value: Any = self.model.metadata.get(key, default)
        if isinstance(value, GgufArray):
            values = set(self.model.numbers(key))
            if len(values) != 1:
                raise UnreadableFileError(f"{self.model.path}: {key} differs by layer, which is not supported")
            value = values.pop()
        if value is None:
            raise UnreadableFileError(f"{self.model.path} has no {key}")
        return value

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
    served = {each: found for each, found in _ARCHITECTURES.items() if found[0] in support_model_arch_dict}
    if name not in served:
        found = printable(str(name))
        raise UnreadableFileError(f"{model.path} has the architecture {found}; supported: {', '.join(served)}")
    architecture, settings = served[str(name)]
    entries = _Entries(model, str(name))
    config = _common(entries) | {"architectures": [architecture]}
    config |= settings(entries, config)
    entries.check_all_read()
    return config


def _common(entries: _Entries) -> dict[str, Any]:
    model = entries.model
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnreadableFileError(f"{model.path} has no tensor token_embd.weight")
    hidden, heads = entries.count("embedding_length"), entries.count("attention.head_count")
    head_dim = entries.count("attention.key_length", hidden // heads)
    if entries.count("attention.value_length", head_dim) != head_dim:
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
        "bos_token_id": model.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(model),
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
        if kind not in ("none", "longrope"):
            what = f"rope_freqs.weight together with rope.scaling.type {printable(str(kind))}"
            raise UnreadableFileError(f"{entries.model.path} has {what}, which is not supported")
        # Llama 3's scaling: factors for each wavelength, whatever the length of a sequence.
        length = entries.count("context_length")
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return theta | {"rope_type": "longrope", "original_max_position_embeddings": length} | both
    if kind in ("none", "longrope"):
        return theta | {"rope_type": "default"}
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
    for name in ("expert_count", "expert_used_count"):
        if entries.get(name, 0):
            raise UnreadableFileError(f"{entries.model.path}: llama.{name} is not 0; mixtures are not supported here")
    return {"model_type": "llama"}


def _qwen2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {"model_type": "qwen3", "use_sliding_window": False}


def _mixture(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    if entries.get("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise UnreadableFileError(f"{entries.model.path}: expert_gating_func must be {_SOFTMAX}, softmax")
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


def _phi3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    head_dim, rope = config["head_dim"], dict(config["rope_parameters"])
    rotated = min(entries.count("rope.dimension_count", head_dim), head_dim)
    rope["partial_rotary_factor"] = rotated / head_dim
    if int(head_dim * rope["partial_rotary_factor"]) < rotated:
        rope["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 1.0)
    longs = entries.model.floats("rope_factors_long.weight")
    factor = entries.get("rope.scaling.attn_factor", 1.0)
    if longs:
        rope |= {"rope_type": "longrope", "attention_factor": _rounded(factor), "long_factor": longs}
        rope["short_factor"] = entries.model.floats("rope_factors_short.weight")
        rope["original_max_position_embeddings"] = entries.count("rope.scaling.original_context_length")
    window = entries.get("attention.sliding_window", 0)
    return {"model_type": "phi3", "rope_parameters": rope, "sliding_window": window or None}


def _granite(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    names |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    return {"model_type": "granite"} | {name: _rounded(entries.get(key)) for name, key in names.items()}


def _smollm3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp rotates in three of four layers, and no entry says so."""
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
    """Layers with a sliding window, all but each last one of `pattern` layers."""
    pattern = entries.count("attention.sliding_window_pattern", pattern)
    layers = range(1, min(config["num_hidden_layers"], MAX_MODEL_LAYERS) + 1)
    return ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]


def _gemma2(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    return {
        "model_type": "gemma2",
        "sliding_window": entries.count("attention.sliding_window"),
        "layer_types": _layer_types(entries, config, 2),
        "attn_logit_softcapping": entries.get("attn_logit_softcapping", 0.0) or None,
        **_gemma(entries, config, 46),
    }


def _gemma3(entries: _Entries, config: dict[str, Any]) -> dict[str, Any]:
    _whole_heads(entries, config)
    local = {"rope_type": "default", "rope_theta": _rounded(entries.get("rope.freq_base_swa", 10000.0))}
    return {
        "model_type": "gemma3_text",
        "sliding_window": entries.count("attention.sliding_window"),
        "layer_types": _layer_types(entries, config, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        **_gemma(entries, config, 62),
    }


# `general.architecture` -> the architecture here, and its own settings.
_ARCHITECTURES: Final[Mapping[str, tuple[str, Settings]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3moe),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "granite": ("GraniteForCausalLM", _granite),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
}
