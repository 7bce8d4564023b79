"""Fills messages from plain Python values. A value that does not fit is a ValueError with the path of its field."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_AnyMessage = TypeVar("_AnyMessage", bound=Message)
# A FieldDescriptor. The type has two names in protobuf, which type checkers treat as two types.
_Field: TypeAlias = Any
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
# C++ type of a field -> the values that fit it, in words.
_WANTED: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 4294967295",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 18446744073709551615",
}


def fill(message: _AnyMessage, given: Mapping[str, Any], path: str = "", names: Iterable[str] = ()) -> _AnyMessage:
    """Sets fields of a message, and returns it. A value of None leaves its field unset.

    Args:
        message: the message to fill, of any type.
        given: values by the names of fields: numbers, texts, sequences, mappings, messages.
        path: path of the message in the request, with a trailing dot.
        names: names that an error suggests for an unknown one; by default the message's fields.

    Raises:
        ValueError: a field is unknown, its value does not fit, or two fields of a oneof are given.
    """
    if not isinstance(given, Mapping):
        wanted = _article(message.DESCRIPTOR.name)
        raise ValueError(f"{path.rstrip('.')} is {_shown(given)}; give a mapping, or {wanted}")
    fields: Mapping[str, _Field] = message.DESCRIPTOR.fields_by_name
    forms: dict[str, str] = {}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(_unknown(message, name, path, names))
        if value is None:
            continue
        field = fields[name]
        oneof = field.containing_oneof
        # The protobuf compiler makes a oneof for each `optional` field: with one field, there is no conflict.
        if oneof is not None and len(oneof.fields) > 1 and (other := forms.setdefault(oneof.name, name)) != name:
            raise ValueError(f"{path}{other} and {path}{name} are both given; give one of them")
        _set(message, field, value, f"{path}{name}")
    return message


def number(name: str, value: Any) -> float:
    """Checks that an argument is a number of seconds, and returns it as a float.

    Raises:
        ValueError: `value` is not a number.
    """
    if isinstance(value, bool | str) or not hasattr(value, "__float__") or math.isnan(float(value)):
        raise ValueError(f"{name} is {_shown(value)}; give a number of seconds")
    return float(value)


def items(value: Any, path: str, wanted: str = "a list") -> list[Any]:
    """The entries of a list argument. A text is refused: it would become a list of its characters.

    Raises:
        ValueError: `value` is not a list; the error asks for `wanted`.
    """
    if isinstance(value, str | bytes | Mapping | Message):
        raise ValueError(f"{path} is a list: give [{_shown(value)}] for one")
    try:
        return list(value)
    except TypeError:
        raise ValueError(f"{path} is {_shown(value)}; give {wanted}") from None


def _set(message: Message, field: _Field, value: Any, path: str) -> None:
    there = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(there, field, value, path)
    elif field.is_repeated:
        there.extend([_value(field, each, f"{path}[{i}]") for i, each in enumerate(items(value, path))])
    elif field.message_type is not None:
        there.CopyFrom(_value(field, value, path))
    else:
        setattr(message, field.name, _value(field, value, path))


def _set_map(there: Any, field: _Field, value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {_shown(value)}; give a mapping")
    kinds = field.message_type.fields_by_name
    for key, each in value.items():
        there[_value(kinds["key"], key, f"a key of {path}")] = _value(kinds["value"], each, f"{path}[{key!r}]")


def _value(field: _Field, value: Any, path: str) -> Any:
    """Checks a value for a field, and converts it to the field's type."""
    if field.message_type is not None:
        return _message(field, value, path)
    if field.enum_type is not None:
        return _enum(field, value, path)
    if isinstance(value, Mapping) and (field.name.endswith("_json") or field.name == "json_schema"):
        return _json(value, path)
    if field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, bytes):
        return value
    kind, wanted = field.cpp_type, _WANTED[field.cpp_type]
    if field.name == "json_schema":
        wanted = "a JSON Schema, as text or as a mapping"
    is_text, is_bool = isinstance(value, str), isinstance(value, bool)
    if is_text != (kind == FieldDescriptor.CPPTYPE_STRING) or is_bool != (kind == FieldDescriptor.CPPTYPE_BOOL):
        raise ValueError(f"{path} is {_shown(value)}; give {wanted}")
    if is_text:
        return _text(value, path)
    try:
        # Numbers of other libraries, such as NumPy, are accepted as protobuf accepts them.
        return float(value) if kind in _FLOATS else value if is_bool else _integer(value, kind)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{path} is {_shown(value)}; give {wanted}") from None


def _integer(value: Any, kind: int) -> int:
    whole = value.__index__() if hasattr(value, "__index__") else None
    bits = 64 if kind == FieldDescriptor.CPPTYPE_UINT64 else 32
    if whole is None or not 0 <= whole < 1 << bits:
        raise ValueError
    return int(whole)


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} is not valid Unicode text: half a surrogate pair at {error.start}") from None
    return value


def _json(value: Mapping[str, Any], path: str) -> str:
    try:
        return _text(json.dumps(value, ensure_ascii=False, allow_nan=False), path)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be written as JSON: {error}") from None


def _message(field: _Field, value: Any, path: str) -> Message:
    wanted = field.message_type
    if isinstance(value, Message):
        if value.DESCRIPTOR.full_name != wanted.full_name:
            raise ValueError(f"{path} is {_article(value.DESCRIPTOR.name)}; give {_article(wanted.name)}")
        return value
    made = GetMessageClass(wanted)()
    if isinstance(value, Mapping):
        return fill(made, value, f"{path}.")
    # Protobuf nests lists only by a message with one repeated field: the list alone is accepted for such a message.
    if len(wanted.fields) == 1 and wanted.fields[0].is_repeated:
        _set(made, wanted.fields[0], value, path)
        return made
    raise ValueError(f"{path} is {_shown(value)}; give a mapping, or {_article(wanted.name)}")


def _enum(field: _Field, value: Any, path: str) -> int:
    """The number of an enum value, given by its number, name or short name: `high` for PRIORITY_HIGH."""
    kind = field.enum_type
    numbers: dict[str, int] = {name: value.number for name, value in kind.values_by_name.items()}
    prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
    if isinstance(value, str):
        name = value.upper()
        found = numbers.get(name, numbers.get(prefix + name))
        if found is not None:
            return found
    elif isinstance(value, int) and not isinstance(value, bool) and value in numbers.values():
        return int(value)
    short = ", ".join(repr(name.removeprefix(prefix).lower()) for name, each in numbers.items() if each)
    raise ValueError(f"{path} is {_shown(value)}; give one of {short}")


def _unknown(message: Message, name: Any, path: str, names: Iterable[str]) -> str:
    known: Sequence[str] = [*names] or [*message.DESCRIPTOR.fields_by_name]
    near = get_close_matches(str(name), known, 1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    return f"{path}{name}: {message.DESCRIPTOR.name} has no such field; {advice}"


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
