"""Reads GGUF files, the format of llama.cpp: metadata, and the type and place of every tensor. No weights here.

Each number of a file is checked against the size of the file before it is used, so a hostile file costs time and memory
by the bytes that it has, not by the numbers in it. Strings and numbers of arrays, such as the vocabulary, are decoded
when they are asked for. The reader of the `gguf` package checks neither counts nor lengths, and makes several objects
for each string.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import sys
from array import array as number_array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from common.files import UnreadableFileError, is_regular
from common.limits import MAX_GGUF_ENTRIES, MAX_GGUF_HEADER_BYTES, MAX_GGUF_ITEMS

_SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS: Final = 1000
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
# Type of a value -> its form for `struct`.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Names of the types of tensors in ggml, by number.
# fmt: off
_TYPES: Final = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",
    "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M",
    "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",
    "NVFP4", "Q1_0",
)
# fmt: on
# Types that can be served -> numbers of a block, bytes of a block.
BLOCKS: Final = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}


class GgufArray(NamedTuple):
    """An array of metadata that is not decoded yet: type of its items, their number, and where they begin."""

    type: int
    num_items: int
    offset: int


class GgufTensor(NamedTuple):
    """Place of a tensor.

    Attributes:
        file: that holds it.
        type: one of BLOCKS.
        shape: rows first, as PyTorch has it.
        offset, num_bytes: of its data in the file.
    """

    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


Value = int | float | bool | str | GgufArray


@dataclass(frozen=True)
class GgufModel:
    """Content of a GGUF file, or of all parts of one that was split.

    Attributes:
        path: of the first file.
        metadata: values by key, from the first file.
        tensors: of all files, by name.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def strings(self, key: str) -> list[str]:
        """Decodes an array of strings; returns an empty list if the file has none.

        Raises:
            UnreadableFileError: it is something else, or not UTF-8.
        """
        array = self.metadata.get(key)
        if array is None:
            return []
        if not isinstance(array, GgufArray) or array.type != _STRING:
            raise UnreadableFileError(f"{self.path}: {key} is not an array of strings")
        with _opened(self.path) as data:
            cursor = _Cursor(self.path, data, array.offset)
            return [cursor.string(key) for _ in range(array.num_items)]

    def numbers(self, key: str) -> Sequence[float]:
        """Decodes an array of numbers; returns an empty one if the file has none.

        Raises:
            UnreadableFileError: it is something else.
        """
        array = self.metadata.get(key)
        if array is None:
            return ()
        if not isinstance(array, GgufArray) or array.type not in _SCALARS:
            raise UnreadableFileError(f"{self.path}: {key} is not an array of numbers")
        # Not a tuple, which takes nine times as much memory as the file's numbers.
        values = number_array("B" if _SCALARS[array.type] == "?" else _SCALARS[array.type])
        with _opened(self.path) as data:
            values.frombytes(data[array.offset : array.offset + array.num_items * values.itemsize])
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def header_bytes(self, file: Path) -> int:
        """Number of bytes before the first tensor of a file; all of them in a file without tensors."""
        places = (tensor.offset for tensor in self.tensors.values() if tensor.file == file)
        return min(places, default=file.stat().st_size)

    def floats(self, name: str) -> list[float]:
        """Reads a short F32 tensor, such as factors of rope; returns an empty list if the file has none.

        Raises:
            UnreadableFileError: it is of another type, or too large.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return []
        count = math.prod(tensor.shape)
        if tensor.type != "F32" or count > MAX_GGUF_ENTRIES:
            raise UnreadableFileError(f"{tensor.file}: {name} is {tensor.type} {list(tensor.shape)}; F32 is needed")
        with _opened(tensor.file) as data:
            return list(struct.unpack_from(f"<{count}f", data, tensor.offset))


def gguf_files(model: Path) -> list[Path]:
    """GGUF files of a model: a file, all parts of a split file, or the only ones in a folder.

    Args:
        model: path of a file or folder. A folder with safetensors is a Hugging Face checkpoint and has no GGUF files.

    Raises:
        UnreadableFileError: a part is missing, or a folder holds files of several models.
    """
    if not model.is_dir():
        return _parts(model) if model.exists() else []
    files = sorted(file for file in model.iterdir() if file.suffix.lower() == _SUFFIX)
    if not files or any(model.glob("*.safetensors")):
        return []
    first = _parts(files[0])
    if len(first) < len(files):
        names = ", ".join(file.name for file in files[:8])
        raise UnreadableFileError(f"{model} has {len(files)} GGUF files; name one of them, such as {names}")
    return first


def printable(text: str) -> str:
    """Text of a file for a message of one line."""
    return "".join(each if each.isprintable() else "?" for each in text[:300])


def _parts(file: Path) -> list[Path]:
    """All parts of the file's model, the first one first."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part[3])
    if not 1 <= int(part[2]) <= count <= _MAX_PARTS:
        raise UnreadableFileError(f"{file} is not one of 1 to {_MAX_PARTS} parts; rename it")
    files = [file.with_name(f"{part[1]}-{number:05}-of-{part[3]}{file.suffix}") for number in range(1, count + 1)]
    missing = [each.name for each in files if not each.exists()]
    if missing:
        raise UnreadableFileError(f"{file.parent} lacks {missing[0]}, a part of the model; download it again")
    return files


