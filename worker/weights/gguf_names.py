"""Names of tensors in GGUF files, as llama.cpp's converter gives them, and their names in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# A tensor of a layer: number of the layer, name of the tensor.
LAYER: Final = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z0-9_.]+\.(?:weight|bias))")
TOP: Final = {
    f"{theirs}.{kind}": f"{ours}.{kind}"
    for theirs, ours in {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}.items()
    for kind in ("weight", "bias")
}
# Parts of a layer, without `.weight` and `.bias`.
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Several experts share a network in DeepSeek's form, and the last layers may draft.
_GROUPED: Final = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_LATENT: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_POST_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA: Final = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
# Parts of an architecture with other names.
_OWN_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _POST_NORMS,
    "granitemoe": {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
    },
    "deepseek2": {**_LATENT, **_GROUPED},
    "glm4moe": {**_POST_NORMS, **_GROUPED},
    "gpt-oss": {**_POST_NORMS, "ffn_gate_inp": "mlp.router"},
}
# Tensors whose names in a checkpoint end otherwise.
_WHOLE_NAMES: Final = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_EXPERTS: Final = {
    "ffn_gate_exps.weight": "mlp.experts.{}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{}.down_proj.weight",
}
# Stacks of experts that a checkpoint has as one tensor for each expert.
_OWN_EXPERTS: Final[Mapping[str, Mapping[str, str]]] = {
    "llama": {
        "ffn_gate_exps.weight": "block_sparse_moe.experts.{}.w1.weight",
        "ffn_up_exps.weight": "block_sparse_moe.experts.{}.w3.weight",
        "ffn_down_exps.weight": "block_sparse_moe.experts.{}.w2.weight",
    },
    "granitemoe": {},
    "gpt-oss": {},
}
# Architectures whose norms are stored with 1 added.
SHIFTED: Final = ("gemma2", "gemma3")
# Architectures whose queries and keys are stored in pairs of rows that rotate together.
PAIRED: Final = ("llama", "granite", "granitemoe", "smollm3")


@dataclass(frozen=True)
class Join:
    """Tensor of a checkpoint that a GGUF file splits or transposes.

    Attributes:
        name: in the checkpoint, after the layer's.
        parts: names in the file, after the layer's.
        axis: dimension along which the parts are joined, counted from the last one.
        in_turn: True if rows of the parts alternate; False if they follow each other.
        transposed: for each part, whether its last two dimensions are exchanged.
        is_flat: True if the first two dimensions of the result are one in the checkpoint.
    """

    name: str
    parts: tuple[str, ...]
    axis: int
    transposed: tuple[bool, ...]
    in_turn: bool = False
    is_flat: bool = False


_GATES_UPS: Final = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_JOINS: Final[Mapping[str, tuple[Join, ...]]] = {
    "granitemoe": (Join("block_sparse_moe.input_linear.weight", _GATES_UPS, -2, (False, False)),),
    "deepseek2": (
        Join("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), -2, (True, False), is_flat=True),
    ),
    "gpt-oss": (
        Join("mlp.experts.gate_up_proj", _GATES_UPS, -1, (True, True), in_turn=True),
        Join(
            "mlp.experts.gate_up_proj_bias",
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
            -1,
            (False, False),
            in_turn=True,
        ),
        Join("mlp.experts.down_proj", ("ffn_down_exps.weight",), -1, (True,)),
    ),
}


class LayerNames:
    """Names of a layer's tensors in one architecture of GGUF."""

    def __init__(self, architecture: str) -> None:
        parts = {**_PARTS, **_OWN_PARTS.get(architecture, {})}
        self._names = {f"{part}.{kind}": f"{own}.{kind}" for part, own in parts.items() for kind in ("weight", "bias")}
        self._names |= _WHOLE_NAMES
        self._experts = _OWN_EXPERTS.get(architecture, _EXPERTS)
        # By the first of their parts, which represents the whole tensor.
        self._joins = {join.parts[0]: join for join in _JOINS.get(architecture, ())}

    def whole(self, part: str) -> str | None:
        """Name of a tensor that is stored as one; None for others."""
        return None if part in self._joins else self._names.get(part)

    def expert(self, part: str) -> str | None:
        """Name with a place for the number of an expert, for a stack of them; None for other tensors."""
        return self._experts.get(part)

    def join(self, part: str) -> Join | None:
        """Tensor whose first part this is; None for other tensors."""
        return self._joins.get(part)
