"""Separates the text of a model's answer into channels as it arrives: reasoning, content and calls of tools. Pure.

Invariants:
  * The parts depend on the text so far, not on how it was cut into pieces.
  * No text is lost. Text outside reasoning and calls is content, and so is a call that breaks its form before it
    begins, with its delimiters. If a call breaks its form later, the text stays in its arguments, or is content behind
    the call. Only blanks around reasoning, content and calls are left out, as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from router.answers.channels.calls import CallPart, CallRegion, ToolSchemas, call_region
from router.answers.channels.markers import UNMARKED
from router.answers.channels.regions import RegionEnd, RegionEvent, Regions, RegionStart, RegionText
from router.answers.channels.template import CALLS_FIELD, CONTENT_FIELD, REASONING_FIELDS, Field, ResponseTemplate

# Characters that are dropped if a call leaves nothing else around it.
_SYNTAX: Final = " \t\r\n,]}"


class Channel(Enum):
    """Channels of an assistant's message."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChannelPart(NamedTuple):
    """The next text of a channel. For a call: its number, and its name in the call's first part."""

    channel: Channel
    text: str
    call: int = 0
    name: str = ""


@dataclass(slots=True)
class _Text:
    """Text of one channel, without the blanks around it."""

    has_any: bool = False
    waiting: str = ""

    def begin_region(self, field: Field | None) -> None:
        """Begins another region of the channel."""
        if self.has_any and field is not None and field.join is not None:
            self.waiting = field.join if field.strips else self.waiting + field.join

    def push(self, text: str, field: Field | None, *, is_first: bool) -> str:
        """Adds text. Returns the text so far, without blanks that may be the last ones."""
        if field is not None and not field.strips:
            self.has_any, text, self.waiting = True, self.waiting + text, ""
            return text
        if not self.has_any or (is_first and field is not None and field.join is not None):
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self.waiting += text
            return ""
        self.has_any, out, self.waiting = True, self.waiting + body, text[len(body) :]
        return out


class ResponseParser:
    """Reads the text of one answer.

    Args:
        template: response template of the model.
        tools: tools of the request; None for none, and then text that looks like a call is content.
        separates_reasoning: True if reasoning is a channel; False makes it content.
        opening: text of the answer that the prompt ends with; it is read, and its parts are dropped.
        keeps_blanks: True if blanks around content are part of it, except those behind reasoning.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        tools: ToolSchemas | None,
        separates_reasoning: bool,
        opening: str = "",
        keeps_blanks: bool = False,
    ) -> None:
        left_out: Collection[str] = () if separates_reasoning else REASONING_FIELDS
        if tools is None:
            left_out = {*left_out, CALLS_FIELD}
        self._regions = Regions(template.without(left_out))
        self._tools = ToolSchemas({}) if tools is None else tools
        self._texts = {channel: _Text() for channel in (Channel.REASONING, Channel.CONTENT)}
        self._keeps_blanks = keeps_blanks
        self._call: CallRegion | None = None
        self._delimiter = ""
        self._is_first = True
        self._calls_before = 0
        self._ends_with_call = False
        self.num_calls = 0
        if opening:
            self.push(opening)
            self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning."""
        current = self._regions.current
        return current is not None and current.name in REASONING_FIELDS

    @property
    def has_had_call(self) -> bool:
        """True if a call is complete, or its region ended without all its arguments."""
        return self.num_calls > 0 and (self._call is None or self._call.is_whole or self._calls_before > 0)

    @property
    def ends_with_call(self) -> bool:
        """True if the answer so far ends with a complete call."""
        return self._ends_with_call

    def push(self, text: str) -> list[ChannelPart]:
        """Reads the next piece of the answer. Returns its parts."""
        return merged(part for event in self._regions.push(text) for part in self._parts(event))

    def finish(self, *, is_cut: bool = False, token: str = "") -> list[ChannelPart]:
        """Ends the answer. Returns the parts that were held back; arguments as in `Regions.finish`."""
        events = self._regions.finish(is_cut=is_cut, token=token)
        return merged(part for event in events for part in self._parts(event))

    def _parts(self, event: RegionEvent) -> list[ChannelPart]:
        match event:
            case RegionStart():
                return self._open(event)
            case RegionText():
                return self._within(event.field, event.text)
            case RegionEnd():
                return self._close(event)

    def _open(self, event: RegionStart) -> list[ChannelPart]:
        self._is_first = True
        if event.field.name == CALLS_FIELD:
            self._call, self._delimiter, self._calls_before = (
                call_region(event, self._tools),
                event.delimiter,
                self.num_calls,
            )
            return []
        self._texts[_channel(event.field)].begin_region(event.field)
        return [] if _is_known(event.field) else self._text(None, event.delimiter)

    def _within(self, field: Field | None, text: str) -> list[ChannelPart]:
        if field is not None and field.name == CALLS_FIELD:
            assert self._call is not None
            return self._calls(self._call.push(text))
        return self._text(field, text)

    def _close(self, event: RegionEnd) -> list[ChannelPart]:
        if event.field.name != CALLS_FIELD:
            return [] if _is_known(event.field) else self._text(None, event.delimiter or "")
        assert self._call is not None
        region, self._call = self._call, None
        parts = self._calls(region.finish(event))
        left = region.left
        if self.num_calls == self._calls_before:
            left = self._delimiter + left + (event.delimiter or "") if left.strip() or self._delimiter.strip() else ""
        else:
            self._ends_with_call = region.is_whole
            left = left if left.strip(_SYNTAX) else ""
        return [*parts, *(self._text(None, left) if left.strip() else [])]

    def _calls(self, found: list[CallPart]) -> list[ChannelPart]:
        parts = []
        for name, arguments in found:
            self.num_calls += bool(name)
            self._ends_with_call = False
            parts.append(ChannelPart(Channel.CALL, _plain(arguments), self.num_calls - 1, _plain(name)))
        return parts

    def _text(self, field: Field | None, text: str) -> list[ChannelPart]:
        channel = Channel.CONTENT if field is None else _channel(field)
        if self._keeps_blanks and channel is Channel.CONTENT:
            out = self._kept(text)
        else:
            out = self._texts[channel].push(text, field, is_first=self._is_first)
        if not out:
            return []
        self._is_first = False
        self._ends_with_call = False
        return [ChannelPart(channel, _plain(out))]

    def _kept(self, text: str) -> str:
        """Returns content unchanged, except for blanks between reasoning and content."""
        content = self._texts[Channel.CONTENT]
        if self._texts[Channel.REASONING].has_any and not content.has_any:
            text = text.lstrip()
        content.has_any |= bool(text)
        return text


def _plain(text: str) -> str:
    return text.translate(UNMARKED)


def _is_known(field: Field) -> bool:
    return field.name == CONTENT_FIELD or field.name in REASONING_FIELDS


def _channel(field: Field) -> Channel:
    return Channel.REASONING if field.name in REASONING_FIELDS else Channel.CONTENT


def merged(parts: Iterable[ChannelPart]) -> list[ChannelPart]:
    """Merges neighbouring parts of one channel, or of one call."""
    merged: list[ChannelPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.channel is part.channel and last.call == part.call and not part.name:
            merged[-1] = last._replace(text=last.text + part.text)
        else:
            merged.append(part)
    return merged
