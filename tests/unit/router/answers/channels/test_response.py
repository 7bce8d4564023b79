"""Answers in channels against transformers' own parser: whole, in pieces, and broken."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser as Reference
from transformers.utils.chat_parsing import content_parsers as reference_values
from transformers.utils.chat_parsing.response_parser import _coerce, _schema_types

from router.answers.channels import families
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.markers import MARK, SpelledMarkers
from router.answers.channels.parser import Channel, ChannelPart, ResponseParser
from router.answers.channels.template import ResponseTemplate, ResponseTemplateError
from router.answers.channels.values import PARSERS, schema_types, typed
from tests.unit.router.answers.channels.responses import FAMILIES, NAMES, PROPERTIES, TOOLS, Family, answers, broken

TEMPLATES: Final = {family.name: ResponseTemplate(family.spec) for family in FAMILIES}
TAGS: Final = ("qwen_coder", "glm", "deepseek_v32", "deepseek_v4", "minimax")
FEW: Final = settings(max_examples=25)
MANY: Final = settings(max_examples=1500)
by_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name + ("+" if f.opening else ""))


def parser(family: Family, **options: Any) -> ResponseParser:
    options = {"tools": ToolSchemas(dict.fromkeys(NAMES, PROPERTIES)), "separates_reasoning": True, **options}
    return ResponseParser(TEMPLATES[family.name], opening=family.opening, **options)


def read(family: Family, pieces: Sequence[str]) -> list[ChannelPart]:
    """All parts, with neighbours of one channel joined."""
    reader = parser(family)
    return joined([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def joined(parts: Sequence[ChannelPart]) -> list[ChannelPart]:
    out: list[ChannelPart] = []
    for part in parts:
        if out and out[-1].channel is part.channel and out[-1].call == part.call and not part.name:
            out[-1] = out[-1]._replace(text=out[-1].text + part.text)
        else:
            out.append(part)
    return out


def text_of(parts: Sequence[ChannelPart], channel: Channel) -> str:
    return "".join(part.text for part in parts if part.channel is channel)


def calls_of(parts: Sequence[ChannelPart]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.channel is Channel.CALL and part.name:
            calls.append((part.name, part.text))
        elif part.channel is Channel.CALL:
            calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.text)
    return calls


class Regions:
    """transformers' regions of a text: reasoning, content, and calls with name and arguments."""

    def __init__(self, family: Family, text: str) -> None:
        tools = TOOLS if family.name in TAGS else None
        reference = Reference(dict(family.spec), prefix=family.opening, tools=tools)  # type: ignore[arg-type]
        _, last = [events := reference.feed(text), reference.finalize()]
        closed = [each for each in [*events, *last[1]] if each["type"] == "region_close"]
        self.reasoning = [each["value"] for each in closed if each["field"] == "thinking"]
        self.content = [each["value"] for each in closed if each["field"] == "content"]
        self.calls: list[Any] = []
        for each in closed:
            if each["field"] == "tool_calls":
                self.calls += each["value"] if isinstance(each["value"], list) else [each["value"]]


def check_equal(family: Family, text: str) -> None:
    """Checks that an answer is parsed as transformers parses it."""
    expected, parts = Regions(family, text), read(family, [text])

    assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in expected.calls
    ]
    for channel, values in ((Channel.REASONING, expected.reasoning), (Channel.CONTENT, expected.content)):
        ours = text_of(parts, channel)
        said = [value for value in values if value]
        # Between several regions the content is the model's text.
        assert ours.split() == " ".join(said).split()
        assert len(said) != 1 or ours == said[0]


