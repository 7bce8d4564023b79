"""One safetensors file: its header is checked, its tensors are mapped, and copied pages are released at once.

Clean pages of a mapped file count as resident memory of the process until the kernel needs them for others. So a copy
goes in pieces, and the pages of each piece are let go behind it (`MADV_DONTNEED`: they stay in the page cache).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.files import parse_json
from common.limits import MAX_WEIGHT_INDEX_BYTES
from worker.config.model_config import ModelError

Shape = tuple[int, ...]

# safetensors name -> PyTorch's; unsigned bytes hold packed FP4 and its scales.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
# Bytes of the file that a copy maps at once.
PIECE_BYTES = 4 << 20
# The kernel maps neighbours of the pages that are read, up to a large page of them.
AROUND_BYTES = 2 << 20
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Entry:
    """Place of a tensor; `dtype` is safetensors' name, `offset` and `num_bytes` count bytes of the file."""

    file: Path
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int


def header_bytes(file: Path) -> int:
    """Bytes before the first tensor.

    Raises:
        ModelError: the file says more than it has, or than any header has.
    """
    with file.open("rb") as stream:
        begin = _HEADER_LENGTH_BYTES + int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
    most = min(file.stat().st_size, _HEADER_LENGTH_BYTES + MAX_WEIGHT_INDEX_BYTES)
    if begin > most:
        found = f"its header has {begin} bytes; at most {most} are valid"
        raise ModelError(f"{file} is damaged ({found}); download the checkpoint again")
    return begin


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
        ModelError: the file is damaged.
    """
    try:
        # Checks header, offsets and size; what follows can rely on them.
        with safe_open(file, framework="pt"), file.open("rb") as stream:
            begin = header_bytes(file)
            stream.seek(_HEADER_LENGTH_BYTES)
            header = parse_json(stream.read(begin - _HEADER_LENGTH_BYTES))
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is damaged ({reason}); download the checkpoint again") from error
    entries = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            entries[name] = Entry(file, tensor["dtype"], tuple(tensor["shape"]), begin + start, end - start)
    return entries


class MappedFile:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            # A private mapping: PyTorch warns of memory that it must not write, and nothing writes to this one.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A tensor in the mapped file; nothing is read yet. It may be unaligned."""
        dtype = DTYPES[entry.dtype]
        count = entry.num_bytes // dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def release(self, part: torch.Tensor) -> None:
        """Releases the pages of a part of this file that was copied."""
        if not part.numel():
            return
        offset = part.data_ptr() - self._bytes.data_ptr()
        begin = max(0, offset - AROUND_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(len(self._bytes), offset + spanned_bytes(part) + AROUND_BYTES)
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def copy(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Copies a part of this file into `out` of the same shape and any float dtype."""
        for part, place in pieces(stored, out):
            place.copy_(part)
            self.release(part)


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Number of bytes from the first byte of a strided tensor to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def pieces(
    stored: torch.Tensor, out: torch.Tensor, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Splits two tensors at the same places, so that each part of `stored` spans at most `piece_bytes`.

    A single element along the last dimension is never split.
    """
    if not stored.dim() or spanned_bytes(stored) <= piece_bytes:
        yield stored, out
        return
    rows = piece_bytes // max(1, spanned_bytes(stored[0]))
    if rows:
        yield from zip(torch.split(stored, rows), torch.split(out, rows), strict=True)
        return
    for part, place in zip(stored, out, strict=True):
        yield from pieces(part, place, piece_bytes)
