"""Rules of a GBNF grammar, and facts about their texts: whether any exist, their first bytes, the bytes after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from common.constraints.gbnf.reader import (
    EMPTY,
    MAX_DEPTH,
    Chars,
    Choice,
    GbnfError,
    Node,
    NodeSequence,
    Ref,
    Repeat,
    SpecialToken,
    children,
)

T = TypeVar("T")
# Most character positions in one terminal.
MOST_POSITIONS: Final = 4096
# Most visits to nodes for one grammar, about a microsecond each.
_MOST_LOOKS: Final = 3_000_000
# Represents the first byte of a special token: no text has the byte 0xFF.
_TOKEN_BYTE: Final = 1 << 0xFF
# Per length in UTF-8: first and last code point, the first byte's marker, and the bits that this byte leaves out.
_LENGTHS: Final = ((0, 0x7F, 0, 0), (0x80, 0x7FF, 0xC0, 6), (0x800, 0xFFFF, 0xE0, 12), (0x10000, 0x10FFFF, 0xF0, 18))


class TooMuchWorkError(Exception):
    """A question about a grammar takes more looks than are allowed."""


class Looks:
    """Bounds the work for a grammar by a count of looks, so that the outcome does not depend on a clock."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, number: int) -> None:
        """Counts steps of the search against its limit.

        Raises:
            TooMuchWorkError: there are more than `most` in all.
        """
        self._left -= number
        if self._left < 0:
            raise TooMuchWorkError


class Size(NamedTuple):
    """Size of a node without recursion: its character positions, and the depth of its nested nodes and rules."""

    positions: int
    depth: int


class Rules:
    """The rules of a grammar, without rules and alternatives that never reach an end.

    Args:
        rules: by name.
        start: name of the rule that the grammar begins with.

    Attributes:
        sizes: by node; None for one that is recursive, has a special token, or is too large for a terminal.
        is_nullable: by node, True if the empty text is one of its texts.
        first: by node, the bytes that its texts begin with, one bit each.
        follow: by node that the start refers to, the bytes that may follow its texts.

    Raises:
        GbnfError: no text satisfies the grammar, or finding this out takes too much work.
    """

    def __init__(self, rules: Mapping[str, Node], start: str) -> None:
        self._looks = Looks(_MOST_LOOKS)
        self.start = start
        self.rules = dict(rules)
        try:
            ends = self._least(_has_end, False)
            if not ends[self.rules[start]]:
                raise GbnfError("no text satisfies it")
            self.rules = {name: _pruned(node, ends) for name, node in self.rules.items() if ends[node]}
            self.sizes = self._least(_size, None)
            self.is_nullable = self._least(_is_nullable, False)
            self.first = self._least(self._first, 0)
            self.follow = self._follow()
        except TooMuchWorkError:
            raise GbnfError("its rules refer to each other in too many ways") from None

    def inner(self, node: Node) -> tuple[Node, ...]:
        """Nodes directly inside a node; for a reference, the body of its rule."""
        return (self.rules[node.name],) if isinstance(node, Ref) else children(node)

    def _least(self, value: Callable[[Node, list[T]], T], bottom: T) -> dict[Node, T]:
        """Least fixed point, by node, of a value that `value` computes from the values of the inner nodes."""
        found: dict[Node, T] = {}
        outer: dict[Node, list[Node]] = {}
        for name in reversed(self.rules):
            for node in _inner_first(self.rules[name]):
                found[node] = bottom
                for inner in self.inner(node):
                    outer.setdefault(inner, []).append(node)
        waiting, is_waiting = deque(found), set(found)
        while waiting:
            is_waiting.discard(node := waiting.popleft())
            inner_nodes = self.inner(node)
            self._looks.take(1 + len(inner_nodes))
            if (new := value(node, [found[inner] for inner in inner_nodes])) == found[node]:
                continue
            found[node] = new
            for above in outer.get(node, ()):
                if above not in is_waiting:
                    waiting.append(above)
                    is_waiting.add(above)
        return found

    def _first(self, node: Node, inner: list[int]) -> int:
        if isinstance(node, Chars):
            return first_bytes(node)
        if isinstance(node, SpecialToken):
            return _TOKEN_BYTE
        found = 0
        for item, first in zip(self.inner(node), inner, strict=True):
            found |= first
            if isinstance(node, NodeSequence) and not self.is_nullable[item]:
                break
        return found

    def _follow(self) -> dict[Node, int]:
        begin = self.rules[self.start]
        found, waiting = {begin: 0}, deque([begin])
        while waiting:
            node = waiting.popleft()
            for inner, follow in self._inner_follow(node, found[node]):
                self._looks.take(1)
                known = found.get(inner)
                if known is None or follow & ~known:
                    found[inner] = follow | (known or 0)
                    waiting.append(inner)
        return found

    def _inner_follow(self, node: Node, follow: int) -> Iterator[tuple[Node, int]]:
        if isinstance(node, NodeSequence):
            for item in reversed(node.items):
                yield item, follow
                follow = self.first[item] | (follow if self.is_nullable[item] else 0)
            return
        if is_looping(node):
            follow |= self.first[node]
        yield from ((inner, follow) for inner in self.inner(node))


def is_looping(node: Node) -> bool:
    """True if one text of the node's item may follow another."""
    return isinstance(node, Repeat) and (node.most is None or node.most > 1)


def first_bytes(chars: Chars) -> int:
    """The bytes that characters begin with in UTF-8, one bit each."""
    found = 0
    for first, last in chars.ranges:
        for least, most, begin, shift in _LENGTHS:
            low, high = max(first, least), min(last, most)
            if low <= high:
                bits = (high >> shift) - (low >> shift) + 1
                found |= ((1 << bits) - 1) << (begin | low >> shift)
    return found


def _inner_first(node: Node) -> Iterator[Node]:
    """A node and all nodes inside it, inner ones first; references are not followed."""
    found, waiting = [], [node]
    while waiting:
        found.append(one := waiting.pop())
        waiting += children(one)
    return reversed(found)


def _has_end(node: Node, inner: list[bool]) -> bool:
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Repeat) and node.least == 0:
        return True
    return any(inner) if isinstance(node, Choice) else all(inner)


def _is_nullable(node: Node, inner: list[bool]) -> bool:
    if isinstance(node, Chars | SpecialToken):
        return False
    if isinstance(node, Repeat) and node.least == 0:
        return True
    return any(inner) if isinstance(node, Choice) else all(inner)


def _size(node: Node, inner: list[Size | None]) -> Size | None:
    if isinstance(node, Chars):
        return Size(1, 1)
    known = [size for size in inner if size is not None]
    if isinstance(node, SpecialToken) or len(known) < len(inner):
        return None
    size = Size(sum(one.positions for one in known), 1 + max((one.depth for one in known), default=0))
    return size if size.positions <= MOST_POSITIONS and size.depth <= MAX_DEPTH else None


def _pruned(node: Node, ends: Mapping[Node, bool]) -> Node:
    """Removes the alternatives and repetitions that never reach an end from a node that reaches one."""
    if isinstance(node, NodeSequence) and node.items:
        return NodeSequence(tuple(_pruned(item, ends) for item in node.items))
    if isinstance(node, Choice):
        items = tuple(_pruned(item, ends) for item in node.items if ends[item])
        return items[0] if len(items) == 1 else Choice(items)
    if isinstance(node, Repeat):
        if node.most == 0 or not ends[node.item]:
            return EMPTY
        return Repeat(_pruned(node.item, ends), node.least, node.most)
    return node
