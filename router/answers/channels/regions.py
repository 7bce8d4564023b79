"""Finds the regions of a response as its text arrives (`router.answers.channels.template`).

Invariant: the events depend on the text so far, not on how it was cut into pieces. Text is held back exactly while it
may begin a delimiter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any, Final, TypeAlias

from router.answers.channels.template import Delimiter, Field

# Characters kept in front of the current place, since a pattern may look behind.
_BEHIND: Final = 256
_LONGEST: Final = 4096


@dataclass(frozen=True, slots=True)
class RegionStart:
    """A region begins, with its delimiter and the delimiter's named groups."""

    field: Field
    delimiter: str = ""
    captures: Mapping[str, str] = attribute(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegionText:
    """Next text of a region; `field` is None outside all regions."""

    field: Field | None
    text: str


@dataclass(frozen=True, slots=True)
class RegionEnd:
    """A region ends, with its delimiter and the delimiter's groups, or without one at the end of the text."""

    field: Field
    delimiter: str | None = None
    captures: Mapping[str, str] = attribute(default_factory=dict)
    is_cut: bool = False


RegionEvent: TypeAlias = RegionStart | RegionText | RegionEnd


@dataclass(frozen=True, slots=True)
class _DelimiterMatch:
    """A delimiter in the text, with its sort key: the first one wins, and the longest of several at one place."""

    key: tuple[int, int, int, str]
    field: Field
    match: Any
    opens: bool


class Regions:
    """Finds the regions of one text.

    Args:
        fields: fields of the template, by name.

    Attributes:
        current: field of the next text; None outside all regions.
    """

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields
        self._implicit = next((field for field in fields.values() if field.open is None), None)
        self.current = self._implicit
        self._text = ""
        self._at = 0
        self._is_open = False

    def push(self, text: str) -> list[RegionEvent]:
        """Adds the next piece of the text. Returns the events that it causes."""
        self._forget()
        self._text += text
        return self._advance(final=False)

    def finish(self, *, is_cut: bool = False, token: str = "") -> list[RegionEvent]:
        """Ends the text. Returns the last events.

        Args:
            is_cut: True if the answer was cut at its length limit.
            token: text of the token that ended the answer. It may end a region, and is dropped otherwise.
        """
        self._text += token
        events = self._advance(final=True)
        self._pass_on(events, len(self._text))
        last = events[-1] if events else None
        if token and isinstance(last, RegionText) and last.text.endswith(token):
            events[-1] = RegionText(last.field, last.text.removesuffix(token))
        self._close(events, None, is_cut=is_cut)
        return events

    def _forget(self) -> None:
        """Drops text that no pattern looks at any more."""
        if self._at > _LONGEST:
            self._text, self._at = self._text[self._at - _BEHIND :], _BEHIND

    def _advance(self, *, final: bool) -> list[RegionEvent]:
        events: list[RegionEvent] = []
        while True:
            found, hold = self._next(final=final)
            if found is None:
                self._pass_on(events, hold)
                return events
            self._pass_on(events, found.match.start())
            self._at = found.match.end()
            if found.opens:
                self._close(events, None)
                self._open(events, found)
            else:
                was_open = self._is_open
                self._close(events, found.match)
                if not was_open and found.match.start() == found.match.end():
                    # An empty match would be found here again and again.
                    self._pass_on(events, hold)
                    return events

    def _next(self, *, final: bool) -> tuple[_DelimiterMatch | None, int]:
        """Returns the next certain delimiter, and the place in front of which no more text can create one."""
        best: _DelimiterMatch | None = None
        hold = len(self._text)
        for field_, delimiter, opens in self._watched():
            match = delimiter.search(self._text, self._at, final=final)
            if match is None:
                continue
            if not final and (match.partial or delimiter.may_change(self._text, match)):
                hold = min(hold, match.start())
                continue
            key = (match.start(), match.start() - match.end(), 0 if opens else 1, field_.name)
            if best is None or key < best.key:
                best = _DelimiterMatch(key, field_, match, opens)
        if best is not None and best.match.start() >= hold:
            best = None
        return best, hold

    def _watched(self) -> list[tuple[Field, Delimiter, bool]]:
        """Returns the delimiters that may be next, and whether each opens a region."""
        current, implicit = self.current, self._implicit
        if current is not None and current is not implicit:
            return [] if current.close is None else [(current, current.close, False)]
        watched = [(each, each.open, True) for each in self._fields.values() if each.open is not None]
        if implicit is not None and implicit.close is not None:
            watched.append((implicit, implicit.close, False))
        return watched

    def _pass_on(self, events: list[RegionEvent], end: int) -> None:
        if end <= self._at:
            return
        if not self._is_open and self.current is not None:
            events.append(RegionStart(self.current))
            self._is_open = True
        events.append(RegionText(self.current, self._text[self._at : end]))
        self._at = end

    def _open(self, events: list[RegionEvent], found: _DelimiterMatch) -> None:
        self.current, self._is_open = found.field, True
        events.append(RegionStart(found.field, found.match[0], _captures(found.match)))

    def _close(self, events: list[RegionEvent], match: Any, *, is_cut: bool = False) -> None:
        if self.current is not None and self._is_open:
            delimiter = None if match is None else match[0]
            events.append(RegionEnd(self.current, delimiter, {} if match is None else _captures(match), is_cut))
        self.current, self._is_open = self._implicit, False


def _captures(match: Any) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None}
