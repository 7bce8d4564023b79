"""Response templates that checkpoints bring: what grammars make of them, and what they name as in the way."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import jsonschema
import pytest
import regex
from transformers.utils.chat_parsing import parse_response

from common.constraints import big_stack, lark, library
from common.constraints.forms import GRAMMAR, Constraint
from router.answers.channels import arguments
from router.answers.channels.families import SPECS
from router.answers.channels.grammar import AnswerGrammar, CalledTool, Thinking
from router.answers.channels.own_styles import StyleError, own_calls, own_style, reads
from router.answers.channels.spelling import MOST_TEXTS, PatternError, spelled
from router.answers.channels.template import ResponseTemplate
from tests.unit.router.answers.channels.test_response_grammar import EOS, SCHEMA, TAGGED, allowed

NAMED: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Of no family: an arrow, the name before the token, and JSON under a key of its own.
INVENTED: Final[dict[str, Any]] = {
    "start_anchor": "<bot>",
    "fields": {
        "reasoning_content": {"open_pattern": r"<mull(?: deep)?>\s*", "close": "</mull>"},
        "tool_calls": {
            "open_pattern": r"<do>(?:run|call)\s+(?P<name>[\w.-]+)(?: \#(?P<id>\d+))?\s*=>",
            "close_pattern": r"\s*</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content.with}"}},
        },
        "content": {"close": "<bye>"},
    },
}
MARKERS: Final = {EOS + 1 + i: name for i, name in enumerate(("<mull>", "</mull>", "<do>", "</do>", "<bye>"))}


def tags(**changes: Any) -> dict[str, Any]:
    """An invented form with each argument on its own, in tags that are tokens."""
    made = deepcopy(INVENTED)
    made["fields"]["tool_calls"] |= {
        "open_pattern": r"<do>(?P<name>[^\s<]+)",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<mull>(?P<key>\w+): \s*(?P<value>.*?)\s*<bye>", **changes},
        "transform": NAMED,
    }
    del made["fields"]["reasoning_content"], made["fields"]["content"]["close"]
    return made


def grammar_of(spec: Mapping[str, Any]) -> AnswerGrammar:
    template = ResponseTemplate(spec)
    style = own_calls(template, MARKERS.values(), own_style(template, MARKERS.values()))
    return AnswerGrammar(style, MARKERS, frozenset({EOS}))


def answers(grammar: str, count: int) -> list[str]:
    """Texts of answers at random, that the grammar lets end."""
    vocab = library.byte_vocabulary({**MARKERS, EOS: "<eos>"}, [EOS])
    made = lark.canonical(Constraint(GRAMMAR, (grammar,)))
    matcher = big_stack.begin(lambda: library.compiled(made, vocab, library.RUNNING), "test").result()
    assert not matcher.is_error(), matcher.get_error()
    return [text for seed in range(count) if (text := _answer(matcher.deep_copy(), random.Random(seed))) is not None]


def _answer(matcher: library.Matcher, draw: random.Random) -> str | None:
    ids: list[int] = []
    for _ in range(600):
        every = allowed(matcher)
        may = [i for i in every if i >= EOS or 0x20 <= i < 0x7F] or every
        liked = [i for i in may if i >= EOS or i in b'"}],']
        ids.append(draw.choice(liked if liked and draw.random() < 0.7 else may))
        if ids[-1] == EOS:
            return b"".join(MARKERS.get(i, "").encode() or bytes([i]) for i in ids[:-1]).decode()
        assert matcher.try_consume_tokens([ids[-1]]) == 1
    return None


def calls_of(spec: Mapping[str, Any], text: str, schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The calls that transformers reads, where nothing else is read."""
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "other-1")]
    message = parse_response(text, dict(spec), prefix="", tools=tools)  # type: ignore[arg-type]
    assert set(message) <= {"tool_calls", "reasoning_content"}, message
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.mark.parametrize("has_reasoning", [True, False])
def test_an_invented_form_is_held(has_reasoning: bool) -> None:
    spec = deepcopy(INVENTED)
    if not has_reasoning:
        del spec["fields"]["reasoning_content"]
    grammar = grammar_of(spec)
    assert (grammar.tells_calls, grammar.ends_reasoning) == (True, has_reasoning)
    tools = [CalledTool(name, json.dumps(SCHEMA)) for name in ("look", "other-1")]
    thinking = Thinking() if has_reasoning else None
    found = answers(grammar.calls(tools, thinking, is_required=True, is_one=False), 40)
    assert len(found) > 10
    for text in found:
        calls = calls_of(spec, text, SCHEMA)
        assert calls
        for name, given in calls:
            assert name in ("look", "other-1")
            jsonschema.validate(given, SCHEMA)
    assert any("<mull>" in text for text in found) == has_reasoning
    # Each spelling of an optional part is the model's own choice.
    assert {part for part in ("run", "call", " #") if any(part in text for text in found)} == {"run", "call", " #"}