def check_broken(family: Family, text: str) -> None:
    """Checks that parsing loses no text and finds all calls that transformers finds."""
    parts = read(family, [text])
    ours = calls_of(parts)
    everything = "".join(part.name + part.text for part in parts)
    for word in re.findall(r"w\d{3}", text.removeprefix(family.opening)):
        assert word in everything, (text, parts)
    try:
        expected = Regions(family, text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    found = [(name, json.loads(arguments)) for name, arguments in ours if _is_json(arguments)]
    for call in expected.calls:
        function = call["function"] if isinstance(call["function"], dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(arguments, dict) or (family.name in TAGS and not arguments) or name not in NAMES:
            continue
        if family.name in TAGS and len(found) < len(ours):
            # A text other than a tag followed it, up to the end.
            continue
        assert (name, arguments) in found, (text, parts)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_pieces(family: Family, text: str, cuts: Sequence[int]) -> None:
    """Checks that the parts and their positions do not depend on how a text is cut."""
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    reader = parser(family)
    out: list[ChannelPart] = []
    for start, end in pairwise(ends):
        out += reader.push(text[start:end])
        assert joined(out) == joined(parser(family).push(text[:end])), text[:end]
    assert joined([*out, *reader.finish()]) == read(family, [text])
    by_character = parser(family)
    assert joined([p for c in text for p in by_character.push(c)] + by_character.finish()) == read(family, [text])


def test_every_family_is_compared() -> None:
    assert {family.name for family in FAMILIES} == set(families.SPECS)


@by_family
@FEW
@given(data=st.data())
def test_written_answer_is_parsed_like_transformers(family: Family, data: st.DataObject) -> None:
    check_equal(family, family.write(data.draw(answers(family))))


@by_family
@FEW
@given(data=st.data())
def test_broken_answer_loses_no_text(family: Family, data: st.DataObject) -> None:
    check_broken(family, data.draw(broken(family)))


@by_family
@FEW
@given(data=st.data(), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_parsing_is_independent_of_pieces(family: Family, data: st.DataObject, cuts: list[int]) -> None:
    check_pieces(family, data.draw(broken(family)), cuts)


@pytest.mark.long
@by_family
@MANY
@given(data=st.data(), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_thousands_of_answers(family: Family, data: st.DataObject, cuts: list[int]) -> None:
    text = data.draw(broken(family))
    check_equal(family, family.write(data.draw(answers(family))))
    check_broken(family, text)
    check_pieces(family, text, cuts)


# Features of families in transformers' own tests beyond those above, with made-up delimiters.
GEMMA_LIKE: Final = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
COHERE_LIKE: Final = {
    "start_anchor": "<bot>",
    "fields": {
        "content": {"open": "<answer>", "close": "</answer>"},
        "thinking": {"open": "<hm>", "close": "</hm>", "content_args": {"strip": False}},
        "tool_calls": {
            "open": "<act>",
            "close": "</act>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
ERNIE_LIKE: Final = {
    "start_anchor": "Assistant:",
    "fields": {
        "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
    },
}
LINES: Final = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+)\n",
            "close_pattern": r"\n@end",
            "repeats": True,
            "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
CALL_LIST: Final = {
    "start_anchor": "A:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\A(?=\[)",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (GEMMA_LIKE, '<|channel>thought\nhm<channel|>Sure.<|tool_call>call:f{a: <|"|>"x": 1<|"|>, n: 2}<tool_call|>'),
        (GEMMA_LIKE, "plain<turn|>"),
        (COHERE_LIKE, '<hm> so </hm><act>[{"tool_name": "f", "parameters": {"a": 1}}]</act>'),
        (COHERE_LIKE, "<hm>a</hm><answer>b</answer>"),
        (ERNIE_LIKE, "hm\n</think>\n\n<response>\nwell\n</response>\n"),
        (LINES, "see @f\na: 1\nb: x:y\nc\n@end"),
        (CALL_LIST, "[f(a='x', n=-2.5e1), g(o={'k': [1, None, True]})]"),
        (CALL_LIST, "no calls"),
    ],
)  # fmt: skip
def test_templates_of_checkpoints_are_read_as_transformers_reads_them(spec: dict[str, Any], text: str) -> None:
    reference = Reference(spec, prefix="")
    reference.feed(text)
    expected, _ = reference.finalize()
    calls = expected.get("tool_calls", [])
    reader = ResponseParser(ResponseTemplate(spec), tools=ToolSchemas({"f": {}, "g": {}}), separates_reasoning=True)
    parts = [part for char in text for part in reader.push(char)] + reader.finish()

    assert text_of(parts, Channel.REASONING) == expected.get("thinking", "")
    assert text_of(parts, Channel.CONTENT) == expected.get("content", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(parts)] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


@pytest.mark.parametrize(
    "spec",
    [
        [],
        {},
        {"fields": {"content": {}}},
        {"start_anchor": "a", "fields": {}},
        {"start_anchor": "a", "version": 2, "fields": {"content": {}}},
        {"start_anchor": "a", "start_anchor_pattern": "a", "fields": {"content": {}}},
        {"start_anchor": "a", "other": 1, "fields": {"content": {}}},
        {"start_anchor": "a", "fields": {"content": {"other": 1}}},
        {"start_anchor": "a", "fields": {"content": {"open": ""}}},
        {"start_anchor": "a", "fields": {"content": {"open": []}}},
        {"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}},
        {"start_anchor": "a", "fields": {"content": {"open_pattern": "(?P<name>a)"}}},
        {"start_anchor": "a", "fields": {"content": {"content": "yaml"}}},
        {"start_anchor": "a", "fields": {"content": {}, "thinking": {}}},
        {"start_anchor": "a", "fields": {"content": {"transform_each": True}}},
        {"start_anchor": "a", "fields": {"content": {"transform": "a {content}"}}},
        {"start_anchor": "a", "fields": {"content": {"join": 1, "repeats": True}}},
    ],
)
def test_template_transformers_refuses_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Reference(spec, prefix="")
    with pytest.raises(ResponseTemplateError):
        ResponseTemplate(spec)


_DIALECTS: Final = [
    ("json", {}, '{"a": 1}'),
    ("json", {"allow_non_json": True}, " x "),
    ("json", {}, "x"),
    ("json", {"unquoted_keys": True}, '{a: "b, c: d", "e": 1, f:2}'),
    ("json", {"string_delims": [["<<", ">>"]]}, '{"a": <<x"y>>, "b": <<z>>}'),
    ("json", {"string_delims": [["<<", ">>"]]}, '{"a": "\x01"}'),
    ("text", {"strip": False}, " a "),
    ("int", {}, " 3 "),
    ("int", {}, "x"),
    ("float", {}, "2.5"),
    ("bool", {}, " TRUE"),
    ("xml-inline", {}, "x"),
    ("xml-inline", {"tag_pattern": r"<(?P<key>\w)>(?P<value>.)", "merge_duplicates": True}, "<a>1<b>2<a>3<a>4"),
    ("xml-inline", {"tag_pattern": r"<(?P<key>\w)>(?P<value>.)", "value_parser": {"name": "int"}}, "<a>1<b>2"),
    ("xml-inline", {"tag_pattern": r"<(\w)>"}, "<a>1"),
    ("kv-lines", {"line_sep": ";", "kv_sep": "="}, "a=1; b = 2=3 ;c;"),
    *(
        ("python-call-list", {}, text)
        for text in (
            "[]", " [f()] ", "[f(a=1,)]", "[f(1)]", "[f(a=1, a=2)]", "[f(a='\\u0041\\n\\ud83d\\ude00')]",
            "[f(a='\\ud83d')]", "[f(a='\\x')]", "[f(a=True, b=null, c=-0.5e3)]", "[f(a=1e999)]",
            "[f(a=9007199254740992)]",
            "[f(a=" + "[" * 101 + "]" * 101 + ")]", "[f(a=[[1], {'k': 'v'}])]", "[f(a={'k': 1, 'k': 2})]", "[f(a=x)]",
            "[f(a=1)] x", "[get.weather-2(a='it\\'s')]", "[f(a='\n')]", "[f(a=1) g()]",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "text"), _DIALECTS)
def test_parsed_values_equal_transformers(name: str, arguments: dict[str, Any], text: str) -> None:
    try:
        expected = reference_values.parse_content(text, name, arguments)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            PARSERS[name](text, arguments)
    else:
        assert PARSERS[name](text, arguments) == expected


@given(
    raw=st.one_of(
        st.sampled_from(["3.0", "3", "true", "None", "null", "1e400", "nan", "[1]", "{}", ""]), st.text(max_size=4)
    ),
    schema=st.recursive(
        st.fixed_dictionaries({}, optional={
            "type": st.one_of(st.sampled_from(["integer", "number", "boolean", "null", "object", "array", "string"]),
                              st.lists(st.sampled_from(["integer", "null", "boolean"]), max_size=2)),
            "nullable": st.booleans(),
        }),
        lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=2)}),
        max_leaves=3,
    ),
)  # fmt: skip
def test_arguments_get_types_as_in_transformers(raw: str, schema: dict[str, Any]) -> None:
    types = schema_types(schema)

    assert types == _schema_types(schema)
    assert repr(typed(raw, types)) == repr(_coerce(raw, types))


def test_call_parts_begin_with_name_then_stream() -> None:
    reader = parser(FAMILIES[0])
    steps = ["<tool_call>", '{"name": "f"', ', "arguments": ', '{"a": ', "1}", "}", "</tool_call>"]

    assert [reader.push(step) for step in steps] == [
        [],
        [],
        [],
        [ChannelPart(Channel.CALL, '{"a": ', 0, "f")],
        [ChannelPart(Channel.CALL, "1}", 0)],
        [],
        [],
    ]
    assert reader.ends_with_call


# Arguments in the model's answer, and the object that the client receives; None if the call is content.
OTHER_ARGUMENTS: Final = (
    ("null", "{}"),
    (r'"{\"a\": 1}"', '{"a": 1}'),
    (r'"{\"a\": \"\u00e9\"}"', '{"a": "\u00e9"}'),
    ('"{}"', "{}"),
    ('"no object"', None),
    ('"[1]"', None),
    ("nil", None),
    ("[1]", None),
    ("7", None),
)


@pytest.mark.parametrize(("written", "given"), OTHER_ARGUMENTS)
@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("qwen", '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'),
        ("qwen", '<tool_call>{{"arguments": {}, "name": "f"}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{{"name": "f", "arguments": {}}}]'),
        ("llama", '{{"name": "f", "parameters": {}}}'),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("mistral_named", "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_arguments_null_or_in_a_string_are_read(name: str, around: str, written: str, given: str | None) -> None:
    """`null` and JSON objects in a string are arguments; with other values the whole text is content."""
    family = next(each for each in FAMILIES if each.name == name)
    text = around.format(written)

    parts = read(family, [text])

    assert calls_of(parts) == ([] if given is None else [("f", given)])
    assert text_of(parts, Channel.CONTENT) == (text if given is None else "")
    check_pieces(family, text, list(range(len(text))))


def test_whole_calls_with_arguments_in_a_string_are_read() -> None:
    spec = {**families.QWEN, "fields": {**families.QWEN["fields"]}}
    spec["fields"]["tool_calls"] = {**spec["fields"]["tool_calls"], "content_args": {"unquoted_keys": True}}
    parser = ResponseParser(ResponseTemplate(spec), tools=ToolSchemas({"f": {}}), separates_reasoning=True)

    parts = parser.push(r'<tool_call>{name: "f", arguments: "{\"a\": 1}"}</tool_call>') + parser.finish()

    assert calls_of(parts) == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "had", "ends"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', False, False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', True, False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', True, True),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> more', True, False),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>', True, False),
        ("<tool_call>nothing</tool_call>", False, False),
    ],
)
def test_parser_reports_calls_read(text: str, had: bool, ends: bool) -> None:
    reader = parser(FAMILIES[0])
    reader.push(text)

    assert (reader.has_had_call, reader.ends_with_call) == (had, ends)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}'),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"'),
        ("a<tool_call>b</tool_call>c", "a<tool_call>b</tool_call>c"),
        ('<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', "and more"),
        ('<tool_call>{"name": "f", "arguments": {"a": ', ""),
    ],
)  # fmt: skip
def test_malformed_call_is_content(text: str, content: str) -> None:
    assert text_of(read(FAMILIES[0], [text]), Channel.CONTENT).strip() == content


