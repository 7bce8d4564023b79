"""Prepares arguments between tags for grammars: name, type and schema of each.

A value between tags is read by the types in its schema (values.py): a string as raw text, any other value as JSON. So a
grammar can hold an argument to its schema if the schema determines whether it is a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from router.answers.channels import raw_texts
from router.answers.channels.schema_types import (
    NOTES,
    TEXT,
    SchemaTypeError,
    TypeAlternative,
    alternatives,
    relevant,
    types_of,
    with_root,
)
from router.answers.channels.values import typed

_SCALARS: Final = frozenset({"integer", "number", "boolean", "null"})
_OF_ROOT: Final = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
# Characters that end a key.
_OF_TAGS: Final = frozenset('<>"\n')


class ArgumentError(Exception):
    """A schema cannot be guaranteed for arguments between tags.

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
        name: name of the argument.
        is_required: True if every call has it.
        is_text: True for raw text, False for JSON, None for either.
        schema: JSON Schema of the value; empty for raw text or any value.
        text: terminals of the raw text; empty for any text.
    """

    name: str
    is_required: bool
    is_text: bool | None = None
    schema: str = ""
    text: str = ""


def declared(schema: Mapping[str, Any]) -> list[Argument]:
    """Returns the arguments of a schema in order, for tools without `strict`: only their names are held."""
    return [
        Argument(name, is_required, _is_text(types_of(inner, schema)))
        for name, inner, is_required in _properties(schema)
        if _is_key(name)
    ]


def strict(schema: Mapping[str, Any], tag_end: str) -> list[Argument]:
    """Returns the arguments of a schema in order, for `strict` tools: values are held to the schema.

    Args:
        schema: schema of an object, which grammars support.
        tag_end: text that ends a value and that a value could spell; empty where the end is a token.

    Raises:
        ArgumentError: an argument cannot be held.
    """
    for name in schema:
        if name not in _OF_ROOT:
            raise ArgumentError("", f"{name!r} is not supported where arguments stand between tags")
    names = {name for name, _, _ in _properties(schema)}
    for name in schema.get("required", []):
        if name not in names:
            raise ArgumentError("/required", f"{name!r} is none of the properties")
    return [_strict(Argument(name, needed), inner, schema, tag_end) for name, inner, needed in _properties(schema)]


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    properties, required = schema.get("properties"), schema.get("required")
    given = properties if isinstance(properties, dict) else {}
    return [(name, inner, isinstance(required, list) and name in required) for name, inner in given.items()]


def _is_key(name: str) -> bool:
    return bool(name) and not _OF_TAGS & {*name}


def _is_text(types: Iterable[str]) -> bool | None:
    every = set(types)
    if not every or every > {TEXT}:
        return None
    return every == {TEXT}


def _strict(argument: Argument, schema: Any, root: Mapping[str, Any], tag_end: str) -> Argument:
    name, place = argument.name, f"/properties/{argument.name}"
    if not _is_key(name):
        raise ArgumentError(place, "its name cannot stand in a tag")
    try:
        found = alternatives(schema, root)
        types = types_of(schema, root)
        if TEXT in types:
            text = _text(found, types, tag_end)
            return Argument(name, argument.is_required, _is_text(types), text=text)
        _check_json(types, tag_end)
        return Argument(name, argument.is_required, False, json.dumps(with_root(schema, root), ensure_ascii=False))
    except (SchemaTypeError, raw_texts.TextError) as error:
        raise ArgumentError(place, str(error)) from None


def _check_json(types: tuple[str, ...], tag_end: str) -> None:
    """Refuses types whose JSON could be read as another value between tags."""
    if not types:
        raise SchemaTypeError("its 'type' does not say whether it is a string")
    if "boolean" in types and _SCALARS & {*types} - {"boolean", "null"}:
        raise SchemaTypeError("a boolean and a number are not told apart between tags")
    if tag_end and not (types and set(types) <= _SCALARS):
        raise SchemaTypeError("an array or an object could have a text in it that ends the argument")


def _text(found: list[TypeAlternative], types: tuple[str, ...], tag_end: str) -> str:
    """Returns the terminals of an argument that may be a string."""
    made = [_of_alternative(each, types) for each in found if TEXT in (each.types or ())]
    others = {kind for each in found for kind in (each.types or ())} - {TEXT}
    for kind in sorted(others):
        _check_other(kind, found)
    texts = list(dict.fromkeys(text for text in made if text is not None))
    if not texts and any(_choices(each) is not None for each in found):
        raise SchemaTypeError("no string satisfies it, or a string of it could be taken for another of its types")
    if "" in texts:
        # Any text is allowed, also one that is read as a value of another type.
        texts = [""]
    else:
        if unknown := others - raw_texts.SCALARS.keys():
            raise SchemaTypeError(f"a string that is held and an {min(unknown)} are not told apart between tags")
        texts += [raw_texts.SCALARS[kind] for kind in sorted(others) if not _has_choices(kind, found)]
    return _within(texts, tag_end)


def _within(texts: list[str], tag_end: str) -> str:
    """Excludes texts that contain the end of the tag."""
    if texts == [""]:
        return ""
    return " & ".join([f"({' | '.join(texts)})", *([raw_texts.without(tag_end)] if tag_end else [])])


def _of_alternative(alternative: TypeAlternative, types: tuple[str, ...]) -> str | None:
    """Returns a terminal of the strings of one alternative; empty for any string, None if no string fits."""
    terminals = [each for keywords in alternative.keywords for each in raw_texts.expression(keywords)]
    choices = _choices(alternative)
    if choices is not None:
        # For each choice, the text that is read as that choice.
        right = [text for choice in choices if (text := _read_as(choice, types)) is not None]
        if not right:
            return None
        terminals.append(raw_texts.one_of(right))
    return " & ".join(terminals) and f"({' & '.join(terminals)})"


def _choices(alternative: TypeAlternative) -> list[Any] | None:
    """Returns the values that `enum` and `const` allow; None if neither is given."""
    sets = [keywords["enum"] for keywords in alternative.keywords if "enum" in keywords]
    if not all(isinstance(each, list) for each in sets):
        raise SchemaTypeError("its 'enum' is not a list")
    sets += [[keywords["const"]] for keywords in alternative.keywords if "const" in keywords]
    if not sets:
        return None
    return [value for value in sets[0] if all(any(_equal(value, other) for other in each) for each in sets)]


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _read_as(value: Any, types: tuple[str, ...]) -> str | None:
    """Returns the text that is read as `value`; None if no text is."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if _equal(typed(text, types), value) else None


def _has_choices(kind: str, found: list[TypeAlternative]) -> bool:
    return all(_choices(each) is not None for each in found if kind in (each.types or ()))


def _check_other(kind: str, found: list[TypeAlternative]) -> None:
    """Refuses a restricted type beside strings: its text would pass as a string without satisfying the schema."""
    for each in found:
        if kind not in (each.types or ()):
            continue
        keywords = {name for keywords in each.keywords for name in keywords} & relevant(kind)
        if keywords - {"enum", "const"} or (keywords and _choices(each) is None):
            raise SchemaTypeError(f"a string and an {kind} with {min(keywords)!r} are not told apart between tags")
