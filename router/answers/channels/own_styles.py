"""Styles of calls and reasoning for grammars, out of the response template that a checkpoint brings.

A template says what is read; a style says what is written. What it writes is tried on the reader before it is used,
and what grammars cannot hold is refused by the construct that is in the way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import regex

from router.answers.channels.calls import Tools
from router.answers.channels.grammar import KEY, NAME, CallStyle, Texts, every
from router.answers.channels.parser import Channel, Part, ResponseParser, merged
from router.answers.channels.spelling import BLANKS, DIGITS, FIRST, LAST, WORD, PatternError, Spelled, spelled
from router.answers.channels.template import (
    CALLS_FIELD,
    CONTENT_FIELD,
    REASONING_FIELDS,
    Delimiter,
    Field,
    ResponseTemplate,
    call_places,
    groups_of,
)
from router.answers.channels.values import placeholder

_VALUE: Final = "{value}"
_ARGUMENTS: Final = "{arguments}"
_HOLES: Final = (NAME, KEY, _VALUE, BLANKS, WORD, DIGITS, FIRST, LAST)
# Of JSON's options those that take every JSON.
_JSON_OPTIONS: Final = frozenset({"unquoted_keys", "allow_non_json", "string_delims"})
_TAG_OPTIONS: Final = frozenset({"tag_pattern", "value_parser", "merge_duplicates"})
_ANY_VALUE: Final = ".*?"
# Names that grammars are tried with.
_TOOLS: Final = ("get_weather", "f", "a-b.c_2")
_ARGUMENT: Final = "city"
_FILLED: Final = ({BLANKS: "", WORD: "x", DIGITS: "7"}, {BLANKS: "\n", WORD: "ab_1", DIGITS: "10"})


class StyleError(ValueError):
    """A response template cannot be held by grammars; names the construct."""


def own_style(template: ResponseTemplate, markers: Collection[str]) -> CallStyle:
    """The style in which grammars write reasoning and content of a template, without calls.

    Args:
        template: of the checkpoint.
        markers: texts of the tokens that stand for its delimiters.

    Raises:
        StyleError: they cannot.
    """
    return _Styles(template, markers).plain()


def own_calls(template: ResponseTemplate, markers: Collection[str], style: CallStyle) -> CallStyle:
    """The style with calls.

    Args:
        template: as of `own_style`, that has calls.
        markers: as of `own_style`.
        style: of `own_style`.

    Raises:
        StyleError: there is none.
    """
    return _Styles(template, markers).with_calls(style)


def reads(template: ResponseTemplate, style: CallStyle, name: str, keys: Iterable[str]) -> bool:
    """True if a call of a tool, in a style of `own_calls`, is read as one.

    Args:
        template: of the style.
        style: that writes the call.
        name: of the tool.
        keys: of its arguments, where each stands between tags.
    """
    arguments = dict.fromkeys(keys, "x") if style.key else {}
    texts = (every(each)[0] for each in (style.before, style.begin, style.end, style.after))
    return _reads_calls(template, style, name, arguments, 1, *texts)


@dataclass(frozen=True)
class _Delimiters:
    """Delimiters of a region of calls.

    Attributes:
        open: it begins with one of these.
        close: it ends with one of these; one empty text where it reaches to the end of the answer.
        tells: True if no text without a token begins a region.
        is_one: True if an answer has one region at most.
    """

    open: tuple[str, ...]
    close: tuple[str, ...]
    tells: bool
    is_one: bool


class _Styles:
    def __init__(self, template: ResponseTemplate, markers: Collection[str]) -> None:
        self._template = template
        self._markers = markers

    def plain(self) -> CallStyle:
        content = self._template.fields.get(CONTENT_FIELD)
        style = CallStyle("", "", reasoning=self._reasoning(), content="", delimiters=())
        if content is not None and content.open is not None:
            texts = _usable(_spelled("the open of content", content.open, {}), is_one=True)
            style = replace(style, content=self._tried(texts, "hm", [Part(Channel.CONTENT, "hm")], "content"))
        return style

    def with_calls(self, style: CallStyle) -> CallStyle:
        """The style with calls."""
        field = self._template.fields[CALLS_FIELD]
        name, arguments = call_places(field.transform.get("function") if isinstance(field.transform, dict) else None)
        if not name or not arguments:
            raise StyleError("has calls whose transform has no places for name and arguments")
        if others := {*_placeholders(field.transform)} - {name, arguments, "content", *groups_of(field.open)}:
            raise StyleError(f"has calls whose transform takes {{{min(others)}}} as well")
        around = self._delimiters(field, name)
        if field.content == "json":
            made = self._json(style, field, around, (name, arguments))
        elif field.content == "xml-inline":
            made = self._tags(style, field, around, (name, arguments))
        else:
            raise StyleError(f"has calls of content {field.content!r}")
        return self._that_reads(_without_double_blanks(made))

    def _reasoning(self) -> tuple[Texts, str]:
        fields = [field for name, field in self._template.fields.items() if name in REASONING_FIELDS]
        if not fields:
            return "", ""
        field = fields[0]
        if len(fields) > 1 or field.open is None or field.close is None or field.content != "text":
            raise StyleError("has reasoning without open and close of its own")
        ends = _usable(_spelled("the close of reasoning", field.close, {}), is_one=False)
        if len(ends) > 1 and not all(map(self._has_token, ends)):
            raise StyleError("has reasoning that ends with one of several texts that are not tokens")
        begins = _usable(_spelled("the open of reasoning", field.open, {}), is_one=True)
        end = _stripped(ends[0])
        return self._tried(begins, f"hm{end}", [Part(Channel.REASONING, "hm")], "reasoning"), end

    def _tried(self, begins: Sequence[str], body: str, expected: list[Part], what: str) -> tuple[str, ...]:
        """The texts among some with which a region is read as it should be."""
        good = tuple(
            text for text in begins if all(_read(self._template, each) == expected for each in _samples(text + body))
        )
        if not good:
            raise StyleError(f"has {what} that is not read where it stands alone")
        return good

    def _has_token(self, text: str) -> bool:
        return any(marker in text for marker in self._markers)

    def _delimiters(self, field: Field, name: str) -> _Delimiters:
        if field.open is None:
            raise StyleError("has calls without an open")
        opened = _spelled("the open of calls", field.open, {name: NAME})
        closed = Spelled([""]) if field.close is None else _spelled("the close of calls", field.close, {name: NAME})
        # At the end of the text no text of arguments can stand.
        if field.close is not None and not all(LAST in text or self._has_token(text) for text in closed.texts):
            raise StyleError("has calls whose close is not a token: a text among the arguments could be taken for it")
        is_one = field.close is None or not field.repeats
        return _Delimiters(
            _usable(opened, is_one=is_one and not self._template.has_reasoning),
            _usable(closed, is_one=False),
            all(map(self._has_token, opened.texts)),
            is_one,
        )

    def _json(self, style: CallStyle, field: Field, around: _Delimiters, places: tuple[str, str]) -> CallStyle:
        self._check_options(field)
        before, after = _object(field, *places)
        if field.transform_each:
            return replace(
                style,
                tells=around.tells,
                between=f"{BLANKS},{BLANKS}",
                before=tuple(f"{text}{BLANKS}[{BLANKS}" for text in around.open),
                begin=before,
                end=after,
                after=tuple(f"{BLANKS}]{BLANKS}{text}" for text in around.close),
            )
        return replace(
            style,
            tells=around.tells,
            between=BLANKS,
            begin=tuple(f"{text}{BLANKS}{before}" for text in around.open),
            end=tuple(f"{after}{BLANKS}{text}" for text in around.close),
            is_one=around.is_one,
            after=self._behind(),
        )

    def _behind(self) -> Texts:
        """Texts that may stand behind the last call."""
        content = self._template.fields.get(CONTENT_FIELD)
        if content is None or content.open is not None or content.close is None:
            return ""
        return (
            "",
            *filter(self._has_token, _usable(_spelled("the close of content", content.close, {}), is_one=False)),
        )

    def _check_options(self, field: Field) -> None:
        options = field.content_args
        if unknown := sorted(set(options) - _JSON_OPTIONS):
            raise StyleError(f"has calls with content_args {unknown[0]!r}")
        for begin, _ in options.get("string_delims") or ():
            if not self._has_token(begin):
                raise StyleError("has calls with string_delims that are not tokens: they could stand in a text")

    def _tags(self, style: CallStyle, field: Field, around: _Delimiters, places: tuple[str, str]) -> CallStyle:
        options = field.content_args
        if unknown := sorted(set(options) - _TAG_OPTIONS):
            raise StyleError(f"has calls with content_args {unknown[0]!r}")
        parser = options.get("value_parser") or {}
        name = parser.get("name", "text")
        if name not in ("text", "json") or (name == "json" and parser.get("args")):
            raise StyleError(f"has arguments of content {name!r}")
        if places[0] not in groups_of(field.open) | groups_of(field.close) or places[1] != "content":
            raise StyleError("has calls whose transform takes the name, or the arguments, from between the tags")
        tag = _spelled("the tag_pattern", options["tag_pattern"], {"key": KEY, "value": _VALUE})
        if tag.groups.get("value") != [_ANY_VALUE] or not all(_is_tag(text) for text in tag.texts):
            raise StyleError(f"has a tag_pattern without a key and behind it the value {_ANY_VALUE!r}")
        begins = _fullest([text.partition(_VALUE)[0] for text in tag.texts], at_end=True)
        ends = _fullest([text.partition(_VALUE)[2] for text in tag.texts], at_end=False)
        if len(ends) > 1 and not all(map(self._has_token, ends)):
            raise StyleError("has arguments that end with one of several texts that are not tokens")
        end = ends[0]
        strips = any(text.endswith(BLANKS) for text in begins) or end.startswith(BLANKS)
        end = _stripped(end)
        key_end = end.lstrip()
        return replace(
            style,
            begin=tuple(f"{text}{BLANKS}" for text in around.open),
            end=around.close,
            between=BLANKS,
            after=self._behind(),
            is_one=around.is_one,
            tells=around.tells,
            key=tuple(text.removesuffix(BLANKS) for text in begins),
            value_after=end[: len(end) - len(key_end)],
            key_end=key_end,
            key_after=BLANKS,
            strips_values=strips or (bool(parser) and name == "text" and parser.get("args", {}).get("strip", True)),
            has_json_values=name == "json",
        )

    def _that_reads(self, style: CallStyle) -> CallStyle:
        """The style with those of its texts whose calls are read as they are meant."""
        for part in ("before", "begin", "end", "after", "key"):
            texts = every(getattr(style, part))
            good = tuple(text for text in texts if self._reads(_with(style, {part: (text,)})))
            if not good:
                raise StyleError("has calls that are not read as such where they stand alone")
            style = _with(style, {part: good})
        return style

    def _reads(self, style: CallStyle) -> bool:
        """True if calls are read with one of the other texts, so that what is tried is not in the way."""
        others = (every(each) for each in (style.before, style.begin, style.end, style.after))
        return any(self._reads_every(style, texts) for texts in product(*others))

    def _reads_every(self, style: CallStyle, texts: tuple[str, ...]) -> bool:
        counts, read = (1,) if style.is_one else (1, 2), 0
        for name, arguments, count in product(_TOOLS, ({}, {_ARGUMENT: "Oslo"}), counts):
            if _reads_calls(self._template, style, name, arguments, count, *texts):
                read += 1
            elif name == _TOOLS[0]:
                return False
        return read > 0


def _read(template: ResponseTemplate, text: str, tool: str = "") -> list[Part]:
    parser = ResponseParser(template, tools=Tools({tool: {}}), separates_reasoning=True)
    return merged([*parser.push(text), *parser.finish()])


def _reads_calls(
    template: ResponseTemplate,
    style: CallStyle,
    name: str,
    arguments: Mapping[str, str],
    count: int,
    before: str,
    begin: str,
    end: str,
    after: str,
) -> bool:
    """True if so many calls are read as such, and nothing else."""
    call = f"{begin}{_written(style, arguments)}{end}".replace(NAME, name)
    texts = _samples(before + style.between.join([call] * count) + after)
    return all(_are_calls(template, text, name, arguments, count) for text in texts)


def _are_calls(template: ResponseTemplate, text: str, name: str, arguments: Mapping[str, Any], count: int) -> bool:
    field, parts = template.fields[CALLS_FIELD], _read(template, text, name)
    taken = groups_of(field.open) & {*_placeholders(field.transform)}
    assert field.open is not None
    opened = field.open.search(text, 0, final=True)
    if opened is None or any(opened[group] is None for group in taken):
        return False
    if any(part.channel is not Channel.CALL for part in parts) or [part.name for part in parts] != [name] * count:
        return False
    try:
        return [json.loads(part.text) for part in parts] == [arguments] * count
    except ValueError:
        return False


def _written(style: CallStyle, arguments: Mapping[str, str]) -> str:
    if not style.key:
        return json.dumps(arguments)
    key, behind = every(style.key)[0], style.value_after + style.key_end + style.key_after
    values = {name: json.dumps(value) if style.has_json_values else value for name, value in arguments.items()}
    return "".join(f"{key.replace(KEY, name)}{value}{behind}" for name, value in values.items())


def _samples(text: str) -> Iterator[str]:
    """The text with what may stand in its places."""
    for places in _FILLED:
        filled = text
        for place, value in places.items():
            filled = filled.replace(place, value)
        yield filled


def _object(field: Field, name: str, arguments: str) -> tuple[str, str]:
    """JSON around the arguments of a call, with its name where that stands in there."""
    groups = groups_of(field.open) | groups_of(field.close)
    places = {name: json.dumps(NAME), arguments: _ARGUMENTS}
    if name in groups:
        if field.transform_each:
            raise StyleError("has a list of calls with one name for all")
        del places[name]
    made: dict[str, Any] = {}
    for place, value in places.items():
        path = place.split(".") if field.transform_each else place.split(".")[1:]
        if not path and len(places) == 1:
            return "", ""
        inner = made
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise StyleError("has calls whose arguments stand in their name")
        if not path or path[-1] in inner:
            raise StyleError("has calls whose name stands in their arguments")
        inner[path[-1]] = value
    before, _, after = _json_text(made).partition(_ARGUMENTS)
    return before, after


def _json_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    entries = (f"{json.dumps(key)}:{BLANKS}{_json_text(inner)}" for key, inner in value.items())
    return f"{{{BLANKS}{f'{BLANKS},{BLANKS}'.join(entries)}{BLANKS}}}"


def _placeholders(template: Any) -> Iterator[str]:
    if isinstance(template, dict | list):
        for inner in template.values() if isinstance(template, dict) else template:
            yield from _placeholders(inner)
    elif placeholder(template):
        yield placeholder(template)


def _without_double_blanks(style: CallStyle) -> CallStyle:
    parts = {part: every(getattr(style, part)) for part in ("before", "begin", "end", "after", "key")}
    blanks = rf"(?:{regex.escape(BLANKS)})+"
    return _with(
        style, {part: tuple(regex.sub(blanks, BLANKS, text) for text in texts) for part, texts in parts.items()}
    )


def _with(style: CallStyle, changes: Mapping[str, Any]) -> CallStyle:
    """The style with other texts; a single one as itself."""
    return replace(style, **{part: texts[0] if len(texts) == 1 else texts for part, texts in changes.items()})


def _is_tag(text: str) -> bool:
    return text.count(KEY) == text.count(_VALUE) == 1 and text.index(KEY) < text.index(_VALUE)


def _fullest(texts: Sequence[str], *, at_end: bool) -> list[str]:
    """The texts without those to which the reader would add the first characters of a value, or the last ones."""
    unique = list(dict.fromkeys(texts))

    def is_part(text: str, other: str) -> bool:
        return text != other and (other.startswith(text) if at_end else other.endswith(text))

    return [text for text in unique if not any(is_part(text, other) for other in unique)]


def _stripped(text: str) -> str:
    return text.removeprefix(BLANKS).removesuffix(BLANKS)


def _spelled(what: str, given: Delimiter | str, holes: Mapping[str, str]) -> Spelled:
    pattern = given if isinstance(given, str) else str(given.pattern.pattern)
    if any(hole in pattern.replace("\\", "") for hole in _HOLES):
        raise StyleError(f"has {what} with a word in braces")
    try:
        found = spelled(pattern, holes)
    except PatternError as error:
        raise StyleError(f"has {what} with {error}, of which no grammar is made") from None
    for text in found.texts:
        parts = regex.split(rf"({regex.escape(NAME)}|{regex.escape(WORD)}|{regex.escape(DIGITS)})", text)
        if any(not between for between in parts[2:-1:2]):
            raise StyleError(f"has {what} with a name that has no border")
    return found


def _usable(found: Spelled, *, is_one: bool) -> tuple[str, ...]:
    """Texts that may be written: those of the beginning of an answer only where nothing comes before."""
    texts = [text.removeprefix(FIRST) if is_one else text for text in found.texts]
    usable = tuple(dict.fromkeys(text for text in texts if FIRST not in text and LAST not in text))
    if not usable:
        raise StyleError("has a delimiter that no text is")
    return usable
