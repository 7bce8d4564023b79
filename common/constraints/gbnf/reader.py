"""Reader of GBNF, the grammars of llama.cpp: rules of sequences, choices and repetitions of characters.

A text is one of the grammar's if any reading of its characters is: rules never claim the longest text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from common.constraints.faults import place

ROOT: Final = "root"
# Most nested brackets and most nested nodes: recursion over a rule has room for these.
_MAX_BRACKETS: Final = 60
MAX_DEPTH: Final = 200
# Most times of one repetition: more than any answer has characters.
MAX_TIMES: Final = 1_000_000
_LAST_CHARACTER: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER: Final = re.compile(r"[0-9]+")
_TOKEN: Final = re.compile(r"<\[[0-9]{1,9}\]>|<[^<>\s\[\]][^<>\s]*>")
_SPACE: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_ESCAPED: Final = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
# Number of hex digits of each kind of escape.
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_TIMES: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GbnfError(Exception):
    """A text is not GBNF, or has a construct that is not supported; one line, with line and column if known."""


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character out of ranges of code points, both ends included; sorted, without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SpecialToken:
    """A token of the model, as `<name>` or `<[id]>`."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A reference to rule `name`, at index `at` of the grammar's text."""

    name: str
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class NodeSequence:
    """Nodes one after another; the empty text if `items` is empty."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Alternatives, any one of which may be taken."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """`item` repeated `least` to `most` times; None means without a maximum."""

    item: Node
    least: int
    most: int | None


Node: TypeAlias = "Chars | SpecialToken | Ref | NodeSequence | Choice | Repeat"
EMPTY: Final = NodeSequence(())


def children(node: Node) -> tuple[Node, ...]:
    """Nodes directly inside a node; a reference has none."""
    if isinstance(node, NodeSequence | Choice):
        return node.items
    return (node.item,) if isinstance(node, Repeat) else ()


def parsed(text: str, special: Collection[str] | None = None) -> dict[str, Node]:
    """Parses a grammar: its rules by name, in their order.

    Args:
        text: a grammar.
        special: names of the model's special tokens; None for any.

    Raises:
        GbnfError: the text is not GBNF, has an unsupported construct, or refers to a rule that it does not define.
    """
    return _GrammarReader(text, special).rules()


class _GrammarReader:
    """Parser of one grammar; `at` is its position in the text."""

    def __init__(self, text: str, special: Collection[str] | None) -> None:
        self.text = text
        self.special = special
        self.at = 0
        self.depth = 0
        self.refs: list[Ref] = []
        self.levels: dict[Node, int] = {}

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            begin = self.at
            name = self._token(_NAME, "the name of a rule")
            if name in found:
                self._refuse(f"rule {name!r} is defined twice", begin)
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            found[name] = self._choice(in_brackets=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                self._refuse(f"unexpected {self.text[self.at]!r}")
            self._skip(_SPACE_AND_LINES)
        for ref in self.refs:
            if ref.name not in found:
                self._refuse(f"there is no rule {ref.name!r}", ref.at)
        if ROOT not in found:
            raise GbnfError(f"there is no rule {ROOT!r}, which a grammar begins with")
        return found

    def _choice(self, *, in_brackets: bool) -> Node:
        begin = self.at
        items = [self._sequence(in_brackets)]
        while self._took("|"):
            self._skip(_SPACE_AND_LINES)
            items.append(self._sequence(in_brackets))
        return items[0] if len(items) == 1 else self._made(Choice(tuple(items)), begin)

    def _sequence(self, in_brackets: bool) -> Node:
        begin = self.at
        items: list[Node] = []
        while (item := self._item(items, in_brackets)) is not None:
            items.append(item)
            self._skip(_SPACE_AND_LINES if in_brackets else _SPACE)
        return items[0] if len(items) == 1 else self._made(NodeSequence(tuple(items)), begin)

    def _item(self, before: list[Node], in_brackets: bool) -> Node | None:
        """Parses the next item; None at the end. A repetition removes the last item of `before` and repeats it."""
        char = self.text[self.at : self.at + 1]
        if char in ("*", "+", "?", "{"):
            begin, (least, most) = self.at, self._times(in_brackets)
            if not before or before[-1] is EMPTY:
                self._refuse("there is nothing to repeat", begin)
            return self._made(Repeat(before.pop(), least, most), begin)
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == "(":
            return self._brackets()
        if char == ".":
            self.at += 1
            return Chars(_without_surrogates([(0, _LAST_CHARACTER)]))
        if char == "!":
            self._refuse("'!' is not supported: no text is confined by tokens that it does not have")
        if char == "<":
            return self._special_token()
        if char and _NAME.match(char):
            begin = self.at
            self.refs.append(ref := Ref(self._token(_NAME, "a name"), begin))
            return ref
        return None

    def _special_token(self) -> Node:
        begin = self.at
        name = self._token(_TOKEN, "a token as <name> or <[id]>")
        if self.special is not None and not name.startswith("<[") and name not in self.special:
            self._refuse(f"unknown special token {name!r}", begin)
        return SpecialToken(name)

    def _brackets(self) -> Node:
        begin = self.at
        self.depth += 1
        if self.depth > _MAX_BRACKETS:
            self._refuse(f"it is nested too deeply: at most {_MAX_BRACKETS} brackets", begin)
        self.at += 1
        self._skip(_SPACE_AND_LINES)
        inner = self._choice(in_brackets=True)
        if not self._took(")"):
            self._refuse("the bracket is not closed", begin)
        self.depth -= 1
        return NodeSequence((inner,)) if inner is EMPTY else inner

    def _times(self, in_brackets: bool) -> tuple[int, int | None]:
        begin = self.at
        if (times := _TIMES.get(self.text[begin])) is not None:
            self.at += 1
            return times
        space = _SPACE_AND_LINES if in_brackets else _SPACE
        self.at += 1
        self._skip(space)
        least = self._number()
        most: int | None = least
        self._skip(space)
        if self._took(","):
            self._skip(space)
            most = self._number() if _NUMBER.match(self.text, self.at) else None
            self._skip(space)
        self._expect("}")
        if most is not None and most < least:
            self._refuse(f"{least} to {most} times is no number of times", begin)
        return least, most

    def _made(self, node: Node, at: int) -> Node:
        """Records how deeply a node is nested, and returns the node."""
        levels = 1 + max((self.levels.get(inner, 1) for inner in children(node)), default=0)
        if levels > MAX_DEPTH:
            self._refuse(f"it is nested too deeply: at most {MAX_DEPTH} levels", at)
        self.levels[node] = levels
        return node

    def _literal(self) -> Node:
        begin = self.at
        self.at += 1
        points: list[int] = []
        while not self._took('"'):
            at = self.at
            points.append(point := self._character(begin))
            if point > _LAST_CHARACTER or _SURROGATES[0] <= point <= _SURROGATES[1]:
                self._refuse("this number is no character", at)
        if not points:
            return EMPTY
        chars = tuple(Chars(((point, point),)) for point in points)
        return chars[0] if len(chars) == 1 else NodeSequence(chars)

    def _class(self) -> Node:
        begin = self.at
        self.at += 1
        negated = self._took("^")
        ranges: list[tuple[int, int]] = []
        while not self._took("]"):
            first = last = self._character(begin)
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._character(begin)
            ranges.append((first, last))
        # As in llama.cpp, a class without characters is the empty text, negated or not.
        if not ranges:
            return EMPTY
        ranges = _merged(ranges)
        return Chars(_without_surrogates(_complement(ranges) if negated else ranges))

    def _character(self, begin: int) -> int:
        """The code point of one character of a literal or class that begins at an index."""
        char = self.text[self.at : self.at + 1]
        if not char:
            self._refuse("it is not closed", begin)
        self.at += 1
        if char != "\\":
            return ord(char)
        at, escape = self.at - 1, self.text[self.at : self.at + 1]
        self.at += 1
        if escape in _ESCAPED:
            return ord(_ESCAPED[escape])
        digits = self.text[self.at : self.at + _HEX_DIGITS.get(escape, 0)]
        if len(digits) != _HEX_DIGITS.get(escape) or not re.fullmatch("[0-9A-Fa-f]+", digits):
            self._refuse(f"unknown escape {self.text[at : at + 2]!r}", at)
        self.at += len(digits)
        return int(digits, 16)

    def _number(self) -> int:
        begin = self.at
        digits = self._token(_NUMBER, "a number")
        if len(digits.lstrip("0")) > len(str(MAX_TIMES)) or int(digits) > MAX_TIMES:
            self._refuse(f"at most {MAX_TIMES} times are served", begin)
        return int(digits)

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _token(self, kind: re.Pattern[str], what: str) -> str:
        found = kind.match(self.text, self.at)
        if found is None:
            self._refuse(f"expected {what}")
        self.at = found.end()
        return found[0]

    def _took(self, char: str) -> bool:
        if self.text[self.at : self.at + 1] != char:
            return False
        self.at += 1
        return True

    def _expect(self, what: str) -> None:
        if not self.text.startswith(what, self.at):
            self._refuse(f"expected {what!r}")
        self.at += len(what)

    def _refuse(self, why: str, at: int | None = None) -> NoReturn:
        raise GbnfError(f"{place(self.text, self.at if at is None else at)}: {why}")


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges that neither overlap nor touch; a range that ends before it begins is dropped."""
    made: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        last = min(end, _LAST_CHARACTER)
        if last < first:
            continue
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return made


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made, begin = [], 0
    for first, last in ranges:
        if begin < first:
            made.append((begin, first - 1))
        begin = last + 1
    return [*made, (begin, _LAST_CHARACTER)] if begin <= _LAST_CHARACTER else made


def _without_surrogates(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    made: list[tuple[int, int]] = []
    for first, last in ranges:
        made += [
            (low, high)
            for low, high in ((first, min(last, _SURROGATES[0] - 1)), (max(first, _SURROGATES[1] + 1), last))
            if low <= high
        ]
    return tuple(made)
