"""Terminals of a GBNF grammar: the parts that the library's lexer may read as one piece without changing the language.

That lexer takes the longest match of any terminal, and never a shorter one for the sake of what follows. So a part is a
terminal only if no byte that may follow one of its texts continues a terminal, itself included, that began with that
text. Single characters are always terminals. If this cannot be shown, a part is read character by character.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from common.constraints.gbnf.reader import Chars, Node, NodeSequence, Ref, Repeat
from common.constraints.gbnf.rules import MOST_POSITIONS, Looks, Rules, Size, TooMuchWorkError, first_bytes, is_looping

# Most pairs of positions compared for one grammar, about a microsecond each.
_MOST_LOOKS: Final = 1_000_000


class Run(NamedTuple):
    """Neighbours in `sequence`, from index `begin`, that form one terminal; or one node without a sequence."""

    items: tuple[Node, ...]
    sequence: NodeSequence | None = None
    begin: int = 0


class _Clash(NamedTuple):
    """Indices of a run's items: a shorter terminal may end in `item`, after which `next_item` continues the run."""

    item: int
    next_item: int


@dataclass(slots=True, eq=False)
class _Positions:
    """Character positions of a run, and which may follow which. A set of positions has one bit for each.

    Attributes:
        bytes: by position, the bytes that its characters begin with.
        items: by position, the item of the run that it is in.
        follow: by position, the positions that may follow it.
    """

    bytes: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    follow: list[int] = field(default_factory=list)
    first: int = 0
    last: int = 0
    begins: int = 0
    goes_on: int = 0
    _by_bytes: dict[int, int] = field(default_factory=dict)

    def overlapping(self, mask: int) -> int:
        """Positions whose characters may begin with one of the bytes of `mask`."""
        if mask not in self._by_bytes:
            self._by_bytes[mask] = sum(1 << i for i, own in enumerate(self.bytes) if own & mask)
        return self._by_bytes[mask]


