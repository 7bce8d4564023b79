"""Tensors of the Open Inference Protocol as Python values, from and to both of their forms on the wire. Pure.

A message has the elements of its tensors in one of two forms: in the field of their type (`contents`), or as bytes
(raw). Raw BYTES have the length of each element before it, in four bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fissile.peers.inference import open_inference_pb2 as oip

from common.errors import InvalidFieldError

BYTES: Final = "BYTES"
BOOL: Final = "BOOL"
FP32: Final = "FP32"
UINT32: Final = "UINT32"
# Field of InferTensorContents that has the elements of a type.
_FIELDS: Final[Mapping[str, str]] = {
    BYTES: "bytes_contents",
    BOOL: "bool_contents",
    FP32: "fp32_contents",
    UINT32: "uint_contents",
}
# How `struct` names an element with a fixed number of bytes.
_FORMATS: Final[Mapping[str, str]] = {BOOL: "?", FP32: "f", UINT32: "I"}
_LENGTH: Final = struct.Struct("<I")
_MOST_DIMENSIONS: Final = 8


def read_inputs(request: oip.ModelInferRequest, types: Mapping[str, str]) -> dict[str, list[Any]]:
    """Reads the elements of a request's tensors, by name.

    Args:
        request: the request.
        types: the tensors that are served, with the type of each.

    Raises:
        InvalidFieldError: a tensor is unknown, appears twice, or has another type or number of elements than it says.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        valid = f"{len(request.inputs)}, one for each of inputs"
        raise InvalidFieldError("raw_input_contents", f"has {len(raw)} entries", valid)
    found: dict[str, list[Any]] = {}
    for i, tensor in enumerate(request.inputs):
        if tensor.name not in types:
            raise InvalidFieldError(f"inputs[{i}].name", f"is {tensor.name[:64]!r}", f"one of {', '.join(types)}")
        path, datatype = f"inputs.{tensor.name}", types[tensor.name]
        if tensor.name in found:
            raise InvalidFieldError(path, "is given twice", "each tensor once")
        if tensor.datatype != datatype:
            raise InvalidFieldError(f"{path}.datatype", f"is {tensor.datatype[:64]!r}", datatype)
        if raw and tensor.HasField("contents"):
            raise InvalidFieldError(f"{path}.contents", "is set beside raw_input_contents", "one of the two")
        count = _num_elements(path, tensor.shape)
        values = _from_raw(path, datatype, raw[i]) if raw else _from_contents(path, datatype, tensor.contents)
        if len(values) != count:
            problem = f"has {len(values)} elements"
            raise InvalidFieldError(path, problem, f"{count}, as its shape {list(tensor.shape)} says")
        found[tensor.name] = values
    return found


def _num_elements(path: str, shape: Sequence[int]) -> int:
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
        problem = f"is {list(shape[:_MOST_DIMENSIONS])}"
        raise InvalidFieldError(f"{path}.shape", problem, f"at most {_MOST_DIMENSIONS} lengths, none below 0")
    return math.prod(shape)


def _from_contents(path: str, datatype: str, contents: oip.InferTensorContents) -> list[Any]:
    field = _FIELDS[datatype]
    for other, _ in contents.ListFields():
        if other.name != field:
            raise InvalidFieldError(f"{path}.contents.{other.name}", "is set", f"{field} alone for {datatype}")
    return list(getattr(contents, field))


def _from_raw(path: str, datatype: str, data: bytes) -> list[Any]:
    if datatype == BYTES:
        return list(_elements(path, data))
    try:
        return [element for (element,) in struct.iter_unpack(f"<{_FORMATS[datatype]}", data)] if data else []
    except struct.error:
        raise InvalidFieldError(path, f"has {len(data)} raw bytes", f"a whole number of {datatype} elements") from None


def _elements(path: str, data: bytes) -> Iterator[bytes]:
    """The elements of raw BYTES."""
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data):
            raise InvalidFieldError(path, "ends within the length of an element", "4 bytes before each element")
        (length,) = _LENGTH.unpack_from(data, at)
        at = start + length
        if at > len(data):
            problem = f"ends {at - len(data)} bytes before the end of an element"
            raise InvalidFieldError(path, problem, "as many bytes as the length before the element says")
        yield data[start:at]


def add_output(
    response: oip.ModelInferResponse,
    name: str,
    datatype: str,
    values: Sequence[Any],
    *,
    is_raw: bool,
    shape: Sequence[int] | None = None,
) -> None:
    """Adds a tensor to a response.

    Args:
        response: the response.
        name: of the tensor.
        datatype: its type.
        values: its elements.
        is_raw: True to send bytes.
        shape: its shape; None is that of a list.
    """
    tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)] if shape is None else shape)
    if not is_raw:
        getattr(tensor.contents, _FIELDS[datatype]).extend(values)
    elif datatype == BYTES:
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(value)) + value for value in values))
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values))
