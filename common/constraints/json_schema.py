"""JSON Schemas (2020-12) that can be guaranteed: every keyword of them is enforced, or is a note for people.

A keyword that neither is, is refused by name and place, so that no schema is weakened in silence. What a keyword's
value must be, and whether anything satisfies the schema at all, the library says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from common.constraints.formats import FORMATS, FURTHER

# Levels of subschemas: beyond them the library's own bound of nesting is near.
MAX_DEPTH: Final = 48
# Between the tokens of JSON: enough for indented output, and no endless row of blanks.
WHITESPACE: Final = r"[ \n]{0,20}"
# The library's options, by which a schema could be weakened; one of them is for callers.
_OPTIONS: Final = "x-guidance"
_FLEXIBLE: Final = "whitespace_flexible"

_ENFORCED: Final = frozenset(
    {
        "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum",
        "maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "prefixItems", "items",
        "maxProperties", "minProperties", "required", "properties", "patternProperties", "additionalProperties",
        "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions", "$id", "$anchor", "$schema",
    }
)  # fmt: skip
# Of these validators say nothing either.
_NOTES: Final = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
        "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
KEYWORDS: Final = _ENFORCED | _NOTES
_ONES: Final = ("items", "additionalProperties")
_LISTS: Final = ("prefixItems", "allOf", "anyOf", "oneOf")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_TEXTS: Final = ("$id", "$anchor", "$schema")


class SchemaError(Exception):
    """A schema cannot be guaranteed.

    Attributes:
        place: JSON Pointer of the subschema; empty for the whole.
    """

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"at {place or 'its root'}: {message}")
        self.place = place


def canonical(text: str) -> str:
    """The schema as the library gets it: compact, its order kept, with the whitespace that is allowed.

    Raises:
        SchemaError: it is no schema, or has what cannot be guaranteed.
    """
    return dumped(parsed(text))


def parsed(text: str) -> Any:
    """The schema as Python values.

    Raises:
        SchemaError: as `canonical`.
    """
    try:
        schema = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None
    except ValueError as error:
        raise SchemaError("", f"it is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError("", "it is another JSON value than an object or a boolean")
    for place, subschema in subschemas(schema):
        _check(place, subschema, is_root=not place)
    return schema


def dumped(schema: Any) -> str:
    """A schema that `parsed` let pass, for the library."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    flexible = schema.get(_OPTIONS, {}).get(_FLEXIBLE, True)
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE} if flexible else {_FLEXIBLE: False}
    try:
        rest = _narrowed({name: value for name, value in schema.items() if name != _OPTIONS})
        return json.dumps({_OPTIONS: options, **rest}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise SchemaError("", "it has a number that is too large, or is nested too deeply") from None


def _narrowed(schema: Any) -> Any:
    """The schema with all that its formats say."""
    if not isinstance(schema, dict):
        return schema
    made = {name: _narrowed_value(name, value) for name, value in schema.items()}
    every = made.get("allOf", [])
    if (further := FURTHER.get(schema.get("format", ""))) and isinstance(every, list):
        made["allOf"] = [*every, *further]
    return made


def _narrowed_value(name: str, value: Any) -> Any:
    if name in _ONES:
        return _narrowed(value)
    if name in _LISTS and isinstance(value, list):
        return [_narrowed(each) for each in value]
    if name in _MAPS and isinstance(value, dict):
        return {key: _narrowed(each) for key, each in value.items()}
    return value


def subschemas(schema: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The schema and those in it, each with its JSON Pointer; the outer ones first.

    Raises:
        SchemaError: they are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise SchemaError(place, f"it is nested too deeply: at most {MAX_DEPTH} levels")
    yield place, schema
    for step, inner in children(schema):
        yield from subschemas(inner, place + step, depth + 1)


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Subschemas directly in a schema, with the steps to them."""
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        if name in _ONES:
            yield f"/{name}", value
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"/{name}/{i}", each) for i, each in enumerate(value))
        elif name in _MAPS and isinstance(value, Mapping):
            yield from ((f"/{name}/{_step(key)}", each) for key, each in value.items())


def definitions(schema: Any) -> dict[str, Any]:
    """Subschemas that others may refer to."""
    return {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}


def _check(place: str, schema: Any, *, is_root: bool) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(place, "it is another JSON value than an object or a boolean")
    for name, value in schema.items():
        if name == _OPTIONS and is_root:
            _check_options(value)
        elif name not in KEYWORDS:
            raise SchemaError(place, f"{name!r} is not supported")
        elif name in _TEXTS and not isinstance(value, str):
            raise SchemaError(place, f"{name!r} is not text")
        elif name in _MAPS and not isinstance(value, dict):
            raise SchemaError(place, f"{name!r} is not an object")
    if schema.get("format", FORMATS[0]) not in FORMATS:
        raise SchemaError(place, f"format {schema['format']!r} is not supported; {', '.join(FORMATS)} are")
    if not _is_positive(schema.get("multipleOf", 1)):
        raise SchemaError(place, "'multipleOf' is not a number above 0")


def _check_options(value: Any) -> None:
    if not isinstance(value, dict) or set(value) - {_FLEXIBLE} or not isinstance(value.get(_FLEXIBLE, True), bool):
        raise SchemaError("", f"{_OPTIONS!r} is not supported but for {_FLEXIBLE!r}, true or false")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _step(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values of one name neither may be dropped."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"{twice!r} stands twice in an object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
