"""Checks JSON Schemas (2020-12): every keyword is enforced, is an annotation, or is refused.

A refusal names the keyword and its place, so no schema is weakened silently. A keyword that the library reads
differently from JSON Schema gets another spelling (`library_form.py`). The library checks the values of keywords, and
whether any value satisfies the schema.
"""

from __future__ import annotations

import json
from typing import Any, Final

from common.constraints import numbers
from common.constraints.formats import FORMATS
from common.constraints.library import can_begin, has_longer
from common.constraints.library_form import NOTES, has_plain_names, library_form
from common.constraints.names import without_dead_ends
from common.constraints.subschemas import MAPS, SchemaError, walk
from common.json_text import JsonError, json_value

# Whitespace between JSON tokens: enough for indented output, but bounded.
WHITESPACE: Final = r"[ \n]{0,20}"
# The library's options could weaken a schema. One of them is open to callers.
_OPTIONS: Final = "x-guidance"
_FLEXIBLE: Final = "whitespace_flexible"
# JSON's escapes except `\u`.
_SHORT_ESCAPES: Final = 'nrbtf\\"'

_ENFORCED: Final = frozenset(
    {
        "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum",
        "maxLength", "minLength", "pattern", "format", "maxItems", "minItems", "prefixItems", "items",
        "maxProperties", "minProperties", "required", "properties", "patternProperties", "additionalProperties",
        "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions", "$id", "$anchor", "$schema",
    }
)  # fmt: skip
KEYWORDS: Final = _ENFORCED | NOTES
_TEXTS: Final = ("$id", "$anchor", "$schema", "$ref", "pattern", "format")


def canonical(text: str) -> str:
    """The schema as the library gets it: compact, in its order, with the allowed whitespace.

    Raises:
        SchemaError: it is not a schema, or has a keyword that cannot be guaranteed.
    """
    return dumped(parsed(text))


def parsed(text: str) -> Any:
    """The schema in the library's form, as Python values.

    Raises:
        SchemaError: as `canonical`.
    """
    try:
        schema = json_value(text, numbers.Written.of)
    except JsonError as error:
        raise SchemaError(error.place, f"it {error.problem}") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError("", "it is another JSON value than an object or a boolean")
    try:
        return _served(schema)
    except RecursionError:
        raise SchemaError("", "it is nested too deeply") from None


def _served(schema: Any) -> Any:
    for place, subschema in walk(schema):
        _check(place, subschema, is_root=not place)
    return without_dead_ends(library_form(schema), lambda probe: can_begin(dumped(probe)), has_longer)


def dumped(schema: Any) -> str:
    """A schema in the library's form, as text."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    flexible = schema.get(_OPTIONS, {}).get(_FLEXIBLE, True)
    options: dict[str, object] = {"whitespace_pattern": WHITESPACE} if flexible else {_FLEXIBLE: False}
    if has_plain_names(schema):
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    try:
        rest = {name: value for name, value in schema.items() if name != _OPTIONS}
        return json.dumps({_OPTIONS: options, **rest}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise SchemaError("", "it has a number that is too large, or is nested too deeply") from None


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
        elif name in MAPS and not isinstance(value, dict):
            raise SchemaError(place, f"{name!r} is not an object")
    if schema.get("format", FORMATS[0]) not in FORMATS:
        raise SchemaError(place, f"format {schema['format']!r} is not supported; {', '.join(FORMATS)} are")
    if not _is_positive(schema.get("multipleOf", 1)):
        raise SchemaError(place, "'multipleOf' is not a number above 0")
    _check_count_of_names(place, schema)


def _check_count_of_names(place: str, schema: dict[str, Any]) -> None:
    # The library counts a name that comes twice as two properties.
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    named = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise SchemaError(
            place, f"'minProperties' {least} is not supported: at most one more than the {named} names of 'required' is"
        )


def _check_options(value: Any) -> None:
    if not isinstance(value, dict) or set(value) - {_FLEXIBLE} or not isinstance(value.get(_FLEXIBLE, True), bool):
        raise SchemaError("", f"{_OPTIONS!r} is not supported but for {_FLEXIBLE!r}, true or false")


def _is_positive(value: object) -> bool:
    return numbers.is_number(value) and numbers.exact(value) > 0
