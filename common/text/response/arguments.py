"""Arguments that stand between tags, one by one, as grammars write them.

What stands there is read by the types that the schema declares (values.py): a text as it is, everything else as JSON.
So an argument can be held to its schema where the schema says which of them it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.constraints import json_schema
from common.text.response.values import schema_types

_TEXT: Final = "string"
_SCALARS: Final = frozenset({"integer", "number", "boolean", "null"})
_NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_OF_ROOT: Final = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_OF_TEXT: Final = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
# Signs that end a key.
_OF_TAGS: Final = frozenset('<>"\n')


class ArgumentError(Exception):
    """A schema cannot be guaranteed where arguments stand between tags.

    Attributes:
        place: JSON Pointer of the subschema.
    """

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"at {place or 'its root'}: {message}")
        self.place = place


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument between tags.

    Attributes:
        name: its key.
        is_required: True if every call has it.
        is_text: True for a text as it is, False for JSON, None if that is not known.
        schema: of its JSON; empty where anything may stand.
        texts: the only ones, None for any.
        lengths: least and most characters of a text, None for any.
    """

    name: str
    is_required: bool
    is_text: bool | None = None
    schema: str = ""
    texts: tuple[str, ...] | None = None
    lengths: tuple[int, int | None] | None = None


def declared(schema: Mapping[str, Any]) -> list[Argument]:
    """The arguments that a schema declares, in order, of which nothing is promised but their names."""
    return [Argument(name, is_required, _is_text(inner)) for name, inner, is_required in _properties(schema)]


def strict(schema: Mapping[str, Any], *, tags_are_tokens: bool) -> list[Argument]:
    """The arguments that a schema declares, held to it.

    Args:
        schema: of an object, that grammars serve.
        tags_are_tokens: True if no text can be taken for the end of an argument.

    Raises:
        ArgumentError: they cannot be held.
    """
    for name in schema:
        if name not in _OF_ROOT:
            raise ArgumentError("", f"{name!r} is not supported where arguments stand between tags")
    names = {name for name, _, _ in _properties(schema)}
    for name in schema.get("required", []):
        if name not in names:
            raise ArgumentError("/required", f"{name!r} is none of the properties")
    known = json_schema.definitions(schema)
    return [
        _strict(name, inner, is_required, known, tags_are_tokens=tags_are_tokens)
        for name, inner, is_required in _properties(schema)
    ]


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    properties, required = schema.get("properties"), schema.get("required")
    given = properties if isinstance(properties, dict) else {}
    return [(name, inner, isinstance(required, list) and name in required) for name, inner in given.items()]


def _is_text(schema: Any) -> bool | None:
    types = set(schema_types(schema))
    if not types or types > {_TEXT}:
        return None
    return types == {_TEXT}


def _strict(name: str, schema: Any, is_required: bool, known: Mapping[str, Any], *, tags_are_tokens: bool) -> Argument:
    place, types = f"/properties/{name}", schema_types(schema)
    if not name or _OF_TAGS & {*name}:
        raise ArgumentError(place, "its name cannot stand in a tag")
    is_text = _is_text(schema)
    if is_text is None:
        raise ArgumentError(place, "its 'type' does not say whether it is a string")
    if is_text:
        return _text(Argument(name, is_required, is_text), schema, place, tags_are_tokens=tags_are_tokens)
    if "boolean" in types and _SCALARS & {*types} - {"boolean", "null"}:
        raise ArgumentError(place, "a boolean and a number are not told apart between tags")
    if not tags_are_tokens and not set(types) <= _SCALARS:
        raise ArgumentError(place, "an array or an object could have a text in it that ends the argument")
    return Argument(name, is_required, is_text, json.dumps({**known, **schema}, ensure_ascii=False))


def _text(argument: Argument, schema: Mapping[str, Any], place: str, *, tags_are_tokens: bool) -> Argument:
    for keyword in schema:
        if keyword not in _OF_TEXT:
            raise ArgumentError(place, f"{keyword!r} of a string is not supported between tags")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        right = [text for text in choices if isinstance(text, str) and text == schema.get("const", text)]
        fitting = tuple(text for text in right if least <= len(text) and (most is None or len(text) <= most))
        if not fitting or (not tags_are_tokens and any("<" in text for text in fitting)):
            raise ArgumentError(place, "no string satisfies it, or one of them has a tag in it")
        return Argument(argument.name, argument.is_required, True, texts=fitting)
    if not least and most is None:
        return argument
    if not tags_are_tokens:
        raise ArgumentError(place, "the length of a string is not supported between tags that are not tokens")
    return Argument(argument.name, argument.is_required, True, lengths=(least, most))