class Terminals:
    """Decides which parts of a grammar are terminals."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._looks = Looks(_MOST_LOOKS)
        # Nodes that a clash keeps from being terminals, and (sequence, index) pairs before which a run ends.
        self._opened: set[Node] = set()
        self._cuts: set[tuple[NodeSequence, int]] = set()
        self._are_characters = False
        self._positions: dict[tuple[Node, ...], _Positions] = {}
        self._clashes: dict[tuple[_Positions, int, _Positions], _Clash | None] = {}
        try:
            while clashing := self._clashing():
                for run, clash in clashing:
                    self._cut(run, clash)
        except TooMuchWorkError:
            self._are_characters = True

    def is_terminal(self, node: Node) -> bool:
        """True if a node is read as one piece, alone or with its neighbours."""
        if self._are_characters:
            return isinstance(node, Chars)
        return self._rules.sizes[node] is not None and node not in self._opened

    def runs(self, sequence: NodeSequence) -> Iterator[Run]:
        """Splits a sequence into runs: neighbours that form one terminal, and each other item alone."""
        begin = positions = 0
        for i, item in enumerate(sequence.items):
            size = self._size(item)
            number = MOST_POSITIONS + 1 if size is None else size.positions
            is_cut = (sequence, i) in self._cuts or self._are_characters
            if i > begin and (is_cut or positions + number > MOST_POSITIONS):
                yield Run(sequence.items[begin:i], sequence, begin)
                begin, positions = i, 0
            positions += number
        if sequence.items:
            yield Run(sequence.items[begin:], sequence, begin)

    def _size(self, node: Node) -> Size | None:
        return self._rules.sizes[node] if self.is_terminal(node) else None

    def _terminals(self) -> Iterator[Run]:
        """All terminals of the grammar."""
        waiting, seen = [self._rules.rules[self._rules.start]], {self._rules.start}
        while waiting:
            node = waiting.pop()
            if isinstance(node, NodeSequence):
                for run in self.runs(node):
                    if self.is_terminal(run.items[0]):
                        yield run
                    else:
                        waiting += run.items
            elif self.is_terminal(node):
                yield Run((node,))
            elif not isinstance(node, Ref):
                waiting += self._rules.inner(node)
            elif node.name not in seen:
                seen.add(node.name)
                waiting += self._rules.inner(node)

    def _clashing(self) -> list[tuple[Run, _Clash]]:
        """Terminals that may continue where a shorter one may end, each with its clash."""
        users: dict[_Positions, list[Run]] = {}
        ends: dict[tuple[_Positions, int], None] = {}
        for run in self._terminals():
            positions = self._positions_of(run)
            users.setdefault(positions, []).append(run)
            ends[positions, self._rules.follow[run.items[-1]]] = None
        found = dict[_Positions, _Clash]()
        going_on: dict[int, list[_Positions]] = {}
        for shorter, follow in ends:
            if follow not in going_on:
                self._looks.take(len(users))
                going_on[follow] = [longer for longer in users if follow & longer.goes_on]
            for longer in going_on[follow]:
                self._looks.take(1)
                clash = self._clash(shorter, follow, longer) if shorter.begins & longer.begins else None
                if clash is not None:
                    found.setdefault(longer, clash)
        return [(run, clash) for positions, clash in found.items() for run in users[positions]]

    def _cut(self, run: Run, clash: _Clash) -> None:
        if run.sequence is None or len(run.items) == 1:
            self._opened.add(run.items[0])
        elif clash.item < clash.next_item:
            self._cuts.add((run.sequence, run.begin + clash.next_item))
        else:
            self._cuts.update((run.sequence, run.begin + clash.item + i) for i in (0, 1))

    def _clash(self, shorter: _Positions, follow: int, longer: _Positions) -> _Clash | None:
        key = (shorter, follow, longer)
        if key not in self._clashes:
            self._clashes[key] = self._searched(shorter, follow, longer)
        return self._clashes[key]

    def _searched(self, shorter: _Positions, follow: int, longer: _Positions) -> _Clash | None:
        """Walks both over the same text: by position of `shorter`, tracks the possible positions of `longer`."""
        goes_on = longer.overlapping(follow)
        reached: dict[int, int] = {}
        waiting = [(position, longer.first) for position in _bits(shorter.first)]
        while waiting:
            position, possible = waiting.pop()
            new = possible & longer.overlapping(shorter.bytes[position]) & ~reached.get(position, 0)
            self._looks.take(1 + new.bit_count())
            reached[position] = reached.get(position, 0) | new
            behind = 0
            for other in _bits(new):
                behind |= longer.follow[other]
                if shorter.last >> position & 1 and (hit := longer.follow[other] & goes_on):
                    return _Clash(longer.items[other], longer.items[next(_bits(hit))])
            if behind:
                waiting += [(after, behind) for after in _bits(shorter.follow[position])]
        return None

    def _positions_of(self, run: Run) -> _Positions:
        key = tuple(self._rules.rules[item.name] if isinstance(item, Ref) else item for item in run.items)
        if key not in self._positions:
            made = _Positions()
            _, made.first, made.last = self._joined(made, key, whose=None)
            made.begins = _union(made.bytes, made.first)
            made.goes_on = _union(made.bytes, _union(made.follow, (1 << len(made.follow)) - 1))
            self._positions[key] = made
        return self._positions[key]

    def _joined(self, made: _Positions, items: tuple[Node, ...], whose: int | None) -> tuple[bool, int, int]:
        """Adds items of a sequence; returns whether they can be empty, their first and their last positions."""
        is_nullable, first, last = True, 0, 0
        for i, item in enumerate(items):
            empty, begin, end = self._added(made, item, i if whose is None else whose)
            self._link(made, last, begin)
            first |= begin if is_nullable else 0
            last = end | (last if empty else 0)
            is_nullable = is_nullable and empty
        return is_nullable, first, last

    def _added(self, made: _Positions, node: Node, whose: int) -> tuple[bool, int, int]:
        if isinstance(node, Chars):
            bit = 1 << len(made.bytes)
            made.bytes.append(first_bytes(node))
            made.items.append(whose)
            made.follow.append(0)
            return False, bit, bit
        if isinstance(node, NodeSequence):
            return self._joined(made, node.items, whose)
        parts = [self._added(made, inner, whose) for inner in self._rules.inner(node)]
        empty = any(part[0] for part in parts)
        first, last = 0, 0
        for part in parts:
            first, last = first | part[1], last | part[2]
        if is_looping(node):
            self._link(made, last, first)
        return empty or (isinstance(node, Repeat) and node.least == 0), first, last

    def _link(self, made: _Positions, last: int, first: int) -> None:
        self._looks.take(1 + last.bit_count())
        for position in _bits(last):
            made.follow[position] |= first


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _union(masks: list[int], which: int) -> int:
    found = 0
    for i in _bits(which):
        found |= masks[i]
    return found
