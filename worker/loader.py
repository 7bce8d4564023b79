"""Reads safetensors checkpoints: one file or shards, by memory map, checked against what the model expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.model_config import ModelError

Progress = Callable[[int, int], None]
Shape = tuple[int, ...]

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
_HEADER_LENGTH_BYTES = 8
_ALL = slice(None)


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Progress for nobody."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: Shape
    num_bytes: int


class Weights:
    """The tensors of a checkpoint, mapped; a tensor's pages are read when it is copied.

    Args:
        entries: where each expected tensor is.
        progress: called with (bytes taken, bytes of all) after each `take`.
    """

    def __init__(self, entries: Mapping[str, _Entry], progress: Progress) -> None:
        self._entries = entries
        self._progress = progress
        self._total = sum(entry.num_bytes for entry in entries.values())
        self._taken: set[str] = set()
        self._done = 0
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def take(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> torch.Tensor:
        """A tensor, or a part of its first and its last dimension, of which nothing else is read.

        It is in the checkpoint's dtype and to be copied by the caller: it is neither aligned nor private.
        """
        entry = self._entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = safe_open(entry.file, framework="pt")
        stored = self._open[entry.file].get_slice(name)
        tensor: torch.Tensor = stored[(rows,)] if columns == _ALL else stored[rows, ..., columns]
        if name not in self._taken:
            self._taken.add(name)
            self._done += entry.num_bytes
            self._progress(self._done, self._total)
        return tensor


def load_weights(folder: Path | str, expected: Mapping[str, Shape], progress: Progress = no_progress) -> Weights:
    """Finds every expected tensor of a checkpoint, reading headers only.

    Args:
        folder: checkpoint folder with safetensors.
        expected: name and shape of every tensor of the model.
        progress: see Weights.

    Raises:
        ModelError: there are no safetensors, a file is damaged, or tensors are missing, surplus, of another shape or
            not in floating point; the message names them.
    """
    entries: dict[str, _Entry] = {}
    for file in _files(Path(folder)):
        entries.update(_read_entries(file))
    _check(entries, expected)
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
            digest.update(stream.read(_HEADER_LENGTH_BYTES + _header_length(file)))
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


def _header_length(file: Path) -> int:
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")


def _read_entries(file: Path) -> dict[str, _Entry]:
    entries = {}
    try:
        # Checks header, offsets and size; what follows can rely on them.
        with safe_open(file, framework="pt"), file.open("rb") as stream:
            stream.seek(_HEADER_LENGTH_BYTES)
            header = json.loads(stream.read(_header_length(file)))
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is damaged ({reason}); download the checkpoint again") from error
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            entries[name] = _Entry(file, tensor["dtype"], tuple(tensor["shape"]), end - begin)
    return entries


def _check(entries: Mapping[str, _Entry], expected: Mapping[str, Shape]) -> None:
    problems = []
    missing = sorted(expected.keys() - entries.keys())
    if missing:
        problems.append(f"missing {_some(missing)}")
    surplus = sorted(name for name in entries.keys() - expected.keys() if not name.endswith(DERIVED_SUFFIXES))
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
