"""Keywords that the library and JSON Schema interpret differently are enforced exactly or refused by name."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from common.constraints import library
from common.constraints.forms import Constraint
from common.constraints.json_schema import KEYWORDS
from common.errors import InvalidFieldError
from tests.schema_checks import byte_walker, faults, grammar_of
from tests.unit.common.constraints.test_json_schema import CHECKER, accepted, accepts

NAMES = ("a", "größe", "名前", "😀", 'q"', "back\\slash", "x y", "a/b", "tab\tname", "")


def takes(schema: Any, *texts: str) -> list[str]:
    """The texts among `texts` that the grammar of a schema accepts."""
    grammar = CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
    start = library.compiled(grammar, library.byte_vocabulary({}, {256}), library.RUNNING)
    found = []
    for text in texts:
        matcher, data = start.deep_copy(), list(text.encode())
        if matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting():
            found.append(text)
    return found


def refusal(schema: Any) -> str:
    """Error message of a schema that is refused."""
    with pytest.raises(InvalidFieldError) as refused:
        CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
    return str(refused.value)


def spellings(name: str) -> list[str]:
    """JSON spellings of a name: plain, as `json.dumps` writes it, and in escapes only."""
    units = name.encode("utf-16-be")
    escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))
    return [json.dumps(name, ensure_ascii=False), json.dumps(name), f'"{escaped}"']


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["integer", "forbidden", "pattern"])
def test_other_name_spelling_cannot_bypass_schema(name: str, form: str) -> None:
    forms: dict[str, dict[str, Any]] = {
        "integer": {"properties": {name: {"type": "integer"}}},
        "forbidden": {"properties": {name: False}},
        "pattern": {"patternProperties": {f"^{library_escape(name)}$": {"type": "integer"}}},
    }
    said = forms[form]
    wrong = [f"{{{spelling}:null}}" for spelling in spellings(name)]
    assert takes({"type": "object", **said}, *wrong) == []
    assert takes({"type": "object", **said}, '{"other":null}') == ['{"other":null}']


def library_escape(text: str) -> str:
    """A text as an expression of ECMA-262."""
    return "".join(f"\\u{{{ord(sign):x}}}" for sign in text)


def test_escaped_random_name_cannot_bypass_schema() -> None:
    rnd = random.Random(3)
    for _ in range(60):
        name = "".join(chr(rnd.choice((rnd.randint(0x20, 0x7E), rnd.randint(0xA0, 0xD7FF)))) for _ in range(3))
        wrong = [f'{{{spelling}:"x"}}' for spelling in spellings(name)]
        assert takes({"type": "object", "properties": {name: {"type": "integer"}}}, *wrong) == []


def test_string_escapes_are_kept_outside_names() -> None:
    assert takes({"type": "string"}, r'"\u0001"') == [r'"\u0001"']
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    assert takes(closed, r'{"a":"\u0001"}') == [r'{"a":"\u0001"}']


def test_control_character_in_constant_is_refused_without_escapes() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "\x1b[0m"}}}
    assert "at /properties/a: 'const' has a control character" in refusal(schema)
    assert accepts({**schema, "additionalProperties": False}, {"a": "\x1b[0m"})


@pytest.mark.parametrize(
    "number", [2**53 + 1, 1234567890123456789, -(2**53) - 1, 2**63, 2**64 - 1, 1e300, 0.12345678901234567]
)
@pytest.mark.parametrize("form", ["const", "enum", "within"])
def test_constant_changed_by_rounding_is_refused(number: float, form: str) -> None:
    schema = {"const": {"const": number}, "enum": {"enum": ["a", number]}, "within": {"const": {"a": [number]}}}[form]
    assert "cannot be kept in an answer" in refusal({"properties": {"id": schema}})


@pytest.mark.parametrize("text", ["9007199254740993.0", "0.10000000000000000001", "1e-400"])
def test_constant_rounded_by_double_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="cannot be kept"):
        CHECKER.check(Constraint("json_schema", (f'{{"const": {text}}}',)), optional_space=False)


@pytest.mark.parametrize("number", [2**53, -(2**53), 0.1, 0.0001, 1.0, -2.5, 123456789.012345])
def test_exact_constant_is_accepted(number: float) -> None:
    assert accepted({"const": number}, [int(number) if number == int(number) else number])


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_double_admit_no_value_outside(kind: str) -> None:
    most, least, inner = 2**63 - 2, 2**53 + 1, 2**62
    near = [least - 1, most + 1, -least + 1, -most - 1, 2**64, 10**30]
    up: list[object] = [least - 2, *near]
    assert accepted({"type": kind, "minimum": least, "maximum": most}, [*up, inner]) == [inner]
    assert accepted({"type": kind, "minimum": -most, "maximum": -least}, [*near, -inner]) == [-inner]
    assert accepted({"type": kind, "exclusiveMaximum": 2**53 + 3}, [2**53 + 3, 2**53 + 4, 5]) == [5]
    assert accepted({"type": kind, "maximum": 2**64 - 1}, [2**64, 10**18]) == [10**18]


@pytest.mark.parametrize(
    ("bounds", "wrong", "right"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.00001}, "0", "0.000005"),
        ({"exclusiveMinimum": 5, "exclusiveMaximum": 5.0000001}, "5", "5.00000005"),
        ({"minimum": -0.47, "exclusiveMaximum": 0}, "-0", "-0.2"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1", "-1.2"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, "0", "0.3"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"maximum": 0.5}}}, "0", "0.3"),
        ({"minimum": 5, "exclusiveMinimum": True}, "5", "6"),
        ({"minimum": 5, "allOf": [{}], "exclusiveMinimum": True}, "5", "6"),
    ],
)
def test_narrow_bounds_admit_no_value_outside(bounds: dict[str, Any], wrong: str, right: str) -> None:
    assert takes({"type": "number", **bounds}, wrong, right) == [right]


@pytest.mark.slow
def test_random_bounds_admit_no_value_outside() -> None:
    rnd = random.Random(5)
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    values = (0, 1, -1, 5, 0.5, -0.5, 0.001, 1.25, -1.25, 5.0001, 10)
    for _ in range(300):
        schema = {
            "type": rnd.choice(("number", "integer")),
            **{name: rnd.choice(values) for name in rnd.sample(names, 2)},
        }
        grammar = grammar_of(schema)
        if grammar is not None:
            assert not [*faults(schema, byte_walker().walks(grammar, rnd, 3, most=40))]


@pytest.mark.parametrize(
    "more",
    [
        {"patternProperties": {"^(a|b)$": {"type": "integer"}}, "additionalProperties": False},
        {"additionalProperties": {"type": "integer"}},
        {"required": ["a"], "minProperties": 3},
        {"required": ["a", "a"], "minProperties": 3},
    ],
)
def test_property_count_with_doubly_counted_name_is_refused(more: dict[str, Any]) -> None:
    assert "'minProperties'" in refusal({"type": "object", "minProperties": 2, **more})


def test_property_count_filled_by_names_is_served() -> None:
    schema = {"type": "object", "minProperties": 2, "required": ["a"]}
    assert takes(schema, '{"a":1}', '{"a":1,"b":2}') == ['{"a":1,"b":2}']


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema", "http://x.y/own"]
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_schema_of_an_older_draft_switches_no_keyword_off(draft: str, is_inner: bool) -> None:
    schema: dict[str, Any] = {
        "$schema": draft,
        "type": "object",
        "properties": {"kind": {"const": "Pod"}},
        "required": ["kind"],
    }
    found = accepted({"type": "array", "items": schema} if is_inner else schema, [{"kind": "x"}, [{"kind": "x"}]])
    assert found == []


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"]
)
def test_keyword_missing_in_older_draft_is_refused(draft: str) -> None:
    schema = {"$schema": draft, "prefixItems": [{"type": "integer"}], "items": {"type": "string"}}
    assert "'prefixItems' is not of the draft" in refusal(schema)
    assert accepts({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}, [1, "a"])


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("email", "a" * 65 + "@x.org", "a" * 64 + "@x.org"),
        ("email", "a@localhost", "a@host.example"),
        ("email", "a@[127.0.0.1]", "first.last+tag@mail.dept.univ.edu.au"),
        ("uri", "http:", "http://a"),
        ("uri", "a:?q", "a:b?q"),
        ("uri", "a:#f", "urn:a:b#f"),
    ],
)
def test_formats_exclude_texts_validators_refuse(name: str, wrong: str, right: str) -> None:
    assert accepted({"format": name}, [wrong, right]) == [right]
    assert accepted({"allOf": [{"format": name}], "type": "string", "maxLength": 80}, [wrong, right]) == [right]


@pytest.mark.parametrize(
    "reference",
    [
        "#/default",
        "#/examples/0",
        "#/contentSchema",
        "#/const",
        "#/properties",
        "#/$defs/none",
        "#there",
        "http://x.y/z",
    ],
)
def test_reference_to_non_schema_is_refused(reference: str) -> None:
    note = {"type": "string", "minLenght": 3, "format": "date"}
    schema = {"$ref": reference, "default": note, "examples": [note], "contentSchema": note, "properties": {}}
    assert "means no subschema of this schema" in refusal(schema)


@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/$defs/gr%C3%B6%C3%9Fe", {"$defs": {"größe": {"type": "integer"}}}),
        ("#/$defs/größe", {"$defs": {"größe": {"type": "integer"}}}),
        ("#/$defs/a~1b~0c%25", {"$defs": {"a/b~c%": {"type": "integer"}}}),
        ("#/properties/p/items", {"properties": {"p": {"items": {"type": "integer"}}}}),
        ("#x", {"$defs": {"a": {"$anchor": "x", "type": "integer"}}}),
        ("other", {"$id": "http://h/root", "$defs": {"a": {"$id": "other", "type": "integer"}}}),
        ("http://h/other#/$defs/b", {"$defs": {"a": {"$id": "http://h/other", "$defs": {"b": {"type": "integer"}}}}}),
        ("#/$defs/a/$defs/b", {"$defs": {"a": {"$id": "http://h/other", "$defs": {"b": {"type": "integer"}}}}}),
        ("urn:x:y#/$defs/a", {"$id": "urn:x:y", "$defs": {"a": {"type": "integer"}}}),
    ],
)
def test_reference_means_its_subschema(reference: str, more: dict[str, Any]) -> None:
    schema = (
        {**more, "type": "array", "items": {"$ref": reference}}
        if "$id" not in more
        else {**more, "items": {"$ref": reference}}
    )
    assert accepted(schema, [[1], ["a"]]) == [[1]]


def node(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"], **more}


ENDLESS: dict[str, dict[str, Any]] = {
    "itself": node(),
    "items": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
    "prefix": {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#/$defs/n"}], "minItems": 2},
    "two": {"allOf": [{"type": "object", "required": ["c"]}, {"properties": {"c": {"$ref": "#/$defs/n"}}}]},
    "either": {"anyOf": [node(), {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}]},
    "pattern": {"type": "object", "patternProperties": {"^c": {"$ref": "#/$defs/n"}}, "required": ["c"]},
    "others": {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}, "minProperties": 1},
    "through": {"$ref": "#/$defs/m"},
    "no multiple": {"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5},
    "no common multiple": {
        "allOf": [{"type": "number", "multipleOf": 0.4}, {"minimum": 0.1, "maximum": 1, "multipleOf": 0.6}]
    },
    "no constant": {"enum": [1, 2, [3]], "multipleOf": 5, "type": "integer"},
    "no inner constant": {"const": {"a": [3]}, "properties": {"a": {"items": {"multipleOf": 2}}}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_schema_without_finite_value_is_false(name: str) -> None:
    definitions = {"n": ENDLESS[name], "m": node(properties={"c": {"$ref": "#/$defs/n"}})}
    assert "no finite value satisfies it" in refusal({"$ref": "#/$defs/n", "$defs": definitions})
    optional = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "null"}},
        "$defs": definitions,
    }
    assert takes(optional, "{}", '{"b":null}') == ["{}", '{"b":null}']
    assert not begins(optional, '{"a"')
    either = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}], "$defs": definitions}
    assert takes(either, "null") == ["null"]
    assert not begins(either, "{")
    assert not begins(either, "[")
    listed = {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": definitions}
    assert takes(listed, "[]") == ["[]"]


def begins(schema: Any, text: str) -> bool:
    """True if an answer may begin with `text`."""
    grammar = CHECKER.check(Constraint.of({"json_schema": schema}), optional_space=False)
    matcher = library.compiled(grammar, library.byte_vocabulary({}, {256}), library.RUNNING)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode())


def test_conflicting_optional_property_is_omitted() -> None:
    """Neither the router nor the library refuses the schema, as long as the property is optional."""
    one = {"properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}}}
    for other in ({"type": "string"}, {"minimum": 3}, False, {"type": "integer", "multipleOf": 2, "maximum": 0}):
        schema = {"type": "object", "allOf": [one, {"properties": {"a": other}}]}
        assert takes(schema, "{}", '{"b":null}', '{"a":1}') == ["{}", '{"b":null}']


def test_recursion_with_an_end_is_served() -> None:
    tree = {"type": "object", "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["c"]}
    assert accepted(tree, [{"c": {"c": None}}, {"c": 1}]) == [{"c": {"c": None}}]
    listed = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]}
    assert accepted(listed, [{"c": [{"c": []}]}]) == [{"c": [{"c": []}]}]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"score": {"type": "integer"}}, "required": ["score"], "patternProperties": {"^score$": {}}},
        {"properties": {"a": {}, "b": {}}, "patternProperties": {"^[ab]$": {"type": "integer"}}},
        {"required": ["a"], "patternProperties": {"^a{1}$": {}}},
        {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"patternProperties": {"^a$": {}}}]},
        {
            "allOf": [{"patternProperties": {"^[^]": False}}, {"patternProperties": {"^$": False}}],
            "properties": {"a": {}},
        },
    ],
)
def test_pattern_property_shadowed_by_names_is_refused(schema: dict[str, Any]) -> None:
    assert "'patternProperties'" in refusal({"type": "object", **schema})
    closed = {"type": "object", "additionalProperties": False, **schema}
    assert grammar_of(closed) is None


@pytest.mark.parametrize("pattern", ["", ".*", "^[^]*$", "^"])
def test_pattern_matching_every_name_allows_no_other(pattern: str) -> None:
    schema: dict[str, Any] = {"type": "object", "patternProperties": {pattern: False}}
    assert takes(schema, "{}", '{"a":1}') == ["{}"]
    assert not begins(schema, '{"')
    assert takes({**schema, "patternProperties": {pattern: {"type": "null"}}}, '{"a":1}', '{"a":null}') == [
        '{"a":null}'
    ]


def test_multiples_beyond_32_bits_are_refused_together() -> None:
    both = {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}
    assert "'multipleOf' are too large" in refusal(both)
    assert accepted({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}, [12, 4, 6]) == [12]


def test_equivalent_patterns_are_refused() -> None:
    patterns = {r"^\d$": {"type": "integer"}, "^[0-9]$": {"maximum": 5}}
    assert "is another spelling of one before it" in refusal({"patternProperties": patterns})


def test_recursion_through_many_branches_is_found() -> None:
    branches = [node(properties={"c": {"$ref": "#/$defs/n"}, f"p{i}": {}}) for i in range(200)]
    assert "no finite value satisfies it" in refusal({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": branches}}})


def test_number_of_patterns_is_bounded() -> None:
    patterns: dict[str, Any] = {f"^p{i}$": {} for i in range(200)}
    assert "it has 200 patterns" in refusal({"type": "object", "patternProperties": patterns})
    names: dict[str, Any] = {f"name{i}": {} for i in range(200)}
    some = dict.fromkeys(list(patterns)[:100], True)
    assert "too many patterns of short names" in refusal({"properties": names, "patternProperties": some})


def test_control_character_in_a_name_is_refused_beside_patterns() -> None:
    schema = {"properties": {"a\x7f": {"type": "integer"}}, "patternProperties": {"^[^b]+$": {"type": "integer"}}}
    assert "a name with a control character" in refusal(schema)


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="half of a surrogate pair"):
        CHECKER.check(Constraint("json_schema", (r'{"title": "\ud800"}',)), optional_space=False)


ODD = (
    "null", "true", "0", "-1", "1e999", "1e-999999999", "0.1e-30", '"x"', '"#"', '""', "[]", "{}", "[1]", '["a"]',
    "[{}]", '{"a":1}', r'"\ud800"', "123456789012345678901234567890", '"(?=a"', r'"^[^\"]$"', '"a{99999999999}"',
    '{"$ref":"#"}', '"http://[x"', '"#/%"', "9" * 4_000, '"email"', '"uri"',
)  # fmt: skip


def test_odd_values_of_keywords_are_served_or_refused() -> None:
    rnd = random.Random(11)
    keywords = sorted(KEYWORDS)

    def odd(depth: int) -> str:
        made = []
        for keyword in rnd.sample(keywords, rnd.randint(1, 4)):
            value = odd(depth - 1) if depth and rnd.random() < 0.6 else rnd.choice(ODD)
            made.append(f'"{keyword}":{rnd.choice((value, f"[{value}]", f"{{{chr(34)}a{chr(34)}:{value}}}"))}')
        return "{" + ",".join(made) + "}"

    for _ in range(400):
        text = odd(2)
        with contextlib.suppress(InvalidFieldError):
            CHECKER.check(Constraint("json_schema", (text,)), optional_space=False)
