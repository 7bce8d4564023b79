"""Grammars of calls and reasoning: any text that they accept is parsed as they promise."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jsonschema
import numpy as np
import pytest

from common.constraints import big_stack, lark, library
from common.constraints.forms import GRAMMAR, Constraint
from router.answers.channels import arguments
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.families import SPECS
from router.answers.channels.grammar import STYLES, AnswerGrammar, CalledTool, CallStyle, ReasoningLimit
from router.answers.channels.markers import SpelledMarkers
from router.answers.channels.parser import Channel, ChannelPart, ResponseParser
from router.answers.channels.template import ResponseTemplate

EOS: Final = 300
MARKERS: Final = {
    family: (*(style.reasoning if "think" in style.reasoning[1].lower() else ()), *style.delimiters)
    for family, style in STYLES.items()
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}, "s": {"enum": ["a", "b"]}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
}
# Arguments between tags: the type says whether one is a string.
TAGGED: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "n": {"$ref": "#/$defs/n", "type": "integer"},
        "s": {"type": "string", "enum": ["a", "b\n</x>"]},
        "t": {"type": "string", "maxLength": 3, "minLength": 1},
        "free": {"type": "string"},
        "o": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
        "x": {"type": ["number", "null"], "maximum": 5, "minimum": -5},
        "f": {"type": "boolean"},
    },
    "required": ["n", "t", "o"],
    "additionalProperties": False,
    "$defs": SCHEMA["$defs"],
}
# Arguments whose text could look like a tag.
SPELLED: Final[dict[str, Any]] = {
    **TAGGED,
    "properties": {
        **{name: TAGGED["properties"][name] for name in ("n", "free", "x", "f")},
        "s": {"type": "string", "enum": ["a", "\nb\n"]},
    },
    "required": ["n", "s"],
}
NAMES: Final = ("look", "other")


@dataclass(frozen=True)
class Model:
    """A vocabulary of single bytes, with or without delimiter tokens, and the family's form."""

    family: str
    with_tokens: bool = True

    @property
    def style(self) -> CallStyle:
        return STYLES[self.family]

    @property
    def markers(self) -> Mapping[int, str]:
        names = [name for name in MARKERS[self.family] if self.with_tokens or "think" not in name]
        return {EOS + 1 + i: name for i, name in enumerate(names)}

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({EOS, *(i for i, name in self.markers.items() if name == "<|call|>")})

    @property
    def grammar(self) -> AnswerGrammar:
        return AnswerGrammar(self.style, self.markers, self.ends)

    @property
    def schema(self) -> dict[str, Any]:
        if self.grammar.has_json:
            return SCHEMA
        return SPELLED if self.grammar.tag_end else TAGGED

    def tools(self, *, strict: bool) -> list[CalledTool]:
        if self.grammar.has_json:
            return [CalledTool(name, json.dumps(SCHEMA) if strict else "") for name in NAMES]
        held = arguments.strict(self.schema, self.grammar.tag_end) if strict else arguments.declared(self.schema)
        return [CalledTool(name, "", held) for name in NAMES]

    def matcher(self, text: str) -> library.Matcher:
        return self.compiled(lark.canonical(Constraint(GRAMMAR, (text,))))

    def compiled(self, made: str) -> library.Matcher:
        special = {**self.markers, EOS: "<eos>"}
        vocab = library.byte_vocabulary(special, self.ends)
        matcher = big_stack.begin(lambda: library.compiled(made, vocab, library.RUNNING), "test").result()
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def read(self, ids: Sequence[int], opening: str = "", tools: ToolSchemas | None = None) -> list[ChannelPart]:
        """The parts of an answer, as a router reads it."""
        template = ResponseTemplate(SPECS[self.family])
        tools = tools or ToolSchemas(dict.fromkeys(NAMES, self.schema["properties"]))
        parser = ResponseParser(template, tools=tools, separates_reasoning=True, opening=opening)
        # All text here is ASCII except delimiters, which are spelled if they are not tokens.
        text = b"".join(self.markers.get(i, "").encode() or bytes([i]) for i in ids[:-1]).decode()
        spelled = SpelledMarkers(self.markers.values())
        for token_id in ids[:-1]:
            if token_id in self.markers:
                spelled.announce(self.markers[token_id], marker=self.markers[token_id])
            elif token_id < 0x80:
                spelled.announce(chr(token_id))
        return [*parser.push(spelled.mark(text)), *parser.finish(token=self.markers.get(ids[-1], ""))]


