"""Tensors of a GGUF file as the tensors of the Hugging Face checkpoint that it was made from.

llama.cpp's converter renames tensors, stacks experts, reorders the rows of some queries and keys, and adds 1 to some
norms. Here each is undone: a row is stored whole, so reordering rows keeps the codes of quantized ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from common.limits import MAX_MODEL_EXPERTS
from kernels.grouped_weight import GroupedWeight
from worker.config.gguf_file import BLOCKS, GgufArray, GgufModel, GgufTensor, printable
from worker.config.model_config import ModelError
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.safetensors_file import DTYPES, Entry, Shape
from worker.weights.stored_tensors import PIECE_NUMBERS, Files, FloatTensor, Index, StoredTensor
from worker.weights.tensor_index import some

_FLOATS: Final = ("F32", "F16", "BF16")
_LAYER: Final = re.compile(r"blk\.(\d{1,4})\.([a-z0-9_]+)\.(weight|bias)")
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Names of an architecture that differ from those above.
_GEMMA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_PARTS: Final = {"phi3": {"ffn_up": "mlp.gate_up_proj"}, "gemma2": _GEMMA, "gemma3": _GEMMA}
# Architectures whose norms are stored with 1 added.
_SHIFTED: Final = ("gemma2", "gemma3")
# Architectures whose queries and keys are stored in pairs of rows that rotate together -> metadata with the heads.
_PAIRED: Final = ("llama", "granite", "smollm3")
_HEADS: Final = {"attn_q": "head_count", "attn_k": "head_count_kv"}
# Read with the settings (worker/config/gguf_config.py).
_SETTINGS: Final = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))


def find_gguf_tensors(model: GgufModel, expected: Mapping[str, Shape]) -> dict[str, StoredTensor]:
    """Finds each expected tensor.

    Args:
        model: content of the files.
        expected: name and shape of every tensor of the model, as in a Hugging Face checkpoint.

    Raises:
        ModelError: tensors are missing, surplus, or of another shape; names them as the file does.
    """
    stored = {name: place for name, place in _stored(model) if name in expected}
    missing = sorted(expected.keys() - stored.keys())
    used = {stored[name].tensor for name in expected.keys() & stored.keys()}
    known = {name for name, tensor in model.tensors.items() if tensor in used} | _SETTINGS
    surplus = sorted(map(printable, model.tensors.keys() - known))
    misshapen = [
        f"{name} is {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in stored and _without_ones(stored[name].shape) != _without_ones(shape)
    ]
    experts = Counter(place.tensor for place in stored.values() if place.expert is not None)
    misshapen += [
        f"{name} has {tensor.shape[0]} experts, expected {experts[tensor]}"
        for name, tensor in model.tensors.items()
        if tensor in experts and tensor.shape[0] != experts[tensor]
    ]
    texts = (("missing ", missing), ("surplus ", surplus), ("", misshapen))
    problems = [prefix + some(names) for prefix, names in texts if names]
    if problems:
        raise ModelError(f"the tensors of {model.path} do not fit its metadata: {'; '.join(problems)}")
    return {name: stored[name].placed(shape) for name, shape in expected.items()}


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


@dataclass(frozen=True)
class _Place:
    """A tensor of the model in the file.

    Attributes:
        tensor: that holds it.
        expert: which of several matrices; None for the whole tensor.
        heads: of queries or keys whose rows are stored in pairs; 0 for rows in their order.
        is_shifted: True for a norm that is stored with 1 added.
    """

    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0
    is_shifted: bool = False

    @property
    def shape(self) -> Shape:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def placed(self, shape: Shape) -> StoredTensor:
        """The tensor, in the shape that the model has it in."""
        file, kind, whole, offset, num_bytes = self.tensor
        if self.expert is not None:
            num_bytes //= whole[0]
            offset += self.expert * num_bytes
        if self.heads and shape[0] % (2 * self.heads):
            raise ModelError(f"{file}: {shape[0]} rows of queries or keys are not {self.heads} heads of pairs")
        if kind in _FLOATS:
            entry = Entry(file, kind, shape, offset, num_bytes)
            changed = self.heads or self.is_shifted
            return ChangedFloats(entry, self.heads, self.is_shifted) if changed else FloatTensor(entry)
        if len(shape) != 2:
            raise ModelError(f"{file}: a tensor {list(shape)} is of the type {kind}, which only matrices can have")
        rows = shape[0]
        return GgufBlocks(shape, Entry(file, "U8", (rows, num_bytes // rows), offset, num_bytes), kind, self.heads)


def _stored(model: GgufModel) -> Iterator[tuple[str, _Place]]:
    """Tensors by their names in a Hugging Face checkpoint; those with unknown names are left out."""
    architecture = str(model.metadata["general.architecture"])
    parts = _PARTS | _OWN_PARTS.get(architecture, {})
    for name, tensor in model.tensors.items():
        top, _, kind = name.partition(".")
        if top in _TOP and kind in ("weight", "bias"):
            yield f"{_TOP[top]}.{kind}", _Place(tensor, is_shifted=architecture in _SHIFTED and top.endswith("_norm"))
        found = _LAYER.fullmatch(name)
        if found is None:
            continue
        layer, part, kind = found.groups()
        prefix = f"model.layers.{int(layer)}"
        if part in parts:
            is_shifted = architecture in _SHIFTED and part.endswith("_norm")
            place = _Place(tensor, heads=_heads(model, architecture, part), is_shifted=is_shifted)
            yield f"{prefix}.{parts[part]}.{kind}", place
        elif part in _EXPERTS and len(tensor.shape) == 3:
            if tensor.shape[0] > MAX_MODEL_EXPERTS:
                raise ModelError(f"{name} has {tensor.shape[0]} experts; at most {MAX_MODEL_EXPERTS} are valid")
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", _Place(tensor, expert)


def _heads(model: GgufModel, architecture: str, part: str) -> int:
    if architecture not in _PAIRED or part not in _HEADS:
        return 0
    keys = [f"{architecture}.attention.{name}" for name in (_HEADS[part], "head_count")]
    key = next((each for each in keys if each in model.metadata), keys[0])
    value = model.metadata.get(key)
    # A list has one entry for each layer.
    found = set(model.numbers(key)) if isinstance(value, GgufArray) else {value}
    heads = found.pop() if len(found) == 1 else None
    if type(heads) is not int or heads < 1:
        raise ModelError(f"{model.path}: {key} must be one number of heads, at least 1, for all layers")
    return heads


def paired_rows(rows: slice, count: int, heads: int) -> torch.Tensor:
    """Rows of the file that hold the wanted ones of a model's `count` rows: int64.

    A head rotates its row i with row i + half of it; the file stores these two next to each other.
    """
    if not heads:
        return torch.arange(rows.start, rows.stop)
    width = count // heads
    wanted = torch.arange(rows.start, rows.stop)
    head, inside = wanted // width, wanted % width
    return head * width + inside % (width // 2) * 2 + inside // (width // 2)


@dataclass(frozen=True)
class ChangedFloats:
    """Floats that llama.cpp's converter changed.

    Attributes:
        entry: their place.
        heads: of queries or keys whose rows are stored in pairs (`paired_rows`); 0 for rows in their order.
        is_shifted: True for a norm that is stored with 1 added.
    """

    entry: Entry
    heads: int
    is_shifted: bool

    @property
    def shape(self) -> Shape:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_shifted else DTYPES[self.entry.dtype]

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor into `out`; see StoredTensor.copy."""
        rows, *columns = index
        stored = files.tensor(self.entry)
        ids = paired_rows(rows, self.shape[0], self.heads)
        step = max(1, PIECE_NUMBERS // max(1, math.prod(self.shape[1:])))
        for part, place in zip(torch.split(ids, step), torch.split(out, step), strict=True):
            values = stored.index_select(0, part)[(slice(None), *columns)]
            place.copy_(values.float() - 1.0 if self.is_shifted else values)
            files.of(self.entry).release(stored[int(part.min()) : int(part.max()) + 1])


class GgufBlocks(GroupedTensor):
    """A matrix in blocks of one of ggml's quantized types.

    Args:
        shape: [N, K].
        entry: its rows, as bytes [N, B].
        kind: name of the type.
        heads: see `paired_rows`; 0 for rows in their order.
    """

    def __init__(self, shape: Shape, entry: Entry, kind: str, heads: int = 0) -> None:
        self.shape = shape
        self.group = 16 if kind == "Q6_K" else 32
        self._entry = entry
        self._kind = kind
        self._heads = heads

    @property
    def num_bytes(self) -> int:
        return self._entry.num_bytes

    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        """Reads rows; see GroupedTensor."""
        stored = files.tensor(self._entry)
        ids = paired_rows(rows, stored.shape[0], self._heads)
        own = stored.index_select(0, ids)
        if len(ids):
            files.of(self._entry).release(stored[int(ids.min()) : int(ids.max()) + 1])
        return gguf_weight(own, self._kind)


def gguf_weight(rows: torch.Tensor, kind: str) -> GroupedWeight:
    """Codes and scales of rows of blocks, uint8 [N, B], of one of ggml's quantized types."""
    blocks = rows.view(rows.shape[0], -1, BLOCKS[kind][1])
    weight = _READERS[kind](blocks)
    flat = {
        name: value.reshape(rows.shape[0], -1)
        for name in ("codes", "scales", "zeros", "offsets")
        if (value := getattr(weight, name)) is not None
    }
    return GroupedWeight(bits=weight.bits, group=weight.group, **flat)


@dataclass(frozen=True)
class _Blocks:
    """Codes [N, n, numbers] and scales, zeros and offsets [N, n, groups] of blocks [N, n, B]."""

    bits: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [N, n, 1] at a byte of each block."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)


def _parted(stored: torch.Tensor, *sizes: int) -> torch.Tensor:
    """[N, n, product of `sizes`] -> [N, n, *sizes]"""
    return stored.reshape(*stored.shape[:2], *sizes)


def _nibbles(stored: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of 4 bits of each block: of `width` bytes the lower halves, then the upper halves, and so on."""
    parts = _parted(stored, -1, width)
    return torch.stack((parts & 15, parts >> 4), 3).flatten(2)


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(4, 32, _nibbles(blocks[:, :, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    return _Blocks(4, 32, _nibbles(blocks[:, :, 4:], 16), scales, _zeros(scales), -least.float())


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    # Signed numbers become codes around 128.
    return _Blocks(8, 32, blocks[:, :, 2:] ^ 128, _halves(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    scales, offsets = _k_scales(blocks)
    return _Blocks(4, 32, _nibbles(blocks[:, :, 16:], 32), scales, _zeros(scales), offsets)


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    scales, offsets = _k_scales(blocks)
    low = _parted(_nibbles(blocks[:, :, 48:], 32), 8, 32)
    bits = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1)
    high = blocks[:, :, 16:48].unsqueeze(2) >> bits & 1
    # Around the middle code, so that sums of products stay small.
    middle = torch.full(scales.shape, 128 - 16, dtype=torch.uint8)
    return _Blocks(8, 32, (low | high << 4) + (128 - 16), scales, middle, offsets)


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    low = _parted(_nibbles(blocks[:, :, :128], 64), 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 1, 4, 1)
    high = _parted(blocks[:, :, 128:192], 2, 1, 32) >> shifts & 3
    scales = _halves(blocks, 208).float() * blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    # Codes around 32 become codes around 128.
    return _Blocks(8, 16, (low | high << 4) + (128 - 32), scales)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets of the eight groups of a block of 256: 6 bits each, times a factor of the block."""
    low, offsets, rest = _parted(blocks[:, :, 4:16], 3, 4).unbind(2)
    scale_codes = torch.cat((low & 63, rest & 15 | low >> 2 & 48), 2)
    offset_codes = torch.cat((offsets & 63, rest >> 4 | offsets >> 2 & 48), 2)
    return _halves(blocks, 0).float() * scale_codes.float(), _halves(blocks, 2).float() * offset_codes.float()


def _zeros(scales: torch.Tensor) -> torch.Tensor:
    return torch.zeros(scales.shape, dtype=torch.uint8)


_READERS: Final[Mapping[str, Callable[[torch.Tensor], _Blocks]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
