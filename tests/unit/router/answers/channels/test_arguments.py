"""Arguments between tags with references, patterns, formats, lengths or several types.

Whatever the grammar lets a model write is read as a value that satisfies its schema, and the grammar accepts valid
texts.
"""

from __future__ import annotations

import json
from typing import Any, Final

import jsonschema
import pytest
from fissile.v1 import inference_pb2 as pb
from transformers.utils.chat_parsing.response_parser import _schema_types

from common.constraints import big_stack, lark, library
from common.constraints.formats import FORMATS
from common.constraints.forms import Constraint
from router.answers.channels import arguments, raw_texts
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.grammar import STYLES, AnswerGrammar, CalledTool
from router.answers.channels.parser import Channel
from router.answers.channels.schema_types import types_of
from router.answers.tools import declared, template_tools
from tests.unit.router.answers.channels.test_response_grammar import EOS, Model, walked

DEFS: Final = {
    "n": {"type": "integer", "minimum": 0, "maximum": 99},
    "color": {"enum": ["red", "green"]},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "tree": {
        "type": "object",
        "properties": {"kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
    },
    "deep": {"$ref": "#/$defs/color"},
}
# Values that the grammar of each argument must accept, and others that it must refuse.
ARGUMENTS: Final[dict[str, tuple[dict[str, Any], list[str], list[str]]]] = {
    "ref": ({"$ref": "#/$defs/n"}, ["7", "99"], ["100", "x", "-1"]),
    "ref of text": ({"$ref": "#/$defs/deep"}, ["red"], ["blue", ""]),
    "ref beside": ({"$ref": "#/$defs/code", "maxLength": 5, "title": "T"}, ["AB-12"], ["AB-123", "ab-1"]),
    "ref to itself": ({"$ref": "#/$defs/tree"}, ['{"kids": [{}]}'], ["{]", '{"kids": 1}']),
    "ref to a place": ({"$ref": "#/properties/ref"}, ["7"], ["700"]),
    "all of": ({"allOf": [{"$ref": "#/$defs/code"}, {"minLength": 6}]}, ["AB-123"], ["AB-1"]),
    "nullable": ({"anyOf": [{"type": "string", "minLength": 6}, {"type": "null"}]}, ["abcdef", "null"], ["abc", ""]),
    "any": ({"type": ["string", "integer", "null"]}, ["a", "5", "", "</x"], []),
    "either": ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, ["5", "null"], ["a", "100"]),
    "mixed": ({"anyOf": [{"enum": ["a", "b"]}, {"type": "boolean"}]}, ["a", "true"], ["c", "null"]),
    "choices": ({"enum": ["a", "b\nc", 3, None]}, ["a", "b\nc", "3", "null"], ["4", "c"]),
    "found": ({"type": "string", "pattern": '["}]c*|^x'}, ['a"b', "x", "\n}"], ["ab", "ax"]),
    "ends": ({"type": "string", "pattern": r'^\w$|["}]$'}, ["a", 'é"', "- }"], ["é", "ab", '" ']),
    "both": ({"type": "string", "pattern": "a", "format": "uuid"}, ["a" * 8 + "-aaaa" * 3 + "-" + "0" * 12], ["a"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["é\n", "abc"], ["a", "abcd"]),
}
ROOT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {name: schema for name, (schema, _, _) in ARGUMENTS.items()},
    "additionalProperties": False,
    "$defs": DEFS,
}
MODELS: Final = [Model("glm"), Model("deepseek_v32"), Model("qwen_coder")]
by_model = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.family)


def schema_of(name: str) -> dict[str, Any]:
    return {
        **ROOT,
        "properties": {name: ROOT["properties"][name], "ref": ROOT["properties"]["ref"]},
        "required": [name],
    }


def tools_of(schema: dict[str, Any]) -> ToolSchemas:
    """The tool schemas that a router makes."""
    given = [pb.Tool(name=name, parameters_json=json.dumps(schema)) for name in ("look", "other")]
    made = template_tools(pb.ChatRequest(tools=given))
    assert made is not None
    return declared(made)


def grammar_of(model: Model, schema: dict[str, Any]) -> str:
    held = arguments.strict(schema, model.grammar.tag_end)
    return model.grammar.calls([CalledTool("look", "", held)], None, is_required=True, is_one=True)


def written(model: Model, name: str, text: str) -> list[int]:
    """Tokens of a call with one argument."""
    style = STYLES[model.family]
    key = style.key.replace("{key}", name)
    call = (
        style.begins[0].replace("{name}", "look")
        + key
        + text
        + style.value_after
        + style.key_end
        + style.key_after
        + style.end
    )
    ids: list[int] = []
    call = style.before + call + style.after
    while call:
        token = next((i for i, marker in model.markers.items() if call.startswith(marker)), None)
        ids += [*call[0].encode()] if token is None else [token]
        call = call[1:] if token is None else call[len(model.markers[token]) :]
    return ids


