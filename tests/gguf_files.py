"""Writes GGUF files, and Hugging Face checkpoints as llama.cpp's converter writes them.

Blocks of quantized types are drawn at random, and their values computed by plain loops from the description of each
type (ggml's `ggml-common.h` and `dequantize_row_*`): an independent reference for the reader.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
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
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Number of a metadata type -> the key is written with it; else ints are u32, floats f32.
_KINDS = {"general.alignment": 4, "split.no": 2, "split.count": 2, "split.tensors.count": 5}


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
        metadata: values by key; lists are arrays of strings, of i32 or of f32.
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
        kind = 6 if any(isinstance(each, float) for each in value) else 5
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
    # Spread of the codes times that of the scales of a block's groups.
    spread = {"Q4_0": 4.6, "Q4_1": 4.6, "Q8_0": 74.0, "Q4_K": 4.6 * 37, "Q5_K": 9.2 * 37, "Q6_K": 18.5 * 74}[kind]
    scales = (rng.uniform(0.5, 1.5, blocks.shape[:2]) / spread / math.sqrt(columns)).astype(np.float16)
    at = 208 if kind == "Q6_K" else 0
    blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if kind in ("Q4_1", "Q4_K", "Q5_K"):
        middle = {"Q4_1": -7.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
        blocks[:, :, 2:4] = (scales.astype(np.float32) * middle).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind: str, stored: Bytes) -> Floats:
    """Values of rows of blocks, by the description of the type: one number after the other, of all blocks at once.

    Each product and sum is rounded to float32.
    """
    _, numbers, size = TYPES[kind]
    blocks = stored.reshape(-1, size)
    value = {"Q4_0": _q4, "Q4_1": _q4, "Q8_0": _q8, "Q4_K": _k, "Q5_K": _k, "Q6_K": _q6_k}[kind]
    return np.stack([value(kind, blocks, i) for i in range(numbers)], 1).reshape(stored.shape[0], -1)


def _half(blocks: Bytes, at: int) -> Floats:
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _signed(column: Bytes) -> Floats:
    return column.view(np.int8).astype(np.float32)


def _q4(kind: str, blocks: Bytes, i: int) -> Floats:
    byte = blocks[:, (2 if kind == "Q4_0" else 4) + i % 16]
    code = (byte & 15 if i < 16 else byte >> 4).astype(np.float32)
    return _half(blocks, 0) * (code - 8) if kind == "Q4_0" else _half(blocks, 0) * code + _half(blocks, 2)


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
_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
_PAIRED = ("llama", "granite", "smollm3")
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def convert(folder: Path, kind: str, seed: int = 0) -> GgufContent:
    """A checkpoint as a GGUF file; matrices of other types than floats are drawn anew.

    The checkpoint's weights become the values that the file has: it is the reference for the file.

    Args:
        folder: written by `make_checkpoint`, in float32.
        kind: type of the matrices; those whose rows are not of whole blocks become Q8_0 or F16.
        seed: of the blocks.
    """
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(seed)
    tensors: dict[str, GgufTensorData] = {}
    values: dict[str, torch.Tensor] = {}
    stacked: dict[str, list[tuple[GgufTensorData, torch.Tensor]]] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = _converted(name, weight, kind, config, rng)
        parts = name.split(".experts.")
        if len(parts) == 2:
            expert, _, projection = parts[1].partition(".")
            stacked.setdefault(f"{parts[0]}.{projection}", []).append(made)
            assert len(stacked[f"{parts[0]}.{projection}"]) == int(expert) + 1
        else:
            tensors[_gguf_name(name, config)] = made[0]
        values[name] = made[1].contiguous()
    for name, experts in stacked.items():
        first = experts[0][0]
        whole = b"".join(each.data for each, _ in experts)
        gguf_name = _gguf_name(name, config).replace(".weight", "_exps.weight")
        tensors[gguf_name] = GgufTensorData(first.kind, (len(experts), *first.shape), whole)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return GgufContent(_metadata(config) | tokenizer_metadata(folder), tensors | _rope_tensors(config))


def _gguf_name(name: str, config: Mapping[str, Any]) -> str:
    names = _GEMMA_NAMES if config["model_type"].startswith("gemma") else {}
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
    is_float = weight.dim() < 2 or "mlp.gate." in name or "shared_expert_gate" in name
    kind = "F32" if is_float else kind
    if weight.shape[-1] % TYPES[kind][1]:
        kind = "F16" if weight.shape[-1] % 32 else "Q8_0"
    if kind in QUANTIZED:
        stored = random_blocks(kind, weight.shape[0], weight.shape[1], rng)
        values = torch.from_numpy(values_of(kind, stored))
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
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
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
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("longrope", "yarn"):
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        original = rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        values["rope.scaling.attn_factor"] = factor
    multipliers = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    multipliers |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    values |= {theirs: float(config[ours]) for ours, theirs in multipliers.items() if ours in config}
    mixtures = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }
    mixtures |= {"moe_intermediate_size": "expert_feed_forward_length"}
    mixtures |= {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
    values |= {theirs: config[ours] for ours, theirs in mixtures.items() if ours in config}
    if architecture == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if architecture.startswith("gemma"):
        types = config["layer_types"]
        values["attention.sliding_window"] = config["sliding_window"]
        values["attention.sliding_window_pattern"] = types.index("full_attention") + 1
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            values |= {name: float(config[name])} if config.get(name) else {}
    if architecture == "gemma3":
        values["rope.freq_base_swa"] = float(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    return {"general.architecture": architecture} | {f"{architecture}.{key}": each for key, each in values.items()}


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
