"""Finds how a model writes calls and reasoning, by rendering some with its chat template and reading them back.

A form of calls is used only if every rendered answer is read back unchanged. Reasoning is read back too, if the chat
template renders an answer of reasoning and content. If not, the marks in its prompts or in answers with calls decide,
or the fact that it removes marked reasoning from earlier answers. The source of a chat template never decides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from typing import Any, Final

import regex

from common.limits import MAX_TEMPLATE_S
from common.text.chat_template import ChatTemplate
from common.text.template_sandbox import TemplateInputError
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.families import DESCRIBED, REASONING_MARKS, SPECS, WHOLE
from router.answers.channels.fit import WrittenCalls, fitted
from router.answers.channels.grammar import STYLES, CallStyle
from router.answers.channels.parser import Channel, ResponseParser, merged
from router.answers.channels.template import CALLS_FIELD, REASONING_FIELDS, ResponseTemplate

# Most characters of a rendered probe. System prompts of published chat templates have up to 12,000.
_MOST_TEXT: Final = 1 << 17
# Words of the probes, which occur in no chat template.
_USERS: Final = ("Uvuqa", "Oweko")
_RESULTS: Final = ("Jebiru", "Kotema")
_CONTENT: Final = "Teluba"
_REASONING: Final = "Rizomo"
_PLACE: Final = "Qubira"
_NAMES: Final = ("get_zixa", "put_wejo")
_PROPERTIES: Final[Mapping[str, Any]] = {
    "place": {"type": "string", "description": "Place."},
    "days": {"type": "integer", "description": "Days."},
    "text": {"type": "string", "description": "Text."},
    "names": {"type": "array", "items": {"type": "string"}, "description": "Names."},
    "more": {"type": "object", "description": "More."},
}
TOOLS: Final[Sequence[Mapping[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calls {name}.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["place"]},
        },
    }
    for name in _NAMES
]
_ARGUMENTS: Final[Sequence[Mapping[str, Any]]] = (
    {"place": _PLACE, "days": 3, "text": 'a "b"\nc', "names": ["Abel"], "more": {"a": [1, True]}},
    {},
)
# Variables with which chat templates switch reasoning on or off.
_SWITCHES: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
)


@dataclass(frozen=True, slots=True)
class FoundForm:
    """The form of a model's answers, as found by the probe.

    Attributes:
        family: name of the calls' family; empty without calls.
        spec: the response template.
        style: style of calls and reasoning, for grammars.
        unheld: why grammars cannot write calls as the chat template does; empty if they can.
        is_described: True if prompts describe the calls, and the chat template leaves out calls of messages.
    """

    family: str
    spec: Mapping[str, Any]
    style: CallStyle
    unheld: str = ""
    is_described: bool = False


@dataclass(frozen=True, slots=True)
class _Variant:
    """A way to write messages with calls; each chat template accepts some of the variants."""

    has_results: bool
    has_text_arguments: bool
    content: str | None
    ids: Sequence[str]

    def message(self, num_calls: int, content: str = "", reasoning: str = "") -> dict[str, Any]:
        """An assistant message with `num_calls` calls."""
        calls = [self._call(i) for i in range(num_calls)]
        made: dict[str, Any] = {"role": "assistant", "content": content or self.content}
        return made | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})

    def results(self, num_calls: int, words: Sequence[str]) -> list[dict[str, Any]]:
        """Tool messages with the results of at most `num_calls` calls."""
        calls = zip(self.ids, _NAMES, words, strict=False)
        made = [{"role": "tool", "content": word, "tool_call_id": id, "name": name} for id, name, word in calls]
        return made[:num_calls]

    def _call(self, i: int) -> dict[str, Any]:
        arguments: Any = dict(_ARGUMENTS[i])
        if self.has_text_arguments:
            arguments = json.dumps(arguments)
        return {"type": "function", "id": self.ids[i], "function": {"name": _NAMES[i], "arguments": arguments}}


_IDS: Final = (("abcdefgh1", "abcdefgh2"), tuple(f"functions.{name}:{i}" for i, name in enumerate(_NAMES)))
_VARIANTS: Final = tuple(_Variant(*each) for each in product((False, True), (False, True), (None, ""), _IDS))
_PLAIN: Final = _VARIANTS[0]
_UNHELD: Final = "calls are written in a form that no grammar is made of"
# Probed answers with calls: number of calls, content, reasoning.
_SHAPES: Final = ((1, "", ""), (2, "", ""), (1, _CONTENT, ""), (1, _CONTENT, _REASONING))


@dataclass(frozen=True, slots=True)
class _RenderedAnswer:
    """A rendered answer, from the end of the user's words on, and the parts of it that the chat template printed.

    Attributes:
        begun: the generation prompt, with which a prompt ends after the user's words.
    """

    text: str
    begun: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class _Tail:
    """Text that the chat template writes after an answer.

    Attributes:
        last: text after the last message.
        every: text after every message, whatever follows; empty if unknown.
    """

    last: str
    every: str

    def ends(self, text: str) -> bool:
        """True if `text`, read after an answer, is the template's and not a part of the answer."""
        text = text.strip()
        return text in self.last or bool(self.every and text.startswith(self.every))


