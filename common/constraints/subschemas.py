"""Subschemas of a JSON Schema, with their places as JSON Pointers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

# Most levels of subschemas: the library's own bound on nesting is not far beyond.
MAX_DEPTH: Final = 48
ONES: Final = ("items", "additionalProperties")
LISTS: Final = ("prefixItems", "allOf", "anyOf", "oneOf")
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


class SchemaError(Exception):
    """A schema cannot be guaranteed.

    Attributes:
        place: JSON Pointer of the subschema; empty for the whole.
    """

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"at {place or 'its root'}: {message}")
        self.place = place


def step(key: str) -> str:
    """Escapes a key as a step of a JSON Pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def walk(schema: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The schema and its subschemas at all levels, each with its JSON Pointer; the outer ones first.

    Raises:
        SchemaError: they are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise SchemaError(place, f"it is nested too deeply: at most {MAX_DEPTH} levels")
    yield place, schema
    for inner_step, inner in children(schema):
        yield from walk(inner, place + inner_step, depth + 1)


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Subschemas directly in a schema, with the steps to them."""
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        if name in ONES:
            yield f"/{name}", value
        elif name in LISTS and isinstance(value, list):
            yield from ((f"/{name}/{i}", each) for i, each in enumerate(value))
        elif name in MAPS and isinstance(value, Mapping):
            yield from ((f"/{name}/{step(key)}", each) for key, each in value.items())


def changed(name: str, value: Any, place: str, change: Callable[[str, Any], Any]) -> Any:
    """A keyword's value with its subschemas changed.

    Args:
        name: the keyword.
        value: its value.
        place: of the subschema that has the keyword.
        change: takes a place and the subschema there; returns the new subschema.
    """
    if name in ONES:
        return change(f"{place}/{name}", value)
    if name in LISTS and isinstance(value, list):
        return [change(f"{place}/{name}/{i}", each) for i, each in enumerate(value)]
    if name in MAPS and isinstance(value, Mapping):
        return {key: change(f"{place}/{name}/{step(key)}", each) for key, each in value.items()}
    return value


def definitions(schema: Any) -> dict[str, Any]:
    """Subschemas that others may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
