"""Finds rules of a Lark grammar that never reach an end, such as `list: item list`.

An answer that enters such a rule can only run to its last token. A grammar with a construct that is not read here
counts as reaching an end. The library reports all other faults of a grammar.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from common.json_text import JsonError, end_of_value

_PIECE: Final = re.compile(
    r"(?P<skip>[ \t]+|//[^\n]*|#[^\n]*)|(?P<line>\r?\n)|(?P<json>%(?:json|regex)\b\s*)|(?P<nested>%lark\b\s*\{)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[imslux]*|<[^<>\s]+>|@[\w-]+|0[xX][0-9a-fA-F]+|[+-]?[0-9]+)'
    r"|(?P<name>[!?_]*[a-z][a-z0-9_-]*)|(?P<token>_?[A-Z][A-Z0-9_-]*)|(?P<mark>->|\.\.|::|.)",
)


_CLOSING: Final = {"(": ")", "[": "]"}
_END: Final = ("line", "\n", 0)


class _UnreadError(Exception):
    """A grammar has a construct that is not read here."""


@dataclass(slots=True)
class _Rule:
    """A rule: its index in the text, and for each alternative the names of the rules that it needs.

    A group is a rule of its own, without an index.
    """

    at: int = -1
    needs: list[set[str]] = field(default_factory=list)


def endless_rule(text: str) -> tuple[str, int] | None:
    """Name and index of the first rule that never reaches an end; None if there is none, or if that is unknown."""
    try:
        rules = _RuleReader(text).rules()
    except _UnreadError:
        return None
    ending = _ending(rules)
    found = [(rule.at, name) for name, rule in rules.items() if name not in ending and rule.at >= 0]
    return min(found)[::-1] if found else None


def _ending(rules: dict[str, _Rule]) -> set[str]:
    """Names of the rules with an alternative whose rules all reach an end."""
    # For each alternative: its rule, and how many of the rules that it needs are not known to end.
    open_needs: list[tuple[str, int]] = []
    users: dict[str, list[int]] = {}
    ending, waiting = set[str](), deque[str]()
    for name, rule in rules.items():
        for alternative in rule.needs:
            needs = alternative & rules.keys()
            for needed in needs:
                users.setdefault(needed, []).append(len(open_needs))
            open_needs.append((name, len(needs)))
            if not needs:
                waiting.append(name)
    while waiting:
        if (name := waiting.popleft()) in ending:
            continue
        ending.add(name)
        for i in users.get(name, ()):
            outer, left = open_needs[i]
            open_needs[i] = (outer, left - 1)
            if left == 1:
                waiting.append(outer)
    return ending


class _RuleReader:
    """Parser of a grammar's rules; each group becomes a rule of its own."""

    def __init__(self, text: str) -> None:
        self._pieces = list(_pieces(text))
        self._at = 0
        self._rules: dict[str, _Rule] = {}

    def rules(self) -> dict[str, _Rule]:
        while self._at < len(self._pieces):
            kind, text, begin = self._next()
            if kind == "line":
                continue
            if kind == "name":
                name = text.lstrip("!?")
                if name in self._rules:
                    raise _UnreadError
                self._skip_to(":")
                self._rules[name] = _Rule(begin)
                self._rules[name].needs = self._choice()
            elif kind == "token" or text == "%":
                self._skip_statement()
            else:
                raise _UnreadError
        return self._rules

    def _choice(self) -> list[set[str]]:
        """Parses alternatives, up to a line end that no further alternative follows."""
        # For each open bracket: the bracket that closes it, and its alternatives.
        groups: list[tuple[str, list[set[str]]]] = [("", [set()])]
        while True:
            kind, text, _ = self._next() if self._at < len(self._pieces) or len(groups) > 1 else _END
            closing, alternatives = groups[-1]
            if kind == "line":
                if len(groups) == 1 and not self._goes_on():
                    return alternatives
            elif text in _CLOSING:
                groups.append((_CLOSING[text], [set()]))
            elif text == closing:
                groups.pop()
                self._add_group(closing, alternatives, groups[-1][1][-1])
            elif text == "|":
                alternatives.append(set())
            else:
                self._add_item(kind, text, alternatives[-1])

    def _add_group(self, closing: str, alternatives: list[set[str]], needs: set[str]) -> None:
        name = f"({len(self._rules)}"
        self._rules[name] = _Rule(needs=alternatives)
        if not self._is_optional() and closing == ")":
            needs.add(name)

    def _add_item(self, kind: str, text: str, needs: set[str]) -> None:
        if text == "->":
            self._next()
        elif kind not in ("name", "text", "token"):
            raise _UnreadError
        elif not self._is_optional() and kind == "name":
            needs.add(text.lstrip("!?"))

    def _is_optional(self) -> bool:
        """True if the last item may be left out; reads the repetition after the item, if there is one."""
        mark = self._pieces[self._at][1] if self._at < len(self._pieces) else ""
        if mark in ("*", "?", "+"):
            self._at += 1
            return self._is_optional() or mark != "+"
        if mark == "~":
            self._at += 1
            least = self._next()[1]
            if self._at < len(self._pieces) and self._pieces[self._at][1] == "..":
                self._at += 2
            return _is_none(least)
        if mark == "{":
            self._at += 1
            least = self._next()[1]
            while self._next()[1] != "}":
                pass
            return least == "," or _is_none(least)
        return False

    def _goes_on(self) -> bool:
        """True if the next line that is not empty begins with `|`; then moves there."""
        at = self._at
        while at < len(self._pieces) and self._pieces[at][0] == "line":
            at += 1
        goes_on = at < len(self._pieces) and self._pieces[at][1] == "|"
        self._at = at if goes_on else self._at
        return goes_on

    def _next(self) -> tuple[str, str, int]:
        if self._at >= len(self._pieces):
            raise _UnreadError
        self._at += 1
        return self._pieces[self._at - 1]

    def _skip_to(self, mark: str) -> None:
        while (piece := self._next())[1] != mark:
            # A rule with parameters: its alternatives may have conditions.
            if piece[1] in ("::", "{") or piece[0] == "line":
                raise _UnreadError

    def _skip_statement(self) -> None:
        """Skips a terminal or an instruction, and the lines of its further alternatives."""
        level = 0
        while self._at < len(self._pieces):
            kind, text, _ = self._next()
            if text in ("/", '"'):
                raise _UnreadError
            level += (text in ("(", "[")) - (text in (")", "]"))
            if kind == "line" and level <= 0 and not self._goes_on():
                return


def _is_none(least: str) -> bool:
    if not least.isdecimal():
        raise _UnreadError
    return not least.strip("0")


def _pieces(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            raise _UnreadError
        at, kind = found.end(), found.lastgroup or ""
        if kind == "json":
            try:
                at = end_of_value(text, at)
            except JsonError:
                raise _UnreadError from None
            yield "text", "{}", found.start()
        elif kind == "nested":
            at = _end_of_nested(text, at)
            yield "text", "{}", found.start()
        elif kind != "skip":
            yield kind, found[0], found.start()


def _end_of_nested(text: str, at: int) -> int:
    """The index after the bracket that closes a nested grammar; brackets inside strings do not count."""
    level = 1
    while level:
        found = _PIECE.match(text, at)
        if found is None:
            raise _UnreadError
        at = found.end()
        if found.lastgroup == "json":
            try:
                at = end_of_value(text, at)
            except JsonError:
                raise _UnreadError from None
        elif found.lastgroup == "nested":
            level += 1
        elif found.lastgroup == "mark":
            level += (found[0] == "{") - (found[0] == "}")
    return at
