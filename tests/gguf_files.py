"""Writes GGUF files, and Hugging Face checkpoints as llama.cpp's converter writes them.

Blocks of quantized types are drawn at random, and their values computed by plain loops from the description of each
type (ggml's `ggml-common.h` and `dequantize_row_*`): an independent reference for the reader.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Number of a type, numbers of a block, bytes of a block.
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
# Places of a block's factors in float16. MXFP4 has a power of two in its first byte.
FACTORS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
QUANTIZED = tuple(FACTORS)
# Numbers of the codes of IQ4_NL and IQ4_XS, and of MXFP4.
_IQ4: Floats = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Number of a metadata type -> the key is written with it; else ints are u32, floats f32.
_KINDS = {
    "general.alignment": 4,
    "split.no": 2,
    "split.count": 2,
    "split.tensors.count": 5,
    "general.sampling.penalty_last_n": 5,
}


@dataclass
class GgufTensorData:
    """A tensor to write: its type, its shape (rows first) and its data."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class GgufContent:
    """A file to write. Each part of it can be made wrong on purpose.

    Attributes:
        metadata: values by key; lists are arrays of strings, of flags, of i32 or of f32.
        tensors: by name.
        alignment: of the tensors.
        version: of the format.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensorData] = field(default_factory=dict)
    alignment: int = 32
    version: int = 3

    def header(self) -> bytes:
        """Everything before the padding in front of the first tensor."""
        out = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))]
        for key, value in self.metadata.items():
            out += [_string(key), _value(key, value)]
        for (name, tensor), offset in zip(self.tensors.items(), self.offsets(), strict=True):
            dims = tensor.shape[::-1]
            out.append(_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            out.append(struct.pack("<IQ", TYPES[tensor.kind][0], offset))
        return b"".join(out)

    def offsets(self) -> Iterator[int]:
        """Offset of each tensor from the first one."""
        offset = 0
        for tensor in self.tensors.values():
            yield offset
            offset += -(-len(tensor.data) // self.alignment) * self.alignment

    def to_bytes(self) -> bytes:
        """The whole file."""
        out = bytearray(self.header())
        for tensor in self.tensors.values():
            out += bytes(-len(out) % self.alignment) + tensor.data
        return bytes(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        kind = 7 if value and isinstance(value[0], bool) else 6 if any(isinstance(one, float) for one in value) else 5
        return struct.pack(f"<IIQ{len(value)}{_FORMS[kind]}", 9, kind, len(value), *value)
    kind = 7 if isinstance(value, bool) else 6 if isinstance(value, float) else _KINDS.get(key, 4)
    return struct.pack(f"<I{_FORMS[kind]}", kind, value)


def float_tensor(kind: str, values: torch.Tensor) -> GgufTensorData:
    """A tensor of floats."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    data = values.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return GgufTensorData(kind, tuple(values.shape), data)


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Bytes:
    """Blocks of a matrix [rows, columns] whose values are about as large as those of a layer: uint8 [rows, B]."""
    _, numbers, size = TYPES[kind]
    blocks = rng.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = 126 - round(math.log2(3.0 * math.sqrt(columns))) + rng.integers(0, 2, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    # Spread of the codes times that of the scales of a block's groups.
    spread = {
        **{"Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q8_0": 74.0, "Q2_K": 1.1 * 8.8, "Q3_K": 2.3 * 18.5},
        **{"Q4_K": 4.6 * 37, "Q5_K": 9.2 * 37, "Q6_K": 18.5 * 74, "IQ4_NL": 69.0, "IQ4_XS": 69.0 * 18.5},
    }[kind]
    scales = (rng.uniform(0.5, 1.5, blocks.shape[:2]) / spread / math.sqrt(columns)).astype(np.float16)
    at, *offset = FACTORS[kind]
    blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if offset:
        middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
        offsets = (scales.astype(np.float32) * middle).astype(np.float16)
        blocks[:, :, offset[0] : offset[0] + 2] = offsets[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind: str, stored: Bytes) -> Floats:
    """Values of rows of blocks, by the description of the type: one number after the other, of all blocks at once.

    Each product and sum is rounded to float32.
    """
    _, numbers, size = TYPES[kind]
    blocks = stored.reshape(-1, size)
    value = {
        **{"Q4_0": _q4, "Q4_1": _q4, "Q5_0": _q5, "Q5_1": _q5, "Q8_0": _q8, "Q2_K": _q2_k, "Q3_K": _q3_k},
        **{"Q4_K": _k, "Q5_K": _k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4},
    }[kind]
    return np.stack([value(kind, blocks, i) for i in range(numbers)], 1).reshape(stored.shape[0], -1)


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _signed(column: Bytes) -> Floats:
    return column.view(np.int8).astype(np.float32)


def _q4(kind: str, blocks: Bytes, i: int) -> Floats:
    byte = blocks[:, (2 if kind == "Q4_0" else 4) + i % 16]
    code = (byte & 15 if i < 16 else byte >> 4).astype(np.float32)
    return _half(blocks, 0) * (code - 8) if kind == "Q4_0" else _half(blocks, 0) * code + _half(blocks, 2)


def _q5(kind: str, blocks: Bytes, i: int) -> Floats:
    at = 2 if kind == "Q5_0" else 4
    byte = blocks[:, at + 4 + i % 16]
    fifth = blocks[:, at + i // 8] >> (i % 8) & 1
    code = ((byte & 15 if i < 16 else byte >> 4) + 16 * fifth).astype(np.float32)
    return _half(blocks, 0) * (code - 16) if kind == "Q5_0" else _half(blocks, 0) * code + _half(blocks, 2)


def _two_bits(blocks: Bytes, at: int, i: int) -> Bytes:
    """Lowest bits of number i of 256: 32 bytes hold a part of 128 numbers, two bits of each for every 32 of them."""
    two: Bytes = blocks[:, at + i // 128 * 32 + i % 32] >> np.uint8(2 * (i % 128 // 32)) & np.uint8(3)
    return two


def _q2_k(kind: str, blocks: Bytes, i: int) -> Floats:
    both = blocks[:, i // 16]
    factor = _half(blocks, 80) * (both & 15).astype(np.float32)
    return factor * _two_bits(blocks, 16, i).astype(np.float32) - _half(blocks, 82) * (both >> 4).astype(np.float32)


def _q3_k(kind: str, blocks: Bytes, i: int) -> Floats:
    group = i // 16
    low = blocks[:, 96 + group % 8] >> (4 if group >= 8 else 0) & 15
    high = blocks[:, 104 + group % 4] >> (2 * (group // 4)) & 3
    third = blocks[:, i % 32] >> (i // 32) & 1
    factor = _half(blocks, 108) * ((low + 16 * high).astype(np.float32) - 32)
    return factor * (_two_bits(blocks, 32, i).astype(np.float32) - np.where(third, 0, 4).astype(np.float32))


def _iq4_nl(kind: str, blocks: Bytes, i: int) -> Floats:
    byte = blocks[:, 2 + i % 16]
    codes: Floats = _IQ4[byte & 15 if i < 16 else byte >> 4]
    return _half(blocks, 0) * codes


def _iq4_xs(kind: str, blocks: Bytes, i: int) -> Floats:
    group = i // 32
    low = blocks[:, 4 + group // 2] >> (4 * (group % 2)) & 15
    high = blocks[:, 2 + group // 4] >> (2 * (group % 4)) & 3
    byte = blocks[:, 8 + group * 16 + i % 16]
    factor = _half(blocks, 0) * ((low + 16 * high).astype(np.float32) - 32)
    codes: Floats = _IQ4[byte & 15 if i % 32 < 16 else byte >> 4]
    return factor * codes


def _mxfp4(kind: str, blocks: Bytes, i: int) -> Floats:
    byte = blocks[:, 1 + i % 16]
    power: Floats = np.exp2(blocks[:, 0].astype(np.float32) - 127)
    codes: Floats = _FP4[byte & 15 if i < 16 else byte >> 4]
    return power * codes


def _q8(kind: str, blocks: Bytes, i: int) -> Floats:
    return _half(blocks, 0) * _signed(blocks[:, 2 + i].copy())


def _k(kind: str, blocks: Bytes, i: int) -> Floats:
    scales, group = blocks[:, 4:16], i // 32
    if group < 4:
        scale, least = scales[:, group] & 63, scales[:, group + 4] & 63
    else:
        scale = scales[:, group + 4] & 15 | scales[:, group - 4] >> 6 << 4
        least = scales[:, group + 4] >> 4 | scales[:, group] >> 6 << 4
    byte = blocks[:, (16 if kind == "Q4_K" else 48) + i // 64 * 32 + i % 32]
    code = byte & 15 if i % 64 < 32 else byte >> 4
    if kind == "Q5_K":
        code = code | (blocks[:, 16 + i % 32] >> group & 1) << 4
    factor, offset = _half(blocks, 0) * scale.astype(np.float32), _half(blocks, 2) * least.astype(np.float32)
    return factor * code.astype(np.float32) - offset


def _q6_k(kind: str, blocks: Bytes, i: int) -> Floats:
    half, inside = divmod(i, 128)
    part, column = divmod(inside, 32)
    low = blocks[:, half * 64 + part % 2 * 32 + column] >> (4 if part > 1 else 0) & 15
    high = blocks[:, 128 + half * 32 + column] >> (2 * part) & 3
    factor = _half(blocks, 208) * _signed(blocks[:, 192 + i // 16].copy())
    return factor * ((low | high << 4).astype(np.float32) - 32)


# transformers' model_type -> name of the architecture in GGUF.
_ARCHITECTURES = {
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "mixtral": "llama", "olmo3": "olmo2"},
    **{"gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"},
}
_PAIRED = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b": "attn_k_b.weight",
    "self_attn.v_b": "attn_v_b.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.router.": "ffn_gate_inp.",
    "block_sparse_moe.gate.": "ffn_gate_inp.",
    "block_sparse_moe.router.layer.": "ffn_gate_inp.",
    "block_sparse_moe.w1": "ffn_gate",
    "block_sparse_moe.w3": "ffn_up",
    "block_sparse_moe.w2": "ffn_down",
    ".eh_proj": ".nextn.eh_proj",
    ".enorm": ".nextn.enorm",
    ".hnorm": ".nextn.hnorm",
    ".embed_tokens": ".nextn.embed_tokens",
    ".shared_head.": ".nextn.shared_head_",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_HAVE_POST_NORMS = ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4_moe", "gpt_oss")


def convert(folder: Path, kind: str, seed: int = 0) -> GgufContent:
    """A checkpoint as a GGUF file; matrices of other types than floats are drawn anew.

    The checkpoint's weights become the values that the file has: it is the reference for the file.

    Args:
        folder: written by `make_checkpoint`, in float32.
        kind: type of the matrices; those whose rows are not of whole blocks become Q8_0 or F16. With Q4_K_M, values,
            the last products of networks and embeddings are Q6_K, and the others Q4_K.
        seed: of the blocks.
    """
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(seed)
    tensors: dict[str, GgufTensorData] = {}
    values: dict[str, torch.Tensor] = {}
    stacked: dict[str, list[GgufTensorData]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        split, merge = _parted(name, weight, config)
        made = {own: _converted(own, part, kind, config, rng) for own, part in split.items()}
        values[name] = merge(*(value for _, value in made.values())).contiguous()
        for own, (data, _) in made.items():
            parts = own.split(".experts.")
            expert, _, projection = parts[-1].partition(".")
            if len(parts) < 2 or not expert.isdigit():
                tensors[_gguf_name(own, config)] = data
                continue
            stacked.setdefault(f"{parts[0]}.{projection}", []).append(data)
            assert len(stacked[f"{parts[0]}.{projection}"]) == int(expert) + 1
    for name, experts in stacked.items():
        first = experts[0]
        whole = b"".join(each.data for each in experts)
        gguf_name = _gguf_name(name, config).replace(".weight", "_exps.weight")
        tensors[gguf_name] = GgufTensorData(first.kind, (len(experts), *first.shape), whole)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return GgufContent(_metadata(config) | tokenizer_metadata(folder), tensors | _rope_tensors(config))


Merge = Callable[..., torch.Tensor]


def _parted(name: str, weight: torch.Tensor, config: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Merge]:
    """Tensors that the converter makes of one, and what makes that one of them again."""
    prefix, _, part = name.rpartition(".")
    layer = prefix.partition(".mlp")[0].partition(".block")[0]
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = weight.chunk(2, -2)
        return {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}, lambda *x: torch.cat(x, -2)
    if name.endswith("block_sparse_moe.output_linear.weight"):
        return {f"{layer}.ffn_down_exps.weight": weight}, lambda x: x
    if part in ("gate_up_proj", "gate_up_proj_bias"):
        kind, rows = ("bias", weight) if part.endswith("bias") else ("weight", weight.mT)
        pair = {f"{layer}.ffn_gate_exps.{kind}": rows[:, 0::2], f"{layer}.ffn_up_exps.{kind}": rows[:, 1::2]}
        if kind == "bias":
            return pair, lambda *x: torch.stack(x, 2).flatten(1)
        return pair, lambda *x: torch.stack(x, 2).flatten(1, 2).mT
    if part == "down_proj":
        return {f"{layer}.ffn_down_exps.weight": weight.mT}, lambda x: x.mT
    if part == "down_proj_bias":
        return {f"{layer}.ffn_down_exps.bias": weight}, lambda x: x
    if name.endswith("kv_b_proj.weight"):
        widths, rank = [config["qk_nope_head_dim"], config["v_head_dim"]], weight.shape[1]
        keys, of_values = weight.view(-1, sum(widths), rank).split_with_sizes(widths, 1)
        attention = name.removesuffix("kv_b_proj.weight")
        both = {f"{attention}k_b": keys.mT, f"{attention}v_b": of_values}
        return both, lambda k, v: torch.cat((k.mT, v), 1).reshape(-1, rank)
    return {name: weight}, lambda x: x


def _gguf_name(name: str, config: Mapping[str, Any]) -> str:
    names = _POST_NORMS if config["model_type"] in _HAVE_POST_NORMS else {}
    for ours, theirs in (_NAMES | names).items():
        name = name.replace(ours, theirs)
    return name


def _converted(
    name: str, weight: torch.Tensor, kind: str, config: Mapping[str, Any], rng: np.random.Generator
) -> tuple[GgufTensorData, torch.Tensor]:
    """A tensor as the file has it, and its values as the checkpoint has them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    paired = next((heads[part] for part in heads if f".{part}." in name), 0)
    paired = paired if config["model_type"] in _PAIRED else 0
    routers = ("mlp.gate.", "shared_expert_gate", "mlp.router.", "block_sparse_moe.gate.", "block_sparse_moe.router.")
    is_float = weight.dim() < 2 or name.endswith("bias") or any(each in name for each in routers)
    if kind == "Q4_K_M":
        kind = "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "embed_tokens")) else "Q4_K"
    kind = "F32" if is_float else kind
    if weight.shape[-1] % TYPES[kind][1]:
        kind = "F16" if weight.shape[-1] % 32 else "Q8_0"
    if kind in QUANTIZED:
        stored = random_blocks(kind, math.prod(weight.shape[:-1]), weight.shape[-1], rng)
        values = torch.from_numpy(values_of(kind, stored)).view(weight.shape)
        # Blocks are drawn as the file has them: the checkpoint's rows follow from that.
        return GgufTensorData(kind, tuple(weight.shape), stored.tobytes()), _unpaired(values, paired)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return float_tensor("F32", weight + 1), (weight + 1) - 1
    made = float_tensor(kind, _paired(weight, paired))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    return made, weight.to(dtype).float()


def _paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's `permute` of queries and keys."""
    if not heads:
        return weight
    parted = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parted.swapaxes(1, 2).reshape(weight.shape)


def _unpaired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    if not heads:
        return weight
    parted = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return parted.swapaxes(1, 2).reshape(weight.shape)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = _global_rope(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0),
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }
    values |= _rope_metadata(config)
    multipliers = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    multipliers |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    values |= {theirs: float(config[ours]) for ours, theirs in multipliers.items() if ours in config}
    values |= _mixture_metadata(config)
    if architecture == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if architecture.startswith("gemma"):
        types = config["layer_types"]
        values["attention.sliding_window"] = config["sliding_window"]
        values["attention.sliding_window_pattern"] = types.index("full_attention") + 1
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            values |= {name: float(config[name])} if config.get(name) else {}
    if architecture in ("olmo2", "gpt-oss") and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
        values["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if architecture == "deepseek2":
        values |= _latent_metadata(config)
    if "sliding_attention" in config["rope_parameters"]:
        values["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    return {"general.architecture": architecture} | {f"{architecture}.{key}": each for key, each in values.items()}


def _mixture_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        **{"num_experts": "expert_count", "num_local_experts": "expert_count", "n_routed_experts": "expert_count"},
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        **{"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        **{"n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count"},
    }
    values = {theirs: config[ours] for ours, theirs in names.items() if config.get(ours) is not None}
    kind = config["model_type"]
    if kind == "gpt_oss":
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        values["expert_weights_scale"] = float(config["routed_scaling_factor"])
        values["expert_gating_func"] = 1 if kind == "deepseek_v2" else 2
        if config["norm_topk_prob"]:
            values["expert_weights_norm"] = True
        if config.get("num_nextn_predict_layers"):
            values["nextn_predict_layers"] = config["num_nextn_predict_layers"]
    return values


def _latent_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The latent as one key and value head for all, and the widths of a head beside it."""
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    values = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotated,
    }
    if config["q_lora_rank"] is not None:
        values["attention.q_lora_rank"] = config["q_lora_rank"]
    return values


def _rope_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rope, values = _global_rope(config), dict[str, Any]()
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("longrope", "yarn"):
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        original = rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        values["rope.scaling.attn_factor"] = factor
    return values


def _global_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    ropes = config["rope_parameters"]
    rope: Mapping[str, Any] = ropes.get("full_attention", ropes)
    return rope


def _rope_tensors(config: Mapping[str, Any]) -> dict[str, GgufTensorData]:
    rope = _global_rope(config)
    if rope["rope_type"] == "longrope":
        both = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{n}.weight": float_tensor("F32", torch.tensor(each)) for n, each in both.items()}
    if rope["rope_type"] != "llama3":
        return {}
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, config["head_dim"], 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / config["head_dim"])
        smooth = (length / wave - low) / (high - low)
        mixed = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < length / high else rope["factor"] if wave > length / low else mixed)
    return {"rope_freqs.weight": float_tensor("F32", torch.tensor(factors))}


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Metadata of a checkpoint's byte-level tokenizer, as `_set_vocab_gpt2` of the converter writes it."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = dict(content["model"]["vocab"])
    added = {token["id"]: token for token in content["added_tokens"]}
    vocab |= {token["content"]: id for id, token in added.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [3 if i in added and added[i]["special"] else 4 if i in added else 1 for i in range(len(tokens))]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    values: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if settings.get(f"{name}_token"):
            values[f"{key}_token_id"] = vocab[settings[f"{name}_token"]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    template = folder / "chat_template.jinja"
    return metadata | ({"tokenizer.chat_template": template.read_text()} if template.exists() else {})
