"""Reads safetensors checkpoints: one file or shards, by memory map, checked against what the model expects."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import structlog
import torch

from common.files import UnreadableFileError, is_regular, read_json_file
from common.limits import MAX_WEIGHT_INDEX_BYTES
from common.params.config_parts import QuantizationConfig
from kernels.grouped_weight import GroupedWeight
from kernels.interface import QuantizedWeight
from worker.config.gguf_file import GgufModel, gguf_files, read_gguf
from worker.config.model_config import ModelError
from worker.config.stored_names import INDEX_FILE
from worker.weights.gguf_tensors import find_gguf_tensors
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.safetensors_file import Entry, Shape, header_bytes, read_entries
from worker.weights.stored_tensors import Files, Index, MatrixPart, QuantizedTensor, StoredTensor
from worker.weights.tensor_index import TEXT_PARTS, CheckpointIndex, some

__all__ = ["LoadProgress", "Shape", "Weights", "load_weights", "no_progress", "weight_files", "weights_digest"]

_log = structlog.get_logger(__name__)

LoadProgress = Callable[[int, int], None]

SINGLE_FILE = "model.safetensors"
# Files up to this size are hashed whole; of larger ones, DIGEST_SAMPLES windows.
DIGEST_WHOLE_BYTES = 64 << 20
DIGEST_SAMPLES = 256
DIGEST_WINDOW_BYTES = 64 << 10
_ALL = slice(None)
# Prefix of a decoder's tensors in a model with a head, and a tensor that every decoder has.
_DECODER = "model."
_EMBEDDING = "embed_tokens.weight"
_UNQUANTIZED = QuantizationConfig()


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Reports no progress."""


