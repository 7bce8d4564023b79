"""Reads safetensors checkpoints: one file or shards, by memory map, checked against what the model expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from worker.model_config import ModelError
from worker.safetensors_file import Entry, MappedFile, Shape, header_bytes, read_entries

__all__ = ["Progress", "Shape", "Weights", "load_weights", "no_progress", "weights_digest"]

Progress = Callable[[int, int], None]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
# Buffers that older transformers wrote and that follow from config.json.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
# Files up to this size are hashed whole; of larger ones, DIGEST_SAMPLES windows.
DIGEST_WHOLE_BYTES = 64 << 20
DIGEST_SAMPLES = 256
DIGEST_WINDOW_BYTES = 64 << 10
# How many tensor names an error spells out.
_NAMES_SHOWN = 5
_ALL = slice(None)


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Progress for nobody."""


class Weights:
    """The tensors of a checkpoint, of which each rank reads its parts, in pieces that leave no pages behind.

    Args:
        entries: where each expected tensor is.
        progress: called with (bytes read, bytes that this rank will have read) after each tensor or part. How much of
            the coming tensors this rank reads is estimated from the share that it has read of the earlier ones.
    """

    def __init__(self, entries: Mapping[str, Entry], progress: Progress) -> None:
        self._entries = entries
        self._progress = progress
        self._whole_bytes = sum(entry.num_bytes for entry in entries.values())
        # Of the tensors that were touched: their bytes, and those of the parts that were read.
        self._touched: set[str] = set()
        self._touched_bytes = 0
        self._read_bytes = 0
        self._files: dict[Path, MappedFile] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> Shape:
        """The shape of a whole tensor."""
        return self._entries[name].shape

    def take(self, name: str, rows: slice = _ALL, columns: slice = _ALL, middle: slice = _ALL) -> torch.Tensor:
        """A tensor or a part of it, of which nothing else is read, in the checkpoint's float dtype.

        Args:
            name: of the tensor.
            rows: part of its first dimension.
            columns: part of its last dimension, where that is not the first.
            middle: part of the second of three dimensions.
        """
        stored = self._stored(name, rows, columns, middle)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self._copy(name, stored, out)
        return out

    def copy_to(
        self, out: torch.Tensor, name: str, rows: slice = _ALL, columns: slice = _ALL, middle: slice = _ALL
    ) -> None:
        """Like `take`, into memory that is there already, of any float dtype: nothing is held twice.

        Raises:
            ValueError: `out` has not the part's shape.
        """
        stored = self._stored(name, rows, columns, middle)
        if out.shape != stored.shape:
            raise ValueError(f"{name}: the part is {list(stored.shape)}, the place for it {list(out.shape)}")
        self._copy(name, stored, out)

    def part_shape(self, name: str, rows: slice = _ALL, columns: slice = _ALL, middle: slice = _ALL) -> Shape:
        """The shape of what `take` would give."""
        shape = self.shape(name)
        index = _index(shape, rows, columns, middle)
        return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))

    def _stored(self, name: str, rows: slice, columns: slice, middle: slice) -> torch.Tensor:
        entry = self._entries[name]
        return self._file(entry).tensor(entry)[_index(entry.shape, rows, columns, middle)]

    def _copy(self, name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        entry = self._entries[name]
        self._file(entry).copy(stored, out)
        self._count(name, entry.num_bytes, stored.nbytes)

    def _file(self, entry: Entry) -> MappedFile:
        if entry.file not in self._files:
            self._files[entry.file] = MappedFile(entry.file)
        return self._files[entry.file]

    def _count(self, name: str, whole_bytes: int, read_bytes: int) -> None:
        if name not in self._touched:
            self._touched.add(name)
            self._touched_bytes += whole_bytes
        self._read_bytes += read_bytes
        expected = self._whole_bytes * self._read_bytes // max(1, self._touched_bytes)
        self._progress(self._read_bytes, max(expected, self._read_bytes))


def _index(shape: Shape, rows: slice, columns: slice, middle: slice) -> tuple[slice, ...]:
    """The parts of every dimension.

    Raises:
        ValueError: a part of a dimension that the tensor does not have.
    """
    if (middle != _ALL and len(shape) != 3) or (columns != _ALL and len(shape) < 2):
        raise ValueError(f"a tensor {list(shape)} has no such dimension")
    inner = {0: (), 1: (), 2: (columns,), 3: (middle, columns)}[len(shape)]
    return (rows, *inner) if shape else ()


def load_weights(
    folder: Path | str,
    expected: Mapping[str, Shape],
    progress: Progress = no_progress,
    *,
    kept: tuple[str, ...] = (),
) -> Weights:
    """Finds every expected tensor of a checkpoint, reading headers only.

    Args:
        folder: checkpoint folder with safetensors.
        expected: name and shape of every tensor of the model.
        progress: see Weights.
        kept: beginnings of names of further tensors that may be there and are left alone, such as MTP layers.

    Raises:
        ModelError: there are no safetensors, a file is damaged, or tensors are missing, surplus, of another shape or
            not in floating point; the message names them.
    """
    entries: dict[str, Entry] = {}
    for file in _files(Path(folder)):
        entries.update(read_entries(file))
    _check(entries, expected, kept)
    return Weights({name: entries[name] for name in expected}, progress)


def weights_digest(folder: Path | str) -> str:
    """sha256 (hex) that tells checkpoints apart, part of the numerics class and never migrated across.

    Covers config.json; each safetensors file's name, size and header; and its data: all of a file of up to 64 MiB,
    else 256 windows of 64 KiB spread evenly from the first byte to the last. A change in a large file that misses
    every window goes unseen.
    """
    digest = hashlib.sha256()
    files = _files(Path(folder))
    for file in [Path(folder) / "config.json", *files]:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= DIGEST_WHOLE_BYTES:
                digest.update(stream.read())
                continue
            digest.update(stream.read(header_bytes(file)))
            for sample in range(DIGEST_SAMPLES):
                stream.seek((size - DIGEST_WINDOW_BYTES) * sample // (DIGEST_SAMPLES - 1))
                digest.update(stream.read(DIGEST_WINDOW_BYTES))
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {_some(missing)}, named in {INDEX_FILE}; download the checkpoint again")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelError(f"{folder} has only pickled weights, which may run code; convert them to safetensors")
    raise ModelError(f"{folder} has no weights (*.safetensors); download the checkpoint again")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} can not be read; download the checkpoint again") from error


def _check(entries: Mapping[str, Entry], expected: Mapping[str, Shape], kept: tuple[str, ...]) -> None:
    problems = []
    missing = sorted(expected.keys() - entries.keys())
    if missing:
        problems.append(f"missing {_some(missing)}")
    surplus = sorted(name for name in entries.keys() - expected.keys() if not name.endswith(DERIVED_SUFFIXES))
    surplus = [name for name in surplus if not name.startswith(kept)]
    # Some checkpoints with tied embeddings store the head again.
    if surplus and surplus != ["lm_head.weight"]:
        problems.append(f"surplus {_some(surplus)}")
    common = [(name, entries[name], shape) for name, shape in sorted(expected.items()) if name in entries]
    shapes = [f"{name} is {list(e.shape)}, expected {list(shape)}" for name, e, shape in common if e.shape != shape]
    if shapes:
        problems.append(_some(shapes))
    dtypes = [f"{name} is {e.dtype}" for name, e, _ in common if e.dtype not in FLOAT_DTYPES]
    if dtypes:
        problems.append(f"not float32, bfloat16 or float16: {_some(dtypes)}")
    if problems:
        raise ModelError(f"the weights do not fit config.json: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