def shows_tools(template: ChatTemplate) -> bool:
    """True if the chat template prints the tools of a request."""
    return _Probe(template).shows_tools()


def reads_calls(template: ChatTemplate, response: ResponseTemplate, family: str) -> bool:
    """True if a response template reads back the calls that the chat template of a `family` writes."""
    return _Probe(template).reads_calls(response, family)


def find_form(template: ChatTemplate) -> FoundForm | None:
    """Finds the form of a model's answers by its chat template; None if neither calls nor reasoning are known."""
    return _Probe(template).find()


@dataclass
class _Probe:
    """Probes rendered with one chat template, and the form that they show."""

    template: ChatTemplate
    _rendered: dict[str, str] = field(default_factory=dict)
    # Each rendering has its own time limit. This one bounds all of them together: a hostile template would otherwise
    # take about fifty limits.
    _end: float = field(default_factory=lambda: time.thread_time() + MAX_TEMPLATE_S)

    def render(self, messages: Sequence[dict[str, Any]], *, prompts: bool, tools: bool = True, **more: Any) -> str:
        """Renders messages; empty if the chat template rejects them or takes too long."""
        key = json.dumps([messages, prompts, tools, more])
        if key not in self._rendered:
            self._rendered[key] = self._render(
                messages, TOOLS if tools else None, add_generation_prompt=prompts, **more
            )
        return self._rendered[key]

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, **arguments: Any) -> str:
        if time.thread_time() > self._end:
            return ""
        try:
            text = self.template.render([*messages], tools=tools, **arguments)
        except TemplateInputError:
            return ""
        return text if len(text) <= _MOST_TEXT else ""

    def shows_tools(self) -> bool:
        prompts = [self.render([_user()], prompts=True, tools=tools) for tools in (True, False)]
        return all(name in prompts[0] and name not in prompts[1] for name in _NAMES)

    def find(self) -> FoundForm | None:
        has_tools = self.shows_tools()
        for name, spec in SPECS.items():
            if name in WHOLE and spec["start_anchor"] in self._beginning(_USERS):
                return self._find_whole(name, spec, has_tools=has_tools)
        marks = next((each for each in REASONING_MARKS if self._reasons(each)), None)
        reading = _AnswerFrame(self._anchor(marks), marks)
        found = (self._find_calls(reading) or self._find_described(reading)) if has_tools else None
        if found is not None or marks is None:
            return found
        return FoundForm("", reading.spec({"content": {}}), _plain_style(marks))

    def reads_calls(self, response: ResponseTemplate, family: str) -> bool:
        reader, tail = _ProbeReader(response), self._tail()
        return any(
            # In messages of such families, content before a call is reasoning.
            all(reader.reads(each, tail) for each in answers if not (each.content and family in WHOLE))
            for answers in self._calls()
        )

    def _find_whole(self, name: str, spec: Mapping[str, Any], *, has_tools: bool) -> FoundForm | None:
        """The form of a family with a message format of its own; None if its reasoning is not read back."""
        reader = _ProbeReader(ResponseTemplate(spec))
        reasons = [each for each in self._answers(_PLAIN, _REASONING) if not (each.calls and each.content)]
        if not reasons or not all(reader.reads(each, self._tail()) for each in reasons):
            return None
        for answers in self._calls() if has_tools else ():
            # In such messages, content before a call is reasoning.
            if all(reader.reads(each, self._tail()) for each in answers if not each.content):
                return FoundForm(name, spec, STYLES[name])
        fields = {key: value for key, value in spec["fields"].items() if key != CALLS_FIELD}
        return FoundForm(name, {**spec, "fields": fields}, STYLES[name])

    def _find_calls(self, reading: _AnswerFrame) -> FoundForm | None:
        """The form of the first family that reads back all calls; None if no family does."""
        tail = self._tail()
        for answers in self._calls():
            for name, family in SPECS.items():
                if name in WHOLE:
                    continue
                spec = reading.spec(family["fields"])
                reader = _ProbeReader(ResponseTemplate(spec))
                if self._reads_content(reader) and all(reader.reads(each, tail) for each in answers):
                    style = _fitted_style(name, reading.marks, answers)
                    return FoundForm(name, spec, style or _plain_style(reading.marks), "" if style else _UNHELD)
        return None

    def _find_described(self, reading: _AnswerFrame) -> FoundForm | None:
        """The form that prompts with tools describe; None if none is, or the chat template writes calls itself."""
        if any(self._calls()):
            return None
        told, without = (self.render([_user()], prompts=True, tools=tools) for tools in (True, False))
        for name, texts in DESCRIBED.items():
            spec = reading.spec(SPECS[name]["fields"])
            is_told = all(text in told and text not in without for text in texts)
            if is_told and self._reads_content(_ProbeReader(ResponseTemplate(spec))):
                style = replace(STYLES[name], reasoning=reading.marks or ("", ""))
                return FoundForm(name, spec, style, is_described=True)
        return None

    def _calls(self) -> Iterator[list[_RenderedAnswer]]:
        """Rendered answers with calls, for each variant that the chat template accepts."""
        seen = set[str]()
        for variant in _VARIANTS:
            written = [self._written(variant, *shape) for shape in _SHAPES]
            if written[0] is None or not written[0].calls or written[0].text in seen:
                continue
            seen.add(written[0].text)
            yield [each for each in written if each is not None]

    def _answers(self, variant: _Variant, reasoning: str) -> list[_RenderedAnswer]:
        """Rendered answers whose reasoning the chat template printed."""
        shapes = ((0, _CONTENT), (1, ""), (1, _CONTENT))
        written = [self._written(variant, num_calls, content, reasoning) for num_calls, content in shapes]
        return [each for each in written if each is not None and each.reasoning]

    def _written(self, variant: _Variant, num_calls: int, content: str, reasoning: str) -> _RenderedAnswer | None:
        """Renders an answer, and records which calls, content and reasoning the chat template printed."""
        message = variant.message(num_calls, content, reasoning)
        results = variant.results(num_calls, _RESULTS) if variant.has_results else []
        begun, text = self._behind_user([message, *results])
        if not text:
            return None
        text = text.partition(_RESULTS[0])[0] if results else text
        calls = [
            (name, arguments)
            for name, arguments in list(zip(_NAMES, _ARGUMENTS, strict=True))[:num_calls]
            if name in text
        ]
        return _RenderedAnswer(
            text, begun, calls, content if content in text else "", reasoning if reasoning in text else ""
        )

    def _behind_user(self, messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """The text after the user's words: in a prompt that ends with them, and in a rendering with `messages`."""
        for tools in (True, False):
            whole = self.render([_user(), *messages], prompts=False, tools=tools)
            if _USERS[0] in whole:
                prompt = self.render([_user()], prompts=True, tools=tools)
                return prompt.rpartition(_USERS[0])[2], whole.partition(_USERS[0])[2]
        return "", ""

    def _reasons(self, marks: tuple[str, str]) -> bool:
        """True if the model writes its reasoning between these marks."""
        reading = _AnswerFrame(self._anchor(marks), marks)
        reader = _ProbeReader(ResponseTemplate(reading.spec({"content": {}})))
        answers = [
            each
            for variant in (_PLAIN, replace(_PLAIN, has_results=True))
            if (each := self._written(variant, 0, _CONTENT, _REASONING)) is not None and each.reasoning
        ]
        if not self._reads_content(reader):
            return False
        if answers:
            return all(reader.reads(each, self._tail()) for each in answers)
        with_calls = self._answers(_PLAIN, _REASONING)
        if with_calls:
            return all(f"{marks[0]}" in each.text and f"{marks[1]}" in each.text for each in with_calls)
        return self._prompts_reasoning(marks) or self._drops_reasoning(marks)

    def _reads_content(self, reader: _ProbeReader) -> bool:
        """True if an answer of content alone is read back unchanged, as the last message or as an earlier one."""
        message, tail = _PLAIN.message(0, _CONTENT), self._tail()
        for following in ([], [_user(_USERS[1])]):
            begun, text = self._behind_user([message, *following])
            text = text.rpartition(_USERS[1])[0] if following else text
            if _CONTENT in text and reader.reads(_RenderedAnswer(text, begun, content=_CONTENT), tail):
                return True
        return False

    def _prompts_reasoning(self, marks: tuple[str, str]) -> bool:
        """True if a mark follows the user's words in a prompt, or a prompt contains both marks."""
        prompts = [self.render([_user()], prompts=True, tools=False, **switch) for switch in _SWITCHES]
        texts = [prompt.rpartition(_USERS[0])[2] for prompt in prompts]
        return any(mark in text for text in texts for mark in marks) or any(
            all(mark in prompt for mark in marks) for prompt in prompts
        )

    def _drops_reasoning(self, marks: tuple[str, str]) -> bool:
        """True if the chat template removes reasoning between the marks from earlier answers."""
        begin, end = marks
        content = f"{begin}\n{_REASONING}\n{end}\n\n{_CONTENT}"
        messages = [_user(), {"role": "assistant", "content": content}, _user(_USERS[1])]
        rendered = self.render(messages, prompts=True, tools=False)
        return _CONTENT in rendered and _REASONING not in rendered

    def _tail(self) -> _Tail:
        """The text that the chat template writes after an answer's content."""
        message = _PLAIN.message(0, _CONTENT)
        texts = [self._behind_user([message, *following])[1] for following in ([], [_user(_USERS[1])])]
        ends = [text.rpartition(_CONTENT)[2] for text in texts]
        return _Tail(ends[0].strip(), _common_start(*ends).strip())

    def _anchor(self, marks: tuple[str, str] | None) -> str:
        """Pattern of the texts after which an answer begins."""
        beginnings = [self._beginning(_USERS, **switch) for switch in _SWITCHES]
        beginnings += [self._beginning(_RESULTS, variant) for variant in _VARIANTS if not variant.has_results]
        cut = {_without_marks(beginning, marks).strip() for beginning in beginnings} - {""}
        if not cut:
            return "(?!)"
        end = rf"(?:{regex.escape(marks[1])}\s*)?" if marks is not None else ""
        return rf"(?:{'|'.join(map(regex.escape, sorted(cut, key=len, reverse=True)))})\s*{end}"

    def _beginning(self, words: Sequence[str], variant: _Variant | None = None, **switch: Any) -> str:
        """The generation prompt: the text of a prompt after its last message."""
        for tools in (True, False):
            messages = [_messages(word, variant) for word in words]
            prompts = [self.render(each, prompts=True, tools=tools, **switch) for each in messages]
            if not all(word in prompt for word, prompt in zip(words, prompts, strict=True)):
                continue
            without = self.render(messages[0], prompts=False, tools=tools, **switch)
            added = prompts[0].removeprefix(without) if without else ""
            return added if added.strip() and added != prompts[0] else _common_end(*prompts)
        return ""


@dataclass(frozen=True, slots=True)
class _AnswerFrame:
    """Pattern of the text before an answer, and the marks around reasoning, of one chat template."""

    anchor: str
    marks: tuple[str, str] | None

    def spec(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Response template with `fields`, whose reasoning field is replaced by one with these marks."""
        thinking = {} if self.marks is None else {"thinking": {"open": self.marks[0], "close": self.marks[1]}}
        others = {name: value for name, value in fields.items() if name not in REASONING_FIELDS}
        return {"start_anchor_pattern": self.anchor, "fields": {**thinking, **others}}


class _ProbeReader:
    """Reads rendered answers with one response template."""

    def __init__(self, template: ResponseTemplate) -> None:
        self._template = template

    def reads(self, written: _RenderedAnswer, tail: _Tail) -> bool:
        """True if an answer is read back unchanged, apart from the template's text after it."""
        if self._is_split(written, tail):
            return True
        opening, text = self._begin(written)
        if text is None or bool(written.reasoning) > self._template.has_reasoning:
            return False
        tools = ToolSchemas(dict.fromkeys(_NAMES, _PROPERTIES))
        parser = ResponseParser(self._template, tools=tools, separates_reasoning=True, opening=opening)
        parts = merged([*parser.push(text), *parser.finish()])
        read = {channel: "".join(part.text for part in parts if part.channel is channel) for channel in Channel}
        calls = [(part.name, part.text) for part in parts if part.channel is Channel.CALL]
        content = read[Channel.CONTENT]
        return (
            [name for name, _ in calls] == [name for name, _ in written.calls]
            and all(_is(text, arguments) for (_, text), (_, arguments) in zip(calls, written.calls, strict=True))
            and read[Channel.REASONING] == written.reasoning
            and content.startswith(written.content)
            and tail.ends(content.removeprefix(written.content))
        )

    def _is_split(self, written: _RenderedAnswer, tail: _Tail) -> bool:
        """True if content and calls are written as two messages, so that they are not one answer."""
        behind = written.text.partition(written.content)[2].lstrip() if written.content and written.calls else ""
        if tail.every and behind.startswith(tail.every):
            return bool(behind)
        return bool(behind) and self._template.behind_anchor(behind, at_start=True) is not None

    def _begin(self, written: _RenderedAnswer) -> tuple[str, str | None]:
        """Splits an answer into the part that a prompt contains, and the rest; None if no beginning is found."""
        if written.begun and written.text.startswith(written.begun):
            return self._template.behind_anchor(written.begun) or "", written.text[len(written.begun) :]
        return "", self._template.behind_anchor(written.text)


def _plain_style(marks: tuple[str, str] | None) -> CallStyle:
    """Call style without calls, with the reasoning marks alone."""
    return CallStyle((), "", reasoning=marks or ("", ""), delimiters=())


def _fitted_style(family: str, marks: tuple[str, str] | None, answers: Sequence[_RenderedAnswer]) -> CallStyle | None:
    """Adapts a family's call style to the blanks of the answers; None if no grammar can write such calls."""
    if family not in STYLES:
        return None
    two = next((each.text for each in answers if len(each.calls) > 1), "")
    keys = tuple(_ARGUMENTS[0])
    style = fitted(STYLES[family], WrittenCalls(answers[0].text, two, _NAMES, keys, _PLACE))
    return None if style is None else replace(style, reasoning=marks or ("", ""))


def _is(text: str, arguments: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == arguments)
    except ValueError:
        return False


def _user(word: str = _USERS[0]) -> dict[str, Any]:
    return {"role": "user", "content": word}


def _messages(word: str, variant: _Variant | None) -> list[dict[str, Any]]:
    """A conversation that ends with `word`: said by the user or, with a `variant`, as a call's result."""
    if variant is None:
        return [_user(word)]
    # Each word has another call id, so that the common end of two prompts contains no id.
    one = replace(variant, ids=variant.ids[_RESULTS.index(word) :])
    return [_user(), one.message(1), *one.results(1, [word])]


def _common_start(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(char for char, _ in same)


def _common_end(one: str, other: str) -> str:
    return _common_start(one[::-1], other[::-1])[::-1]


def _without_marks(beginning: str, marks: tuple[str, str] | None) -> str:
    """The beginning of an answer up to the first mark of reasoning."""
    places = [place for mark in marks or () if (place := beginning.find(mark)) >= 0]
    return beginning[: min(places, default=len(beginning))]
