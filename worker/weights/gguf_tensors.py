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
from types import MappingProxyType
from typing import Final, Protocol

import torch

from common.limits import MAX_MODEL_EXPERTS
from kernels.grouped_weight import GroupedWeight
from worker.config.gguf_file import BLOCKS, GgufArray, GgufModel, GgufTensor, printable
from worker.config.model_config import ModelError
from worker.weights.gguf_names import LAYER, PAIRED, SHIFTED, TOP, Join, LayerNames
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.joined_tensors import FlatMatrices, JoinedFloats, JoinedGroups, RowOrder
from worker.weights.safetensors_file import DTYPES, Entry, Shape
from worker.weights.stored_tensors import PIECE_NUMBERS, Files, FloatTensor, Index, StoredTensor
from worker.weights.tensor_index import some

_FLOATS: Final = ("F32", "F16", "BF16")
_HEADS: Final = {"attn_q": "head_count", "attn_k": "head_count_kv"}
# Types with a scale for 16 columns; others have one for 32.
_SMALL_GROUPS: Final = ("Q2_K", "Q3_K", "Q6_K")
# Numbers of the 16 codes of IQ4_NL and IQ4_XS, and twice those of MXFP4, as codes of 8 bits around 128.
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4_CODES, _FP4_CODES = (torch.tensor([128 + each for each in one], dtype=torch.uint8) for one in (_IQ4, _FP4))
# Tensors that are read with the settings (worker/config/gguf_config.py).
_SETTINGS: Final = ("rope_freqs.weight",)
_OWN_SETTINGS: Final = {"phi3": ("rope_factors_long.weight", "rope_factors_short.weight")}
# A matrix of one expert, as old files of Mixtral have them.
_OLD_EXPERT: Final = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


def find_gguf_tensors(
    model: GgufModel,
    expected: Mapping[str, Shape],
    optional: Mapping[str, Shape] = MappingProxyType({}),
    kept: tuple[str, ...] = (),
) -> dict[str, StoredTensor]:
    """Finds each expected tensor.

    Args:
        model: content of the files.
        expected: name and shape of every tensor of the model, as in a Hugging Face checkpoint.
        optional: name and shape of further tensors that the files may have.
        kept: beginnings of names of further tensors that may be there and are left alone.

    Raises:
        ModelError: tensors are missing, surplus, or of another shape; names them as the file does.
    """
    stored: dict[str, StoredPlace] = {}
    known = {*_SETTINGS, *_OWN_SETTINGS.get(str(model.metadata["general.architecture"]), ())}
    twice = []
    for name, place in _stored(model, lambda name: name in expected or name in optional or name.startswith(kept)):
        known.update(place.names)
        if name in stored:
            twice.append(f"{printable(stored[name].names[0])} and {printable(place.names[0])}")
        if name in expected or name in optional:
            stored[name] = place
    expected = {name: shape for name, shape in {**expected, **optional}.items() if name in expected or name in stored}
    missing = sorted(expected.keys() - stored.keys())
    surplus = sorted(map(printable, model.tensors.keys() - known))
    misshapen = [
        f"{name} is {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in stored and _without_ones(stored[name].shape) != _without_ones(shape)
    ]
    experts = Counter(place.names[0] for place in stored.values() if isinstance(place, _Place) and place.is_expert)
    misshapen += [
        f"{name} has {model.tensors[name].shape[0]} experts, expected {count}"
        for name, count in experts.items()
        if model.tensors[name].shape[0] != count
    ]
    texts = (("missing ", missing), ("surplus ", surplus), ("", misshapen), ("the same tensor twice: ", twice))
    problems = [prefix + some(names) for prefix, names in texts if names]
    problems += ["convert the model again"] if any(map(_OLD_EXPERT.fullmatch, surplus)) else []
    if problems:
        raise ModelError(f"the tensors of {model.path} do not fit its metadata: {'; '.join(problems)}")
    return {name: stored[name].placed(shape) for name, shape in expected.items()}


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


class StoredPlace(Protocol):
    """A tensor of the model in the files."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the files of the tensors that hold it."""
        ...

    @property
    def shape(self) -> Shape:
        """Shape that the files give it."""
        ...

    def placed(self, shape: Shape) -> StoredTensor:
        """The tensor, in the shape that the model has it in."""
        ...