@dataclass
class QuantizedUse:
    """Outcome of reading a checkpoint's quantized tensors.

    Attributes:
        kept: names of those that were taken as they are stored.
        dequantized: names of the others that were read -> why.
    """

    kept: set[str] = field(default_factory=set)
    dequantized: dict[str, str] = field(default_factory=dict)

    def log(self) -> None:
        """Logs one line if there were quantized tensors."""
        if self.kept or self.dequantized:
            _log.info(
                "quantized weights", kept=len(self.kept), dequantized=len(self.dequantized), reasons=self.reasons()
            )

    def reasons(self) -> str:
        """Reasons for which tensors were dequantized, each with their number and the first tensor."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.dequantized.items():
            by_reason.setdefault(reason, []).append(name)
        return "; ".join(f"{reason}: {len(names)}, such as {names[0]}" for reason, names in by_reason.items())


class Weights:
    """Tensors of a checkpoint. Each rank reads its parts in pieces, and releases their pages from memory.

    Quantized tensors look like others, what is read is dequantized; `take_quantized` gives them as they are.

    Args:
        tensors: where each expected tensor is.
        progress: called with (bytes read, bytes that this rank will have read) after each tensor or part. How much of
            the coming tensors this rank reads is estimated from the share that it has read of the earlier ones.

    Attributes:
        use: what became of the quantized tensors that were read.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], progress: LoadProgress) -> None:
        self._tensors = tensors
        self._progress = progress
        self._whole_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        # Bytes of the tensors that were touched, and of the parts of them that were read.
        self._touched: set[str] = set()
        self._touched_bytes = 0
        self._read_bytes = 0
        self._files = Files()
        self.use = QuantizedUse()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> Shape:
        """The shape of a whole tensor."""
        return self._tensors[name].shape

    def part_shape(self, name: str, rows: slice = _ALL, columns: slice = _ALL, middle: slice = _ALL) -> Shape:
        """Shape of the part that `take` would return."""
        return tuple(part.stop - part.start for part in _index(self.shape(name), rows, columns, middle))

    def take(
        self,
        name: str,
        rows: slice = _ALL,
        columns: slice = _ALL,
        middle: slice = _ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Reads a tensor or a part of it, and nothing else.

        Args:
            name: of the tensor.
            rows: part of its first dimension.
            columns: part of its last dimension, where that is not the first.
            middle: part of the second of three dimensions.
            dtype: any float dtype; None takes one that loses nothing, float32 where the checkpoint is quantized.

        Returns:
            The tensor, contiguous and the caller's own.
        """
        shape = self.part_shape(name, rows, columns, middle)
        out = torch.empty(shape, dtype=dtype or self._tensors[name].dtype)
        self.copy_to(out, name, rows, columns, middle)
        return out

    def copy_to(
        self, out: torch.Tensor, name: str, rows: slice = _ALL, columns: slice = _ALL, middle: slice = _ALL
    ) -> None:
        """Copies a tensor or part into existing memory of any float dtype, so that it is never held twice.

        Raises:
            ValueError: `out` has not the part's shape.
        """
        tensor = self._tensors[name]
        index = _index(tensor.shape, rows, columns, middle)
        shape = [part.stop - part.start for part in index]
        if list(out.shape) != shape:
            raise ValueError(f"{name}: the part is {shape}, the place for it {list(out.shape)}")
        tensor.copy(self._files, index, out)
        if isinstance(tensor, QuantizedTensor | GroupedTensor):
            self.use.dequantized.setdefault(name, "the model wants floats")
        self._count(name, math.prod(shape))

    def quantized(self, name: str) -> QuantizedTensor | GroupedTensor | None:
        """Quantization of a tensor; None if it is stored as floats."""
        tensor = self._tensors[name]
        return tensor if isinstance(tensor, QuantizedTensor | GroupedTensor) else None

    def take_quantized(self, part: MatrixPart) -> QuantizedWeight | GroupedWeight:
        """Reads a part of a quantized tensor in its stored format, into new memory.

        Raises:
            ValueError: it cannot be had so.
        """
        tensor = self.quantized(part.name)
        refusal = "stored as floats" if tensor is None else tensor.refusal(part)
        if tensor is None or refusal is not None:
            raise ValueError(f"{part.name}: {refusal}")
        weight = tensor.quantized(self._files, part)
        self.use.kept.add(part.name)
        self._count(part.name, math.prod(weight.shape))
        return weight

    def _count(self, name: str, read_numbers: int) -> None:
        tensor = self._tensors[name]
        if name not in self._touched:
            self._touched.add(name)
            self._touched_bytes += tensor.num_bytes
        self._read_bytes += tensor.num_bytes * read_numbers // max(1, math.prod(tensor.shape))
        expected = self._whole_bytes * self._read_bytes // max(1, self._touched_bytes)
        self._progress(self._read_bytes, max(expected, self._read_bytes))


def _index(shape: Shape, rows: slice, columns: slice, middle: slice) -> Index:
    """A slice with bounds for each dimension.

    Raises:
        ValueError: a part of a dimension that the tensor does not have.
    """
    if (middle != _ALL and len(shape) != 3) or (columns != _ALL and len(shape) < 2):
        raise ValueError(f"a tensor {list(shape)} has no such dimension")
    parts = ((), (rows,), (rows, columns), (rows, middle, columns))[len(shape)]
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(parts, shape, strict=True))


def load_weights(
    folder: Path | str,
    expected: Mapping[str, Shape],
    progress: LoadProgress = no_progress,
    *,
    optional: Mapping[str, Shape] = MappingProxyType({}),
    kept: tuple[str, ...] = (),
    quantization: QuantizationConfig = _UNQUANTIZED,
) -> Weights:
    """Finds every expected tensor of a checkpoint, reading headers only.

    Args:
        folder: checkpoint folder with safetensors, or a GGUF file.
        expected: name and shape of every tensor of the model.
        progress: see Weights.
        optional: likewise, of those that the checkpoint need not have.
        kept: beginnings of names of further tensors that may be there and are left alone, such as MTP layers.
        quantization: how the checkpoint's weights are quantized.

    Raises:
        ModelError: there are no safetensors, a file is damaged, or tensors are missing, surplus, or of another shape
            or dtype; the message names them.
    """
    gguf = _gguf(Path(folder))
    if gguf is not None:
        return Weights(find_gguf_tensors(gguf, expected, optional, kept), progress)
    entries: dict[str, Entry] = {}
    for file in _files(Path(folder)):
        entries.update(read_entries(file))
    index = CheckpointIndex(entries, quantization, _prefixes(expected, entries))
    there = {name: shape for name, shape in optional.items() if index.stored(name) in entries}
    return Weights(index.find({**expected, **there}, kept), progress)


def _prefixes(expected: Mapping[str, Shape], entries: Mapping[str, Entry]) -> tuple[str, str]:
    """The beginning of the model's tensor names, and what the checkpoint has in its place.

    They differ for a decoder that is not part of a model with a head, and for a multimodal model.
    """
    whole = f"{_DECODER}{_EMBEDDING}"
    if whole in expected and whole not in entries:
        for own, stored in ((_DECODER, ""), *TEXT_PARTS):
            if stored + whole.removeprefix(own) in entries:
                return own, stored
    return "", ""


def weights_digest(folder: Path | str) -> str:
    """sha256 (hex) that identifies a checkpoint. It is part of the numerics class, and no stream moves to another one.

    Covers config.json; each file of weights: its name, size and header; and its data: all of a file of up to 64 MiB,
    else 256 windows of 64 KiB spread evenly from the first byte to the last. A change in a large file that misses every
    window goes unseen.
    """
    digest = hashlib.sha256()
    files, gguf = _files(Path(folder)), _gguf(Path(folder))
    for file in files if gguf is not None else [Path(folder) / "config.json", *files]:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= DIGEST_WHOLE_BYTES:
                digest.update(stream.read())
                continue
            digest.update(stream.read(header_bytes(file) if gguf is None else gguf.header_bytes(file)))
            for sample in range(DIGEST_SAMPLES):
                stream.seek((size - DIGEST_WINDOW_BYTES) * sample // (DIGEST_SAMPLES - 1))
                digest.update(stream.read(DIGEST_WINDOW_BYTES))
    return digest.hexdigest()


def weight_files(folder: Path | str) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time in ns of each safetensors file, which show changes that `weights_digest` may
    miss.

    Raises:
        ModelError: there are none.
    """
    stats = [(file.name, file.stat()) for file in _files(Path(folder))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _gguf(model: Path) -> GgufModel | None:
    """Content of the model's GGUF files; None for a checkpoint folder."""
    try:
        files = gguf_files(model)
        return read_gguf(files) if files else None
    except UnreadableFileError as error:
        raise ModelError(str(error)) from None


def _files(folder: Path) -> list[Path]:
    gguf = _gguf(folder)
    if gguf is not None:
        return sorted({gguf.path, *(tensor.file for tensor in gguf.tensors.values())})
    index = folder / INDEX_FILE
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{INDEX_FILE} of {folder} names {some(outside)}; files of the same folder are valid")
        missing = [name for name in names if not os.path.exists(folder / name)]
        if missing:
            raise ModelError(f"{folder} lacks {some(missing)}, named in {INDEX_FILE}; download the checkpoint again")
        return _regular([folder / name for name in names])
    if (folder / SINGLE_FILE).exists():
        return _regular([folder / SINGLE_FILE])
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return _regular(files)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(f"{folder} has only pickled weights, which may run code; convert them to safetensors")
    raise ModelError(f"{folder} has no weights (*.safetensors); download the checkpoint again")


def _regular(files: list[Path]) -> list[Path]:
    """Checks that files can be read and are regular: a device has no end, and a named pipe waits for a writer."""
    for file in files:
        if not is_regular(file):
            raise ModelError(f"{file} is not a regular file; download the checkpoint again")
        if not os.access(file, os.R_OK):
            raise ModelError(f"{file} cannot be read by this user; change its permissions")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json_file(index, MAX_WEIGHT_INDEX_BYTES)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (UnreadableFileError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read; download the checkpoint again") from error