def allowed(matcher: library.Matcher) -> list[int]:
    """Ids that the grammar allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    return found


def walked(model: Model, matcher: library.Matcher, seed: int, most: int = 500) -> list[int] | None:
    """Tokens of a random answer that prefers end tokens; None if it does not end."""
    style, draw, ids = STYLES[model.family], random.Random(seed), list[int]()
    tag = "<" if style.delimiters == ("｜DSML｜",) else ""
    channels = ("analysis", "final") if model.family == "harmony" else ()
    ends = [end for end in (style.key_end, style.reasoning[1], style.end, '"}', "]", tag, *channels) if end]
    while len(ids) < most:
        every = allowed(matcher)
        # Bytes of longer characters only if no other is allowed.
        may = [i for i in every if i >= EOS or 0x20 <= i < 0x7F or i == 0x0A] or every
        said = "".join(chr(i) if i < EOS else "\0" for i in ids[-80:])
        begun = [next(n for n in range(len(end) - 1, -1, -1) if said.endswith(end[:n])) for end in ends]
        liked = {ord(end[n]) for end, n in zip(ends, begun, strict=True) if n == max(begun)} & {*may}
        liked |= {i for i in may if i >= EOS}
        chosen = draw.choice(sorted(liked) if liked and draw.random() < 0.9 else may)
        ids.append(chosen)
        if chosen in model.ends:
            return ids
        assert matcher.try_consume_tokens([chosen]) == 1
    return None


def check_calls(model: Model, parts: Sequence[ChannelPart], *, strict: bool, is_one: bool) -> int:
    """Checks calls against their schemas; returns their number."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.channel is Channel.CALL and part.name:
            calls.append((part.name, part.text))
        elif part.channel is Channel.CALL:
            calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.text)
    for name, text in calls:
        assert name in NAMES
        value = json.loads(text)
        assert isinstance(value, dict)
        if strict:
            jsonschema.validate(value, model.schema)
    assert not is_one or len(calls) <= 1
    return len(calls)


MODELS: Final = [*map(Model, STYLES), Model("qwen", False)]
by_model = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.family + "-spelled" * (not m.with_tokens))
TELLING: Final = [model for model in MODELS if model.family not in ("llama", "xlam") and model.with_tokens]
by_telling = pytest.mark.parametrize("model", TELLING, ids=lambda m: m.family)


@pytest.mark.each_value
@by_model
@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_required_calls_are_made(model: Model, is_one: bool, strict: bool) -> None:
    text = model.grammar.calls(model.tools(strict=strict), None, is_required=True, is_one=is_one)
    matcher = model.matcher(text)
    answers = [walked(model, matcher.deep_copy(), seed) for seed in range(14)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) > 3
    for ids in ended:
        parts = model.read(ids)
        assert check_calls(model, parts, strict=strict, is_one=is_one) >= 1
        assert all(part.channel is Channel.CALL for part in parts)


@by_telling
def test_optional_calls_are_strict(model: Model) -> None:
    assert model.grammar.tells_calls
    text = model.grammar.calls(model.tools(strict=True), None, is_required=False, is_one=False)
    numbers, matcher = set[int](), model.matcher(text)
    for seed in range(160):
        if seed >= 40 and numbers >= {0, 1}:
            break
        ids = walked(model, matcher.deep_copy(), seed)
        if ids is not None:
            numbers.add(check_calls(model, model.read(ids), strict=True, is_one=False))
    assert numbers >= {0, 1}


@pytest.mark.each_value
@by_model
@pytest.mark.parametrize("has_begun", [False, True])
def test_reasoning_precedes_calls(model: Model, has_begun: bool) -> None:
    if not STYLES[model.family].reasoning[1] or (has_begun and model.family == "harmony"):
        return
    opening = f"{STYLES[model.family].reasoning[0]}\n" if has_begun else ""
    text = model.grammar.calls(model.tools(strict=False), ReasoningLimit(has_begun), is_required=True, is_one=True)
    reasons = 0
    matcher = model.matcher(text)
    for seed in range(120):
        if seed >= 12 and reasons:
            break
        ids = walked(model, matcher.deep_copy(), seed)
        if ids is None:
            continue
        parts = model.read(ids, opening)
        assert check_calls(model, parts, strict=False, is_one=True) == 1
        assert {part.channel for part in parts} <= {Channel.REASONING, Channel.CALL}
        reasons += any(part.channel is Channel.REASONING for part in parts)
    assert reasons