@pytest.mark.parametrize("values", [{}, {"value_parser": {"name": "json"}}, {"value_parser": {"name": "text"}}])
def test_invented_tags_are_held(values: dict[str, Any]) -> None:
    spec = tags(**values)
    grammar = grammar_of(spec)
    held = arguments.strict(TAGGED, grammar.tags)
    tools = [CalledTool(name, "", held) for name in ("look", "other-1")]
    found = answers(grammar.calls(tools, None, is_required=True, is_one=False), 60)
    assert len(found) > 10
    for text in found:
        for _, given in calls_of(spec, text, TAGGED):
            jsonschema.validate(given, TAGGED)


def changed(**calls: Any) -> dict[str, Any]:
    made = deepcopy(INVENTED)
    made["fields"]["tool_calls"] |= calls
    return {
        **made,
        "fields": {**made["fields"], "tool_calls": {k: v for k, v in made["fields"]["tool_calls"].items() if v}},
    }


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (changed(content="kv-lines", transform=NAMED), "content 'kv-lines'"),
        (changed(content="python-call-list", transform="{content}"), "no places for name and arguments"),
        (changed(close_pattern=r"</do>|;;"), "whose close is not a token"),
        (changed(open_pattern=r"<do>(?P<name>\w+)(?P<x>a)\g<x>"), r"'\g'"),
        (changed(open_pattern=r"(?i:<do>)(?P<name>\w+)"), "'(?i:'"),
        (changed(open_pattern=r"<do>\w+(?P<name>\w+)"), "a name that has no border"),
        (changed(open_pattern=r"<do>(?P<name>\w+)" + "(?:a|b)?" * 8), f"more than {MOST_TEXTS} alternatives"),
        (changed(open_pattern=r"<do>(?P<name>q\w+)"), "not read as such where they stand alone"),
        (changed(transform={"function": {"name": "{content.n}", "arguments": "{content}"}}), "name stands in their"),
        (
            changed(transform={"function": {"name": "{name}", "arguments": "{content.a}", "id": "{content.id}"}}),
            "takes {content.id} as well",
        ),
        (changed(content_args={"string_delims": [["<<", ">>"]]}), "string_delims that are not tokens"),
        (tags(tag_pattern=r"<mull>(?P<key>\w+):(?P<value>\d+)<bye>"), "behind it the value '.*?'"),
        (tags(tag_pattern=r"<mull>(?P<key>\w+):(?P<value>.*?)(?:<bye>|;)"), "one of several texts that are not tokens"),
        (tags(value_parser={"name": "kv-lines"}), "arguments of content 'kv-lines'"),
    ],
)
def test_what_is_in_the_way_is_named(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(StyleError) as refused:
        grammar_of(spec)
    assert said in str(refused.value)


def test_names_that_the_reader_would_not_find_are_known() -> None:
    template = ResponseTemplate(tags())
    style = own_calls(template, MARKERS.values(), own_style(template, MARKERS.values()))
    assert reads(template, style, "look", ["a", "b_2"])
    assert not reads(template, style, "look", ["a b"])
    assert not reads(template, style, "lo ok", [])


@pytest.mark.parametrize("spec", [*SPECS.values(), INVENTED, tags()])
def test_texts_of_a_pattern_match_it(spec: Mapping[str, Any]) -> None:
    places = {"{blanks}": " \n", "{word}": "x_1", "{digits}": "10", "{first}": "", "{last}": ""}
    for field in ResponseTemplate(spec).fields.values():
        for delimiter in (field.open, field.close):
            if delimiter is None or "(?=" in delimiter.pattern.pattern:
                continue
            texts = spelled(delimiter.pattern.pattern, {"name": "look"}).texts
            assert texts
            for text in texts:
                filled = regex.sub(r"\{\w+\}", lambda match: places.get(match[0], match[0]), text)
                assert delimiter.pattern.fullmatch(filled), filled


@pytest.mark.parametrize("pattern", [r"\1", r"(?P=name)", r"a\N{DASH}", r"(?(1)a|b)", r"(?:ab|c){3}"])
def test_constructs_without_texts_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        spelled(pattern, {})