def read_gguf(files: Sequence[Path]) -> GgufModel:
    """Reads and checks the headers of a model's files.

    Raises:
        UnreadableFileError: a file is damaged, of another version, or has tensors of types that are not supported.
    """
    first, *others = (_read_file(file) for file in files)
    tensors = dict(first.tensors)
    for number, other in enumerate(others, 1):
        if other.metadata.get("split.no") != number or other.metadata.get("split.count") != len(files):
            raise UnreadableFileError(f"{other.path} is not part {number + 1} of {len(files)} by its metadata")
        twice = tensors.keys() & other.tensors.keys()
        if twice:
            raise UnreadableFileError(f"{other.path}: tensor {printable(min(twice))} is in another part too")
        tensors |= other.tensors
    count, wanted = first.metadata.get("split.count", 1), first.metadata.get("split.tensors.count", len(tensors))
    if count not in (0, len(files)) or wanted != len(tensors):
        found = f"{len(files)} files with {len(tensors)} tensors"
        raise UnreadableFileError(f"{first.path} is one of {count} parts with {wanted} tensors; found: {found}")
    return GgufModel(first.path, first.metadata, tensors)


def _opened(path: Path) -> mmap.mmap:
    if not is_regular(path):
        raise UnreadableFileError(f"{path} is not a regular file")
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        raise UnreadableFileError(f"{path} cannot be read: {reason}") from None


