"""Requests that no client would send: drawn from a message's descriptor, or a good one with a few fields changed."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence, Set
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_TEXTS = (
    "",
    "a",
    "hi",
    "m",
    "x" * 200,
    "\x00",
    "\x1b[31m",
    "é" * 40,
    "{}",
    '{"a": 1, "a": 2}',
    "[" * 99,
    "user",
    "😀",
    "<|end|>",
)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e9, -1e30, math.inf, -math.inf, math.nan, 1e-45)
_INTEGERS = (0, 1, 2, 3, 7, 64, 65, 255, 300, 1 << 16, (1 << 31) - 1)
_SIGNED = (-1, -7, -(1 << 31))
_DEPTH = 4


class Mangler:
    """Draws requests.

    Args:
        draw: where chance comes from.
        served: fields, `Message.field`, that changes of a good request prefer: others are refused before anything else.
        unknown: how often a message has a field that there is not.
    """

    def __init__(self, draw: random.Random, served: Set[str], unknown: float = 0.02) -> None:
        self._draw = draw
        self._served = served
        self._unknown = unknown

    def random(self, kind: type[Message]) -> Message:
        """A request of which each field may be set to anything."""
        message = kind()
        self._fill(message, self._draw.choice((0.1, 0.3, 0.6)), _DEPTH)
        return message

    def changed(self, good: Message) -> Message:
        """A good request with up to three changes at any depth."""
        message = type(good)()
        message.CopyFrom(good)
        for _ in range(self._draw.randint(1, 3)):
            inner = self._somewhere(message)
            if self._draw.random() < self._unknown:
                self._add_unknown(inner)
            else:
                field: Any = self._draw.choice(self._preferred(inner))
                self._set(inner, field, 0.2, _DEPTH)
        return message

    def _preferred(self, message: Message) -> Sequence[Any]:
        """Fields to change: mostly those that are served."""
        every: Any = message.DESCRIPTOR.fields
        served = [field for field in every if f"{message.DESCRIPTOR.name}.{field.name}" in self._served]
        return served if served and self._draw.random() < 0.9 else every

    def _somewhere(self, message: Message) -> Message:
        """The message itself, or one that is set in it."""
        found = [message]
        for field, value in message.ListFields():
            kind = field.message_type
            if kind is None or kind.GetOptions().map_entry or not kind.fields:
                continue
            found += map(self._somewhere, value if field.is_repeated else (value,))
        return self._draw.choice(found)

    def _fill(self, message: Message, share: float, depth: int) -> None:
        field: Any
        for field in message.DESCRIPTOR.fields:
            if self._draw.random() < share:
                self._set(message, field, share, depth)
        if self._draw.random() < self._unknown:
            self._add_unknown(message)

    def _set(self, message: Any, field: FieldDescriptor, share: float, depth: int) -> None:
        """Sets a field, or some entries of it; what else its oneof had is gone."""
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            if value.message_type is None:
                getattr(message, field.name)[self._value(key)] = self._value(value)
            elif depth > 0:
                self._fill(getattr(message, field.name)[self._value(key)], share, depth - 1)
        elif field.message_type is not None and depth > 0:
            if field.is_repeated:
                for _ in range(self._draw.randint(1, 3)):
                    self._fill(getattr(message, field.name).add(), share, depth - 1)
            else:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self._fill(inner, share, depth - 1)
        elif field.message_type is None and field.is_repeated:
            getattr(message, field.name).extend(self._value(field) for _ in range(self._draw.randint(1, 4)))
        elif field.message_type is None:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self._draw
        if field.type == field.TYPE_BYTES:
            return draw.randbytes(draw.choice((0, 1, 31, 32, 33)))
        if field.cpp_type == field.CPPTYPE_STRING:
            return draw.choice(_TEXTS)
        if field.cpp_type == field.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if field.enum_type is not None:
            return draw.choice((*field.enum_type.values_by_number, 99, -3, (1 << 31) - 1))
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return draw.choice(_FLOATS)
        signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
        return draw.choice((*_INTEGERS, *_SIGNED) if signed else _INTEGERS)

    def _add_unknown(self, message: Message) -> None:
        message.MergeFromString(_unknown_field(self._draw))


def _unknown_field(draw: random.Random) -> bytes:
    """A field of a number that no message has, of a random type, as bytes."""
    number = draw.randint(1000, 2000)
    kinds: Sequence[tuple[int, bytes]] = (
        (0, b"\x07"),
        (1, struct.pack("<d", 1.0)),
        (2, b"\x03abc"),
        (5, struct.pack("<f", 1.0)),
    )
    wire, value = draw.choice(kinds)
    key = number << 3 | wire
    return bytes([key & 0x7F | 0x80, key >> 7]) + value
