"""Frames between an engine and its ranks: a length, then msgpack, over a socket pair or TCP.

What crosses is data only: numbers, strings, arrays and the classes named here. Nothing that is received can name code.
Decoding any received bytes gives a message or raises FrameError. Arrays and classes are decoded only from a peer that
has proved the secret.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any, Final

import msgpack
import numpy as np

from common.config import Config
from common.limits import MAX_RANK_FRAME_BYTES
from common.params.config_parts import (
    CompilationConfig,
    LayerQuantConfig,
    ParallelConfig,
    QuantizationConfig,
    SpeculativeConfig,
)
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatchOutput

_LENGTH: Final = struct.Struct("<I")
_RECEIVE_BYTES: Final = 1 << 18
_DATACLASS, _ARRAY = 1, 2
# Config has a QuantizationConfig, which has LayerQuantConfigs.
_MAX_EXTENSION_DEPTH: Final = 3
_CLASSES: Final[dict[str, Any]] = {
    each.__name__: each
    for each in (
        Config,
        ParallelConfig,
        CompilationConfig,
        LayerQuantConfig,
        QuantizationConfig,
        SpeculativeConfig,
        SamplingParams,
        ScheduledBatchOutput,
    )
}


class FrameError(Exception):
    """A received message is not a valid frame."""


def encode(message: object) -> bytes:
    """Encodes a message as a frame. Lists and tuples both arrive as tuples.

    Raises:
        TypeError: the message holds something that must not cross.
    """
    body: bytes = msgpack.packb(message, default=_pack)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes, has_extensions: bool = True) -> Any:
    """Decodes the message of a frame without its length.

    Args:
        body: bytes of the message.
        has_extensions: False refuses arrays and classes. Comparing an array with a string raises ValueError.

    Raises:
        FrameError: it is damaged.
    """
    try:
        return _decode(body, 0 if has_extensions else _MAX_EXTENSION_DEPTH)
    except Exception as error:
        # msgpack, numpy or a class that refuses its values may raise; the cause is always the sender's bytes.
        raise FrameError(f"a damaged frame: {type(error).__name__}: {error}") from error


def _decode(body: bytes, depth: int) -> Any:
    return msgpack.unpackb(body, ext_hook=partial(_unpack, depth), use_list=False, strict_map_key=False)


class FrameReader:
    """Assembles frames from the bytes that a socket receives.

    Attributes:
        max_bytes: of a frame; may be raised once the sender has proved the secret.
        has_extensions: False refuses arrays and classes.
    """

    def __init__(self, max_bytes: int = MAX_RANK_FRAME_BYTES, has_extensions: bool = True) -> None:
        self.max_bytes = max_bytes
        self.has_extensions = has_extensions
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds received bytes. Returns the messages that they complete.

        Raises:
            FrameError: a frame is damaged or too long.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self.max_bytes:
                raise FrameError(f"a frame of {size} bytes; at most {self.max_bytes}")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode(body, self.has_extensions)


def receive(sock: socket.socket, reader: FrameReader) -> Iterator[Any]:
    """Reads once from the socket. Returns the messages that the bytes complete.

    Raises:
        EOFError: the other end is gone.
        FrameError: see FrameReader.feed.
        OSError: the connection broke, or the socket's timeout passed.
    """
    data = sock.recv(_RECEIVE_BYTES)
    if not data:
        raise EOFError
    return reader.feed(data)


def messages(sock: socket.socket, reader: FrameReader) -> Iterator[Any]:
    """Messages of a blocking connection, first those that the reader already holds: some may have come with earlier
    ones.

    Raises:
        as `receive`, when the connection ends.
    """
    yield from reader.feed(b"")
    while True:
        yield from receive(sock, reader)


def _pack(value: Any) -> msgpack.ExtType:
    if type(value).__name__ in _CLASSES:
        values = [getattr(value, field.name) for field in fields(value)]
        return msgpack.ExtType(_DATACLASS, msgpack.packb([type(value).__name__, *values], default=_pack))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, value.shape, value.tobytes()]))
    raise TypeError(f"{type(value).__name__} must not cross to a rank")


def _unpack(depth: int, code: int, data: bytes) -> Any:
    if depth >= _MAX_EXTENSION_DEPTH:
        # Each level takes C stack, which ends by SIGSEGV long before Python's own limit.
        deep = f"extensions in each other, more than {_MAX_EXTENSION_DEPTH} deep"
        raise FrameError(f"an extension before the proof, or {deep}")
    content = _decode(data, depth + 1)
    if code == _ARRAY:
        dtype, shape, values = content
        return np.frombuffer(values, dtype).reshape(shape)
    name, *values = content
    return _CLASSES[name](*values)