def test_without_tools_or_reasoning_their_delimiters_are_text() -> None:
    text = '<think>x</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = parser(FAMILIES[0], tools=None, separates_reasoning=False)

    assert joined(reader.push(text) + reader.finish()) == [ChannelPart(Channel.CONTENT, text)]


def test_json_alone_is_a_call_of_a_known_tool_only() -> None:
    llama = next(family for family in FAMILIES if family.name == "llama")
    for name, is_call in (("f", True), ("unknown", False)):
        text = json.dumps({"name": name, "parameters": {}})
        assert calls_of(read(llama, [text])) == ([(name, "{}")] if is_call else [])
        assert text_of(read(llama, [text]), Channel.CONTENT) == ("" if is_call else text)


def test_template_finds_opening_in_prompt() -> None:
    template = TEMPLATES["qwen"]

    assert template.opening("<|im_start|>user\n<think>a<|im_end|>\n<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert template.opening("no turn at all") == ""


@given(
    tokens=st.lists(st.sampled_from(["<a>", "<a", ">", "<", "a>", "x", "<<a>", "</a>", "/"]), max_size=8),
    real=st.lists(st.booleans(), min_size=8, max_size=8),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_only_spelled_delimiters_are_marked(tokens: list[str], real: list[bool], cuts: list[int]) -> None:
    markers = SpelledMarkers(["<a>", "</a>"])
    places, text = set(), ""
    for token, is_token in zip(tokens, real, strict=False):
        is_marker = is_token and token in ("<a>", "</a>")
        markers.announce(token, marker=token if is_marker else "")
        places |= {len(text)} if is_marker else set()
        text += token
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    marked = "".join(markers.mark(text[start:end]) for start, end in pairwise(ends))

    assert marked.replace(MARK, "") == text
    whole = {len(marked[: m.start()].replace(MARK, "")) for m in re.finditer("<a>|</a>", marked)}
    assert whole == {place for place in places if text.startswith(("<a>", "</a>"), place)}


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (r"<(?P<key>\w+)>(?P<value>.*?)</\w>", "<k>a</x> </y>"),
        (r"(?i)<(?P<key>\w+)>(?P<value>.*?)</P>", "<k>a</p> </P>"),
        (r"<(?P<key>\w+)>(?P<value>[^<]*)(?:</a>|</b>)", "<k>a</b>"),
        (r"<(?P<key>\w+)>(?P<value>.*?)\|>", "<k>a|b|>"),
    ],
)
def test_tag_pattern_argument_equals_pattern_match(tag: str, text: str) -> None:
    """Whole and character by character, with texts that contain a part of the end pattern."""
    field = {**families.GLM["fields"]["tool_calls"], "content_args": {"tag_pattern": tag}}
    template = ResponseTemplate({**families.GLM, "fields": {"tool_calls": field, "content": {}}})
    whole = f"<tool_call>f {text}</tool_call>"
    expected = json.dumps({"k": regex.search(tag, text)["value"]})
    for pieces in ([whole], [*whole]):
        reader = ResponseParser(template, tools=ToolSchemas({"f": {}}), separates_reasoning=True)
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert calls_of(parts) == [("f", expected)]