@pytest.mark.parametrize("most", [0, 1, 7])
@pytest.mark.parametrize("family", ["qwen", "harmony"])
def test_reasoning_budget_forces_end_marker(family: str, most: int) -> None:
    """After the budget the grammar allows only the end marker, with a kept or a rebuilt state."""
    model = Model(family)
    assert model.grammar.ends_reasoning
    matcher = model.matcher(model.grammar.calls((), ReasoningLimit(max_tokens=most), is_required=False, is_one=False))
    names = {"qwen": ("<think>", "</think>"), "harmony": ("<|message|>", "<|end|>")}
    ids = {name: token_id for token_id, name in model.markers.items()}
    begin, end = (ids[name] for name in names[family])
    before = [begin] if family == "qwen" else [ids["<|channel|>"], *b"analysis", begin]
    kept = matcher.deep_copy()
    for i in before:
        assert i in allowed(kept)
        kept.consume_token(i)
    for count in range(most):
        assert {end, ord("x")} <= {*allowed(kept)}, count
        kept.consume_token(ord("x"))
        anew = matcher.deep_copy()
        assert anew.try_consume_tokens([*before, *b"x" * (count + 1)]) == len(before) + count + 1
        assert allowed(anew) == allowed(kept)
    assert allowed(kept) == [end]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"$ref": "#/$defs/none"}, "at /properties/a: '$ref' '#/$defs/none' is of nothing"),
        ({"$ref": "#there"}, "'$ref' '#there' is not supported between tags"),
        ({"$ref": "#/properties/a"}, "it refers to itself"),
        ({}, "does not say whether it is a string"),
        ({"anyOf": [{"type": "string"}, {}]}, "does not say"),
        ({"type": ["string", "integer"], "maximum": 5}, "a string and an integer with 'maximum' are not told apart"),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array"}]}, "a string that is held and an array"),
        ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, "a string could satisfy several branches of its 'oneOf'"),
        ({"type": ["boolean", "integer"]}, "a boolean and a number are not told apart"),
        ({"type": "string", "pattern": "(^a|b)$"}, "'pattern' has an anchor within"),
        ({"type": "string", "pattern": "a(?=b)"}, "of its 'pattern', look-around is not supported"),
        ({"type": "string", "pattern": r"a\b"}, "of its 'pattern', the word boundary"),
        ({"type": "string", "minLength": "x"}, "'minLength' is not a length"),
        ({"type": "string", "enum": "x"}, "its 'enum' is not a list"),
        ({"type": "string", "enum": ["b"], "const": "c"}, "no string satisfies it"),
        ({"enum": ["1", 1]}, ""),
        ({"allOf": [{"anyOf": [{"type": "string", "pattern": str(n)} for n in range(9)]}] * 3}, "more than 64"),
    ],
)
def test_arguments_ambiguous_in_tags_are_refused(argument: dict[str, Any], said: str) -> None:
    schema = {"type": "object", "properties": {"a": argument}}
    if not said:
        arguments.strict(schema, "")
        return
    with pytest.raises(arguments.ArgumentError) as refused:
        arguments.strict(schema, "")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {'a"': {"type": "string"}}}, "its name cannot stand in a tag"),
        ({"required": ["b"]}, "at /required: 'b' is none of the properties"),
        ({"minProperties": 1}, "at its root: 'minProperties' is not supported"),
        ({"allOf": []}, "at its root: 'allOf' is not supported"),
    ],
)
def test_schema_spanning_arguments_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(arguments.ArgumentError) as refused:
        arguments.strict({"type": "object", **schema}, "")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "argument", [{"type": "array"}, {"type": "object"}, {"anyOf": [{"type": "array"}, {"type": "null"}]}]
)
def test_spelled_out_tags_allow_fewer_arguments(argument: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": argument}}
    arguments.strict(schema, "")
    with pytest.raises(arguments.ArgumentError) as refused:
        arguments.strict(schema, "</parameter>")
    assert "could have a text in it that ends the argument" in str(refused.value)


def test_request_grammar_applies_after_reasoning() -> None:
    model = Model("qwen")
    inner = lark.canonical(Constraint("choices", ("yes", "no"))).removeprefix(lark.HEADER)
    matcher = model.matcher(model.grammar.around(inner, ReasoningLimit()))
    assert {ord("y"), ord("n"), 301} <= {*allowed(matcher)}
    assert matcher.try_consume_tokens([301, *b"hm", 302, *b"\n\nyes"]) == 9
    assert allowed(matcher) == [EOS]


@by_telling
def test_calls_may_replace_constrained_content(model: Model) -> None:
    inner = lark.canonical(Constraint("choices", ("yes", "no"))).removeprefix(lark.HEADER)
    own = model.grammar.calls(model.tools(strict=True), None, is_required=True, is_one=True)
    calls = lark.canonical(Constraint(GRAMMAR, (own,))).removeprefix(lark.HEADER)
    matcher, numbers = model.compiled(lark.HEADER + model.grammar.around(inner, ReasoningLimit(), calls)), set[int]()
    for seed in range(30):
        ids = walked(model, matcher.deep_copy(), seed)
        if ids is not None:
            parts = model.read(ids)
            numbers.add(number := check_calls(model, parts, strict=True, is_one=True))
            content = "".join(part.text for part in parts if part.channel is Channel.CONTENT)
            assert content.strip() in (("",) if number else ("yes", "no"))
    assert numbers == {0, 1}