def _read_file(path: Path) -> GgufModel:
    with _opened(path) as data:
        cursor = _Cursor(path, data, 0)
        if cursor.take(4, "magic") != _MAGIC:
            raise UnreadableFileError(f"{path} is not a GGUF file")
        version = cursor.number("I", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in _VERSIONS
            found = "of big-endian machines" if swapped else f"version {version}"
            raise UnreadableFileError(f"{path} is GGUF {found}; supported: little-endian, versions 2 and 3")
        num_tensors = cursor.count("tensors", 24)
        num_values = cursor.count("metadata", 13)
        metadata = _read_metadata(cursor, num_values)
        return GgufModel(path, metadata, _read_tensors(cursor, num_tensors, metadata))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string("a key")
        if key in metadata:
            raise cursor.fault(f"key {key!r} is there twice")
        metadata[key] = cursor.value(key, int(cursor.number("I", key)))
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: Mapping[str, Value]) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fault(f"general.alignment is {alignment}; it must be a power of two")
    read = [_read_tensor(cursor) for _ in range(count)]
    begin = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end, before = 0, ""
    for name, tensor in sorted(read, key=lambda each: each[1].offset):
        if name in tensors:
            raise cursor.fault(f"tensor {name!r} is there twice")
        if tensor.offset % alignment:
            raise cursor.fault(f"tensor {name!r} begins at {tensor.offset}, no multiple of {alignment}")
        if tensor.offset < end:
            raise cursor.fault(f"tensors {before!r} and {name!r} overlap")
        end, before = tensor.offset + tensor.num_bytes, name
        if begin + end > cursor.size:
            raise cursor.fault(f"tensor {name!r} ends at byte {begin + end} of {cursor.size}")
        tensors[name] = tensor._replace(offset=begin + tensor.offset)
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """Name and place of a tensor; its offset counts from the first tensor."""
    name = cursor.string("a tensor's name")
    dimensions = cursor.number("I", name)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fault(f"tensor {name!r} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are valid")
    shape = tuple(int(cursor.number("Q", name)) for _ in range(int(dimensions)))[::-1]
    number = int(cursor.number("I", name))
    offset = int(cursor.number("Q", name))
    kind = _TYPES[number] if number < len(_TYPES) else f"number {number}"
    if kind not in BLOCKS:
        raise cursor.fault(f"tensor {name!r} has the type {kind}; supported: {', '.join(BLOCKS)}")
    numbers, size = BLOCKS[kind]
    if min(shape) < 1 or shape[-1] % numbers:
        raise cursor.fault(f"tensor {name!r} is {kind} {list(shape)}; rows must be blocks of {numbers} numbers")
    return name, GgufTensor(cursor.path, kind, shape, offset, math.prod(shape) // numbers * size)


class _Cursor:
    """Reads the header of a mapped file from a position on, and never beyond MAX_GGUF_HEADER_BYTES or its end."""

    def __init__(self, path: Path, data: mmap.mmap, offset: int) -> None:
        self.path = path
        self.offset = offset
        self.size = len(data)
        self._data = data
        self._end = min(self.size, MAX_GGUF_HEADER_BYTES)

    def fault(self, what: str) -> UnreadableFileError:
        """Error about this file."""
        return UnreadableFileError(f"{self.path} cannot be used: {printable(what)}")

    def take(self, num_bytes: int, what: str) -> bytes:
        """Reads bytes of `what`."""
        begin = self._skip(num_bytes, what)
        return self._data[begin : begin + num_bytes]

    def number(self, form: str, what: str) -> float:
        """Reads a number in a form of `struct`."""
        begin = self._skip(struct.calcsize(form), what)
        found: float = struct.unpack_from(f"<{form}", self._data, begin)[0]
        return found

    def count(self, what: str, item_bytes: int, most: int = MAX_GGUF_ENTRIES) -> int:
        """Reads a number of items, each of at least `item_bytes`, which must fit in the rest of the header."""
        count = int(self.number("Q", what))
        if count > most:
            raise self.fault(f"{what} has {count} items; at most {most} are valid")
        if count * item_bytes > self._end - self.offset:
            raise self.fault(f"{what} of {count} items does not fit in the file")
        return count

    def string(self, what: str) -> str:
        """Reads a string."""
        length = int(self.number("Q", what))
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def value(self, key: str, kind: int) -> Value:
        """Reads a value of metadata; items of arrays are skipped."""
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise self.fault(f"{key} has the type {kind}, which GGUF does not know")
        item = int(self.number("I", key))
        if item != _STRING and item not in _SCALARS:
            raise self.fault(f"{key} is an array of type {item}; arrays of strings and numbers are supported")
        size = _STRING if item == _STRING else struct.calcsize(_SCALARS[item])
        count = self.count(key, size, MAX_GGUF_ITEMS)
        array = GgufArray(item, count, self.offset)
        if item == _STRING:
            self._skip_strings(count, key)
        else:
            self._skip(count * size, key)
        return array

    def _skip(self, num_bytes: int, what: str) -> int:
        """Moves on; returns where it was."""
        begin, end = self.offset, self.offset + num_bytes
        if end > self._end:
            beyond = "the file" if self._end == self.size else f"{MAX_GGUF_HEADER_BYTES} bytes of header"
            raise self.fault(f"{what} ends beyond {beyond}")
        self.offset = end
        return begin

    def _skip_strings(self, count: int, what: str) -> None:
        length_of, data, end = struct.Struct("<Q").unpack_from, self._data, self._end - 8
        offset = self.offset
        for _ in range(count):
            if offset > end:
                break
            offset += 8 + int(length_of(data, offset)[0])
        self.offset = min(offset, self._end + 1)
        self._skip(0, what)
