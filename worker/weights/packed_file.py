"""A file of packed weights: the objects that one rank's layers keep, in the kernels' layout, to be mapped.

    magic, 8 bytes | length of the header, 8 bytes | blake2b of the header, 16 bytes | header, JSON | tensors

Every tensor begins at a multiple of 4096 bytes; parts of one memory are stored once. A packed object is any tree of
dataclasses of the `kernels` package, lists, tuples, numbers and tensors: nothing here knows a layout. No pickle: a file
can name no code but those dataclasses. The header's checksum is checked whenever the file is opened; tensors have none,
as to check them would be to read the whole file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, BinaryIO, Final, TypeVar

import torch

from common.files import parse_json

MAGIC: Final = b"FISSILEW"
_PREFIX: Final = struct.Struct("<8sQ16s")
_ALIGNMENT: Final = 4096
_PIECE_BYTES: Final = 32 << 20
_CODE: Final = "kernels"
_MAX_HEADER_BYTES: Final = 256 << 20
Made = TypeVar("Made")
Json = Any


class DamagedFileError(Exception):
    """A file is damaged; the message is one line that says how."""


class UnkeptObjectError(Exception):
    """A packed object has a field that no file can hold."""


class FlatTensors:
    """Packed objects as JSON and tensors.

    Attributes:
        regions: the memory of each tensor, as bytes, by its offset in the data of the file.
        size: bytes of the data.
    """

    def __init__(self) -> None:
        self.regions: dict[int, torch.Tensor] = {}
        self.size = 0
        self._tensors: list[Json] = []
        self._places: dict[tuple[int, int], int] = {}

    def header(self, key: str, objects: Mapping[str, Any]) -> bytes:
        """The file's header.

        Raises:
            UnkeptObjectError: an object is no tree as above.
        """
        trees = {name: self._tree(value) for name, value in objects.items()}
        header = {"key": key, "size": self.size, "objects": trees, "tensors": self._tensors}
        return json.dumps(header, separators=(",", ":")).encode()

    def _tree(self, value: Any) -> Json:
        if isinstance(value, torch.Tensor):
            self._tensors.append(self._tensor(value))
            return {"tensor": len(self._tensors) - 1}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [self._tree(each) for each in value]}
        kind = type(value)
        if is_dataclass(value) and kind.__module__.split(".")[0] == _CODE:
            parts = {each.name: self._tree(vars(value)[each.name]) for each in fields(value)}
            return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": parts}
        raise UnkeptObjectError(f"a packed weight holds a {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, tensor: torch.Tensor) -> Json:
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        place = tensor.data_ptr(), tensor.nbytes
        if tensor.nbytes and place not in self._places:
            self._places[place] = self.size
            # Holds the memory, so that no other tensor gets its address.
            self.regions[self.size] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            self.size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return {
            "dtype": _name(tensor.dtype),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": self._places.get(place, 0),
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor's elements fill its memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def write(file: BinaryIO, key: str, objects: Mapping[str, Any], progress: Callable[[int, int], None]) -> None:
    """Writes a whole file, from its beginning.

    Args:
        file: open for writing, empty.
        key: what the weights are a function of; told again to `PackedFile`.
        objects: packed objects by name.
        progress: called with (bytes written, bytes in all).

    Raises:
        UnkeptObjectError: an object cannot be kept.
        OSError: it cannot be written.
    """
    flattened = FlatTensors()
    header = flattened.header(key, objects)
    begin = _begin(len(header))
    pieces = _Pieces(file, lambda place: progress(max(0, place - begin), flattened.size))
    pieces.put(_PREFIX.pack(MAGIC, len(header), _digest(header)) + header)
    for offset, region in flattened.regions.items():
        pieces.pad_to(begin + offset)
        pieces.put(region.numpy().data)
    pieces.pad_to(begin + flattened.size)
    pieces.finish()


class _Pieces:
    """Writes bytes in pieces that begin at multiples of the piece size.

    A file system that can keeps these in large pages, and a process that maps the file gets those. Written tensor by
    tensor, 22 % of a file of 1.1 GiB had small ones: around each place where one tensor ends and another begins.

    Args:
        file: open for writing, empty.
        progress: called with the bytes written.
    """

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._place = 0

    def put(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            begin = self._place % _PIECE_BYTES
            count = min(len(left), _PIECE_BYTES - begin)
            self._piece[begin : begin + count] = left[:count]
            left = left[count:]
            self._place += count
            if begin + count == _PIECE_BYTES:
                self._write(_PIECE_BYTES)

    def pad_to(self, place: int) -> None:
        """Writes zeros up to a position."""
        self.put(bytes(place - self._place))

    def finish(self) -> None:
        """Writes the last, incomplete piece."""
        self._write(self._place % _PIECE_BYTES)

    def _write(self, count: int) -> None:
        self._file.write(self._piece[:count])
        self._progress(self._place)


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=16).digest()


def _begin(header_bytes: int) -> int:
    return -(-(_PREFIX.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT


class PackedFile:
    """A mapped file: read-only memory that all processes share which have the file open.

    Args:
        file: open for reading; stays open, with whatever lock the caller has on it, as long as this object.
        key: what the file must have been written with.

    Raises:
        DamagedFileError: it is no such file, is cut off, or was written with another key.
        OSError: it cannot be read or mapped.
    """

    def __init__(self, file: BinaryIO, key: str) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size
        header, self._begin = _header(file, self.num_bytes)
        if header["key"] != key:
            raise DamagedFileError("was written for other weights")
        if self.num_bytes != self._begin + header["size"]:
            raise DamagedFileError("is cut off")
        self._objects, self._tensors = header["objects"], header["tensors"]
        self._map = mmap.mmap(file.fileno(), self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED"):
            # Some systems lack the call, and file systems differ in what they support.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                self._map.madvise(getattr(mmap, advice))

    def restored(self, name: str) -> Any:
        """Restores a packed object whose tensors lie in the read-only memory of the file.

        Raises:
            KeyError: there is none of that name.
        """
        return self._restored(self._objects[name])

    def _restored(self, tree: Json) -> Any:
        ((kind, value), *_) = tree.items()
        if kind == "tensor":
            return self._tensor(self._tensors[value])
        if kind == "dtype":
            return getattr(torch, value)
        if kind in ("list", "tuple"):
            made = [self._restored(each) for each in value]
            return made if kind == "list" else tuple(made)
        if kind == "class":
            return _class(value)(**{name: self._restored(each) for name, each in tree["fields"].items()})
        return value

    def _tensor(self, entry: Json) -> torch.Tensor:
        dtype, shape, stride = getattr(torch, entry["dtype"]), entry["shape"], entry["stride"]
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            # Memory is read-only, and no code writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._begin + entry["offset"])
        return flat.as_strided(shape, stride)


def _header(file: BinaryIO, num_bytes: int) -> tuple[Json, int]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise DamagedFileError("is cut off")
    magic, length, digest = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise DamagedFileError("is not a file of packed weights of this version")
    if length > min(num_bytes, _MAX_HEADER_BYTES):
        raise DamagedFileError("is cut off")
    text = file.read(length)
    if _digest(text) != digest:
        raise DamagedFileError("has a damaged header")
    return parse_json(text), _begin(length)


def _class(name: str) -> Callable[..., Any]:
    """Finds the kernels' dataclass that a file names.

    Raises:
        DamagedFileError: it names something else.
    """
    module, _, qualname = name.partition(":")
    if module.split(".")[0] == _CODE:
        found: Any = getattr(importlib.import_module(module), qualname)
        if is_dataclass(found):
            return found  # type: ignore[return-value]
    raise DamagedFileError(f"names {name}, which is not a packed object")