@dataclass(frozen=True)
class _Place:
    """A tensor that is stored as one.

    Attributes:
        name: in the file.
        tensor: that holds it.
        expert: which of several matrices; None for the whole tensor.
        heads: of queries or keys whose rows are stored in pairs; 0 for rows in their order.
        is_shifted: True for a norm that is stored with 1 added.
    """

    name: str
    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0
    is_shifted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def is_expert(self) -> bool:
        """True if it is one of the matrices of a stack."""
        return self.expert is not None

    @property
    def shape(self) -> Shape:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def placed(self, shape: Shape) -> StoredTensor:
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
        if len(shape) < 2:
            raise ModelError(f"{file}: a tensor {list(shape)} is of the type {kind}, which only matrices can have")
        rows = math.prod(shape[:-1])
        return GgufBlocks(shape, Entry(file, "U8", (rows, num_bytes // rows), offset, num_bytes), kind, self.heads)


@dataclass(frozen=True)
class _JoinedPlace:
    """A tensor that is stored as several."""

    join: Join
    parts: tuple[_Place, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    @property
    def shape(self) -> Shape:
        """Shape of the whole, of the first part alone if the parts do not fit each other."""
        count, *rest = self._joined_shape()
        return (count * rest[0], *rest[1:]) if self.join.is_flat and rest else (count, *rest)

    def placed(self, shape: Shape) -> StoredTensor:
        join, sources = self.join, tuple(part.placed(part.shape) for part in self.parts)
        order = RowOrder(tuple(each[join.axis] for each in self._shapes()), join.in_turn)
        joined = JoinedFloats(self._joined_shape(), sources, join.transposed, join.axis, order)
        groups = [source for source in sources if isinstance(source, GroupedTensor)]
        if join.is_flat:
            return FlatMatrices(joined)
        return JoinedGroups(joined, groups) if len(groups) == len(sources) else joined

    def _shapes(self) -> list[Shape]:
        """Shapes of the parts, with exchanged dimensions where the model has them so."""
        pairs = zip(self.parts, self.join.transposed, strict=True)
        return [(*one.shape[:-2], *one.shape[:-3:-1]) if transposed else one.shape for one, transposed in pairs]

    def _joined_shape(self) -> Shape:
        first, *others = self._shapes()
        axis = len(first) + self.join.axis
        if any((*each[:axis], first[axis], *each[axis + 1 :]) != first for each in others):
            return first
        return (*first[:axis], sum(each[axis] for each in self._shapes()), *first[axis + 1 :])


def _stored(model: GgufModel, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, StoredPlace]]:
    """Wanted tensors by their names in a Hugging Face checkpoint."""
    found = _renamed(model, is_wanted)
    return ((name, place) for name, place in found if is_wanted(name))


def _renamed(model: GgufModel, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, StoredPlace]]:
    """All tensors with known names, but stacks of experts only if the first expert is wanted."""
    architecture = str(model.metadata["general.architecture"])
    names = LayerNames(architecture)
    heads = {part: _heads(model, architecture, part) for part in _HEADS} if architecture in PAIRED else {}
    for name, tensor in model.tensors.items():
        is_shifted = architecture in SHIFTED and name.endswith("_norm.weight")
        if name in TOP:
            yield TOP[name], _Place(name, tensor, is_shifted=is_shifted)
        found = LAYER.fullmatch(name)
        if found is None:
            continue
        layer, part = found.groups()
        prefix = f"model.layers.{int(layer)}"
        whole, expert, join = names.whole(part), names.expert(part), names.join(part)
        if whole is not None:
            yield f"{prefix}.{whole}", _Place(name, tensor, None, heads.get(part.partition(".")[0], 0), is_shifted)
        elif join is not None:
            own = [f"blk.{layer}.{each}" for each in join.parts]
            if all(each in model.tensors and len(model.tensors[each].shape) + join.axis >= 0 for each in own):
                yield f"{prefix}.{join.name}", _JoinedPlace(join, tuple(_Place(n, model.tensors[n]) for n in own))
        elif expert is not None and len(tensor.shape) == 3 and is_wanted(f"{prefix}.{expert.format(0)}"):
            if tensor.shape[0] > MAX_MODEL_EXPERTS:
                raise ModelError(f"{name} has {tensor.shape[0]} experts; at most {MAX_MODEL_EXPERTS} are valid")
            for number in range(tensor.shape[0]):
                yield f"{prefix}.{expert.format(number)}", _Place(name, tensor, number)


def _heads(model: GgufModel, architecture: str, part: str) -> int:
    """Number of heads of queries or keys, for all layers."""
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
    """A matrix, or a stack of them, in blocks of one of ggml's quantized types.

    Args:
        shape: [N, K], or [E, N, K] of a stack.
        entry: all rows, as bytes [E * N, B].
        kind: name of the type.
        heads: see `paired_rows`; 0 for rows in their order.
    """

    def __init__(self, shape: Shape, entry: Entry, kind: str, heads: int = 0) -> None:
        self.shape = shape
        self.group = 16 if kind in _SMALL_GROUPS else 32
        self._entry = entry
        self._kind = kind
        self._heads = heads

    @property
    def num_bytes(self) -> int:
        return self._entry.num_bytes

    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        """Reads rows; see GroupedTensor."""
        stored = files.tensor(self._entry)
        ids = paired_rows(rows, self.shape[-2], self._heads) + expert * self.shape[-2]
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
    # Two blocks of the kernels have the factors of one of the file.
    factors = None if weight.factors is None else weight.factors.repeat_interleave(2, 1)
    return GroupedWeight(bits=weight.bits, group=weight.group, factors=factors, **flat)


@dataclass(frozen=True)
class _Blocks:
    """Codes [N, n, numbers], scales, zeros and offsets [N, n, groups], factors [N, n, 1 or 2] of blocks [N, n, B]."""

    bits: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None


def _halves(blocks: torch.Tensor, at: int, count: int = 1) -> torch.Tensor:
    """float16 [N, n, count] from a byte of each block on."""
    return blocks[:, :, at : at + 2 * count].contiguous().view(torch.float16)


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


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(5, 32, _fives(blocks[:, :, 2:6], blocks[:, :, 6:]), _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    return _Blocks(5, 32, _fives(blocks[:, :, 4:8], blocks[:, :, 8:]), scales, _zeros(scales), -least.float())


def _fives(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Codes of 5 bits: the highest bits are in the 4 bytes `high`, the others in the 16 bytes `low`."""
    bits = high.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(low, 16) | bits.flatten(2) << 4


def _q2_k(blocks: torch.Tensor) -> _Blocks:
    both, scales, offsets = blocks[:, :, :16], _halves(blocks, 80), _halves(blocks, 82)
    scales, offsets = scales.float() * (both & 15).float(), offsets.float() * (both >> 4).float()
    # Codes from 0 become codes from the middle one, so that sums of products stay small.
    return _Blocks(4, 16, _pairs_of_bits(blocks[:, :, 16:80]) + 8, scales, None, offsets)


def _q3_k(blocks: torch.Tensor) -> _Blocks:
    bits = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1)
    high = (blocks[:, :, :32].unsqueeze(2) >> bits & 1).flatten(2)
    low, rest = blocks[:, :, 96:104], blocks[:, :, 104:108].unsqueeze(2)
    codes = torch.cat((low & 15, low >> 4), 2) | (rest >> bits[:, :, :4] * 2 & 3).flatten(2) << 4
    scales = codes.view(torch.int8) - 32
    # Codes around 4 become codes around 8.
    return _Blocks(4, 16, (_pairs_of_bits(blocks[:, :, 32:96]) | high << 2) + 4, scales, factors=_halves(blocks, 108))


def _pairs_of_bits(stored: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits: of 32 bytes the lowest two bits of each, then the next two, and so on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 1, 4, 1)
    return (_parted(stored, -1, 1, 32) >> shifts & 3).flatten(2)


def _iq4_nl(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(8, 32, _IQ4_CODES[_nibbles(blocks[:, :, 2:], 16).int()], _halves(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> _Blocks:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (blocks[:, :, 2:4].unsqueeze(3) >> shifts & 3).flatten(2)
    scales = (_nibbles(blocks[:, :, 4:8], 1) | high << 4).view(torch.int8) - 32
    return _Blocks(8, 32, _IQ4_CODES[_nibbles(blocks[:, :, 8:], 16).int()], scales, factors=_halves(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> _Blocks:
    exponents = blocks[:, :, :1].int()
    # Half of a power of two; the two smallest ones are not normal.
    scales = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _Blocks(8, 32, _FP4_CODES[_nibbles(blocks[:, :, 1:], 16).int()], scales.view(torch.float32))


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    # Signed numbers become codes around 128.
    return _Blocks(8, 32, blocks[:, :, 2:] ^ 128, _halves(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(4, 32, _nibbles(blocks[:, :, 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    low = _parted(_nibbles(blocks[:, :, 48:], 32), 8, 32)
    bits = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1)
    high = blocks[:, :, 16:48].unsqueeze(2) >> bits & 1
    return _Blocks(5, 32, low | high << 4, *_k_scales(blocks))


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    low, high = _nibbles(blocks[:, :, :128], 64), _pairs_of_bits(blocks[:, :, 128:192])
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return _Blocks(6, 16, low | high << 4, scales, factors=_halves(blocks, 208))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, zeros and offsets of the eight groups of a block of 256, and the two factors of the block."""
    low, least, rest = _parted(blocks[:, :, 4:16], 3, 4).unbind(2)
    # 6 bits each.
    scales = torch.cat((low & 63, rest & 15 | low >> 2 & 48), 2).view(torch.int8)
    offsets = torch.cat((least & 63, rest >> 4 | least >> 2 & 48), 2).view(torch.int8)
    return scales, _zeros(scales), offsets, _halves(blocks, 0, 2)


def _zeros(scales: torch.Tensor) -> torch.Tensor:
    return torch.zeros(scales.shape, dtype=torch.uint8)


_READERS: Final[Mapping[str, Callable[[torch.Tensor], _Blocks]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