@pytest.mark.each_value
@by_model
@pytest.mark.parametrize("name", ARGUMENTS)
def test_written_arguments_satisfy_schema(model: Model, name: str) -> None:
    if model.grammar.tag_end and name == "ref to itself":
        with pytest.raises(arguments.ArgumentError):
            arguments.strict(schema_of(name), model.grammar.tag_end)
        return
    schema, count = schema_of(name), 0
    matcher, tools = model.matcher(grammar_of(model, schema)), tools_of(schema)
    for seed in range(90):
        if count == 3:
            break
        ids = walked(model, matcher.deep_copy(), seed)
        if ids is None:
            continue
        calls = [part for part in model.read(ids, tools=tools) if part.channel is Channel.CALL]
        assert [call.name for call in calls if call.name] == ["look"]
        jsonschema.validate(json.loads("".join(call.text for call in calls)), schema)
        count += 1
    # With spelled tags the random walk rarely finds the end of such a text.
    assert count or (name == "ends" and model.grammar.tag_end)


@by_model
@pytest.mark.parametrize("name", ARGUMENTS)
def test_grammar_accepts_exactly_valid_arguments(model: Model, name: str) -> None:
    if model.grammar.tag_end and name == "ref to itself":
        return
    _, right, wrong = ARGUMENTS[name]
    matcher = model.matcher(grammar_of(model, schema_of(name)))
    kinds = ("true", "false") if model.family == "deepseek_v32" else ("",)
    for text in [*right, *wrong]:
        may = False
        for kind in kinds:
            ids = [i for i in written(model, name, text) if i != EOS]
            if kind:
                flat = json.dumps(ids)
                ids = json.loads(flat.replace(json.dumps([*b"{is_text}"])[1:-1], json.dumps([*kind.encode()])[1:-1]))
            own = matcher.deep_copy()
            may |= own.try_consume_tokens(ids) == len(ids) and own.is_accepting()
        assert may == (text in right), (name, text)


@pytest.mark.parametrize("name", FORMATS)
def test_tag_formats_equal_json_formats(name: str) -> None:
    """Every text written between tags matches the library's own grammar of the format, and some texts are written."""
    assert set(raw_texts.FORMATS) == set(FORMATS)
    vocab = library.byte_vocabulary({EOS: "<eos>"}, [EOS])

    def compiled(text: str) -> library.Matcher:
        made = big_stack.begin(lambda: library.compiled(text, vocab, library.RUNNING), "test").result()
        assert not made.is_error(), made.get_error()
        return made

    raw = compiled(f"{lark.HEADER}start: VALUE\nVALUE: {raw_texts.FORMATS[name]}\n")
    ours = compiled(lark.canonical(Constraint("json_schema", (json.dumps({"type": "string", "format": name}),))))
    model = Model("qwen")
    texts = [bytes(ids[:-1]) for seed in range(60) if (ids := walked(model, raw.deep_copy(), seed, most=300))]
    assert len(texts) > 3
    for text in texts:
        quoted = [*b'"', *text, *b'"']
        assert ours.deep_copy().try_consume_tokens(quoted) == len(quoted), text


def test_reader_types_arguments_through_references() -> None:
    tools = tools_of(ROOT)
    said = {
        "ref": "7",
        "ref of text": "red",
        "either": "null",
        "nullable": "null",
        "any": "5",
        "mixed": "true",
        "found": "5",
    }
    assert tools.typed("look", said) == {
        **{"ref": 7, "ref of text": "red", "either": None, "nullable": None, "any": 5, "mixed": True, "found": "5"}
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "nullable": True},
        {"anyOf": [{"type": "boolean"}, {"type": "integer"}]},
        {"type": ["number", "string"]},
        {"oneOf": [{"type": "null"}, {"type": "array"}], "nullable": True},
        {"type": 5, "anyOf": 7},
        {},
        True,
    ],
)
def test_direct_schema_types_equal_transformers(schema: Any) -> None:
    if isinstance(schema, dict) and not isinstance(schema.get("anyOf"), int):
        assert types_of(schema, {}) == _schema_types(schema)
    else:
        assert types_of(schema, {}) == ()


def test_unbounded_schema_is_refused_at_once() -> None:
    grows = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 3} for i in range(14)}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**grows, "d14": {"type": "string"}},
    }
    with pytest.raises(arguments.ArgumentError, match="too many"):
        arguments.strict(schema, "")
    assert AnswerGrammar(STYLES["glm"], {}, frozenset()).tag_end == "</arg_value>"
    assert tools_of(schema).typed("look", {"a": "5"}) == {"a": "5"}
