"""Every schema keyword is enforced, ignored as an annotation, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from typing import Any

import jsonschema
import jsonschema_specifications
import pytest

from common.constraints import json_schema
from common.constraints.check import GrammarChecker
from common.constraints.formats import FORMATS
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError

CHECKER = GrammarChecker({}, {256})


def vocabulary() -> dict[str, Any]:
    """Every keyword of the JSON Schema 2020-12 meta-schemas, with the schema of its value."""
    registry = jsonschema_specifications.REGISTRY
    found: dict[str, Any] = {}
    for uri in registry:
        if "/2020-12/" in uri:
            found |= registry.contents(uri).get("properties", {})
    return found


# For each validating keyword, a value and a document that it refuses.
REFUSED: dict[str, tuple[dict[str, Any], object]] = {
    "type": ({"type": "string"}, 1),
    "enum": ({"enum": [1, "a"]}, 2),
    "const": ({"const": [1]}, [2]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 4),
    "maximum": ({"type": "number", "maximum": 3}, 3.5),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, 3),
    "minimum": ({"type": "number", "minimum": 3}, 2),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 3}, 3),
    "maxLength": ({"type": "string", "maxLength": 1}, "ab"),
    "minLength": ({"type": "string", "minLength": 2}, "a"),
    "pattern": ({"type": "string", "pattern": "b"}, "aac"),
    "format": ({"type": "string", "format": "ipv4"}, "1.2.3"),
    "maxItems": ({"type": "array", "maxItems": 1}, [1, 2]),
    "minItems": ({"type": "array", "minItems": 1}, []),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "string"}]}, [1]),
    "items": ({"type": "array", "items": {"type": "string"}}, [1]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 2}),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "required": ({"type": "object", "required": ["a"]}, {"b": 1}),
    "properties": ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": 1}),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {"type": "string"}}}, {"ab": 1}),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": 1}),
    "allOf": ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "ab"),
    "anyOf": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1),
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 1),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, 1),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, 1),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}}, 1),
    "$anchor": ({"$ref": "#b", "$defs": {"a": {"$anchor": "b", "type": "string"}}}, 1),
    "$id": ({"$id": "http://x/y", "$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, 1),
    "$schema": ({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"}, 1),
}


def accepts(schema: object, document: object) -> bool:
    """True if the grammar of a schema accepts the compact text of a document."""
    return bool(accepted(schema, [document]))


def accepted(schema: object, documents: Iterable[object]) -> list[object]:
    """The documents whose compact text the grammar of a schema accepts."""
    from common.constraints import library

    text = CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
    start = library.compiled(text, library.byte_vocabulary({}, {256}), library.RUNNING)
    found = []
    for document in documents:
        matcher = start.deep_copy()
        data = list(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())
        if matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting():
            found.append(document)
    return found


def test_every_schema_keyword_is_served_or_refused() -> None:
    """Each keyword is enforced, ignored or refused; a keyword of a later draft is refused as unknown."""
    words = vocabulary()
    assert len(words) > 50
    assert set(REFUSED) | {"title", "default"} <= json_schema.KEYWORDS
    assert words.keys() - json_schema.KEYWORDS == {
        "$dynamicAnchor", "$dynamicRef", "$vocabulary", "contains", "maxContains", "minContains", "dependentRequired",
        "dependentSchemas", "propertyNames", "if", "then", "else", "not", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems", "dependencies", "$recursiveAnchor", "$recursiveRef",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(vocabulary().keys() - json_schema.KEYWORDS | {"nullable", "x-order", "id"}))
def test_unsupported_keyword_is_refused_by_name_and_place(name: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"items": {name: {}}}}}
    with pytest.raises(InvalidFieldError) as refused:
        CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
    assert f"at /properties/a~1b/items: {name!r} is not supported" in str(refused.value)
    assert refused.value.violations[0].path == "sampling_params.constraint.json_schema"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_keyword_is_enforced(name: str) -> None:
    """The grammar refuses the document that the validator refuses, and only because of this keyword."""
    schema, document = REFUSED[name]
    assert name in json.dumps(schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid(document) or name == "format"
    assert not accepts(schema, document)
    assert accepts({}, document)


@pytest.mark.parametrize("name", sorted(json_schema.KEYWORDS - REFUSED.keys()))
def test_annotation_keywords_are_ignored(name: str) -> None:
    """Validators ignore annotations too."""
    note: Any = {"type": "integer"} if name == "contentSchema" else [1] if name == "examples" else "note"
    assert jsonschema.Draft202012Validator({name: note}).is_valid("any")
    assert accepts({name: note, "type": "string"}, "any")


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(name: str) -> None:
    assert not accepts({"type": "string", "format": name}, "?")


@pytest.mark.parametrize(("name", "rest"), [("date", ""), ("date-time", "T23:59:59Z")])
def test_date_format_accepts_only_calendar_dates(name: str, rest: str) -> None:
    years = (0, 1, 4, 100, 400, 1900, 1904, 2000, 2023, 2024, 2100, 9996, 9999)
    every = [f"{year:04}-{month:02}-{day:02}{rest}" for year in years for month in range(14) for day in range(33)]
    assert accepted({"format": name}, every) == [text for text in every if _is_date(text[:10])]


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_time_and_host_name_formats_match_validators() -> None:
    times = ["00:00:00Z", "23:59:59.5+01:00", "23:59:60Z", "12:00:60Z", "24:00:00Z"]
    assert accepted({"format": "time"}, times) == times[:2]
    moments = [f"2024-02-29T{time}" for time in times]
    assert accepted({"format": "date-time"}, moments) == moments[:2]
    label = "a" * 63
    good = ["a", "a.b", "a-b", "a-bc", "ab-c.d", "a--b", "abc--d", f"{label}.{label}.{label}.{'a' * 61}"]
    bad = [
        "xn--X",
        "xn--ihqwcrb4cv8a8dqg056pqjye",
        "ab--c",
        "x.ab--c",
        "-a",
        "a-",
        f"{label}.{label}.{label}.{'a' * 62}",
    ]
    assert accepted({"format": "hostname"}, [*good, *bad]) == good
    assert accepted({"format": "hostname", "allOf": [{"minLength": 3}]}, good) == good[1:]
    inner = {"type": "array", "items": {"anyOf": [{"format": "time"}]}}
    assert accepted(inner, [["23:59:60Z"], ["23:59:59Z"]]) == [["23:59:59Z"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a', "it is not valid JSON"),
        ("[]", "another JSON value"),
        ('{"type": "string", "type": "null"}', "'type' stands twice"),
        ('{"maximum": NaN}', "NaN is not a JSON number"),
        ('{"maximum": 1e999}', "too large"),
        ('{"properties": [1]}', "'properties' is not an object"),
        ('{"items": [{}]}', "at /items: it is another JSON value"),
        ('{"format": "color"}', "format 'color' is not supported"),
        ('{"multipleOf": 0}', "is not a number above 0"),
        ('{"x-guidance": {"lenient": true}}', "'x-guidance' is not supported but for"),
        ('{"items": {"x-guidance": {}}}', "at /items: 'x-guidance' is not supported"),
        ('{"properties": {"a": {"type": "strng"}}}', "at /properties/a: Invalid type: strng"),
        ('{"properties": {"a": {"pattern": "a(?=b)"}}}', "at /properties/a: look-around"),
        ('{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf constraints are not supported"),
        ('{"$ref": "http://else.where/x"}', "means no subschema of this schema"),
        ('{"$ref": "#"}', "no finite value satisfies it"),
        ("false", "Unsatisfiable"),
        ('{"type": "integer", "minimum": 5, "maximum": 2}', "minimum (5) is greater than maximum (2)"),
        ('{"items":' * 6_000 + "{}" + "}" * 6_000, "nested too deeply"),
        ('{"items":' * 60 + "{}" + "}" * 60, "nested too deeply: at most 48 levels"),
    ],
)
def test_faults_are_named_with_their_place(text: str, said: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        CHECKER.check(Constraint("json_schema", (text,)), optional_space=False)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 700


def test_schema_property_order_is_kept() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "null"}}, "required": ["z", "a"]}
    assert accepts(schema, {"z": None, "a": None})
    assert not accepts(schema, {"a": None, "z": None})


def test_blanks_between_tokens_are_bounded() -> None:
    """Indented JSON is accepted and an endless run of blanks is not; the compact option accepts no blanks."""
    from common.constraints import library

    def takes(schema: object, text: str) -> bool:
        grammar = CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
        matcher = library.compiled(grammar, library.byte_vocabulary({}, {256}), library.RUNNING)
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode())

    anything = {"type": "object"}
    assert takes(anything, json.dumps({"a": [1, {"b": None}]}, indent=4))
    assert takes(anything, "{" + " " * 20)
    assert not takes(anything, "{" + " " * 21)
    compact = {**anything, "x-guidance": {"whitespace_flexible": False}}
    assert takes(compact, '{"a":1}')
    assert not takes(compact, '{"a": 1}')
