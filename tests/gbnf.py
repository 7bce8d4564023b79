"""Reference for tests: reads GBNF as llama.cpp's guide describes it, and recognizes texts character by character.

It shares nothing with the service. Grammars become productions, which Earley's algorithm reads; `sample` walks them.
"""

from __future__ import annotations

import random
import re
from functools import cached_property
from typing import TypeAlias

# A set of characters: whether it is negated, and pairs of first and last one.
Chars: TypeAlias = tuple[bool, tuple[tuple[int, int], ...]]
Item: TypeAlias = str | Chars
Bodies: TypeAlias = list[tuple[Item, ...]]
# Earley items at one place of a text: the rule's name, its remaining items, and the place where it began.
Row: TypeAlias = set[tuple[str, tuple[Item, ...], int]]

_ESCAPE = re.compile(r'\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([trn\\"\[\]-]))|([^\\])', re.DOTALL)
_PIECE = re.compile(
    r"(?P<comment>#[^\r\n]*)|(?P<line>\r\n|\r|\n)|(?P<blank>[ \t]+)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)"
    r'|"(?P<literal>(?:[^"\\]|\\.)*)"|\[(?P<set>(?:[^\]\\]|\\.)*)\]|(?P<times>[*+?]|\{[^}]*\})|(?P<mark>[|().])',
    re.DOTALL,
)
_USUAL = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def matches(chars: Chars, char: str) -> bool:
    """Whether a character is in a set."""
    negated, ranges = chars
    return any(first <= ord(char) <= last for first, last in ranges) != negated


class Reference:
    """A GBNF grammar that recognizes and samples texts."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Bodies] = {}
        self._pieces = [
            (found.lastgroup or "", str(found[found.lastgroup or 0]))
            for found in _PIECE.finditer(text)
            if found.lastgroup not in ("comment", "blank")
        ]
        while self._pieces:
            if self._pieces[0][0] == "line":
                self._pieces.pop(0)
                continue
            (_, name), (_, define) = self._pieces.pop(0), self._pieces.pop(0)
            assert define == "::=", name
            self.rules[name] = self._choice(False)

    @property
    def has_text(self) -> bool:
        """True if the grammar has any text."""
        return self._lengths["root"] < _NO_END

    def accepts(self, text: str) -> bool:
        """True if the grammar has this text."""
        row = self._read(text)
        return any(sym == "root" and start == 0 and not rest for sym, rest, start in row)

    def begins(self, text: str) -> bool:
        """True if a text of the grammar begins with this one."""
        return bool(self._read(text))

    @cached_property
    def _ending(self) -> dict[str, Bodies]:
        """The rules without alternatives that never end."""
        return {n: [b for b in bodies if self._length(b) < _NO_END] for n, bodies in self.rules.items()}

    def sample(self, rng: random.Random, size: int = 30) -> str:
        """A random text of the grammar; beyond `size` characters it takes the shortest way to an end."""
        made, todo = "", list[Item](["root"])
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                short = len(made) + len(todo) > size
                body = min(self._ending[item], key=self._length) if short else rng.choice(self._ending[item])
                todo += reversed(body)
            else:
                made += self._character(item, rng)
        return made

    def _character(self, chars: Chars, rng: random.Random) -> str:
        known = [first for first, _ in chars[1]] + [last for _, last in chars[1]]
        near = [*known, *(point + 1 for point in known), *(rng.randint(first, last) for first, last in chars[1])]
        texts = [*map(chr, near), *'ab01 \n"\\{}[]é😀']
        fit = [char for char in texts if matches(chars, char) and not "\ud800" <= char <= "\udfff"]
        return str(rng.choice(fit))

    def _length(self, body: tuple[Item, ...]) -> int:
        # Each rule adds one, so a body that leads back to its own rule is never the shortest.
        return min(_NO_END, sum(1 + self._lengths.get(item, _NO_END) if isinstance(item, str) else 1 for item in body))

    @cached_property
    def _lengths(self) -> dict[str, int]:
        found: dict[str, int] = {}
        while True:
            self.__dict__["_lengths"] = found
            new = {name: min(_NO_END, *map(self._length, bodies)) for name, bodies in self.rules.items()}
            if new == found:
                return found
            found = new

    @cached_property
    def _nullable(self) -> set[str]:
        found = set[str]()
        while new := {n for n, bodies in self.rules.items() if any(set(b) <= found for b in bodies)} - found:
            found |= new
        return found

    def _read(self, text: str) -> Row:
        rows = [self._closed({("root", body, 0) for body in self._ending["root"]}, [], 0)]
        for at, char in enumerate(text, 1):
            moved = {
                (sym, rest[1:], start)
                for sym, rest, start in rows[-1]
                if rest and not isinstance(rest[0], str) and matches(rest[0], char)
            }
            rows.append(self._closed(moved, rows, at))
        return rows[-1]

    def _closed(self, row: Row, rows: list[Row], at: int) -> Row:
        todo = list(row)
        while todo:
            sym, rest, start = todo.pop()
            new: list[tuple[str, tuple[Item, ...], int]] = []
            if not rest:
                outer = rows[start] if start < at else row
                new = [(s, r[1:], o) for s, r, o in outer if r and r[0] == sym]
            elif isinstance(rest[0], str):
                new = [(rest[0], body, at) for body in self._ending[rest[0]]]
                if rest[0] in self._nullable:
                    new.append((sym, rest[1:], start))
            fresh = set(new) - row
            row |= fresh
            todo += fresh
        return row

    def _choice(self, nested: bool) -> Bodies:
        bodies = [self._sequence(nested)]
        while self._pieces and self._pieces[0] == ("mark", "|"):
            self._pieces.pop(0)
            self._skip_lines()
            bodies.append(self._sequence(nested))
        return bodies

    def _skip_lines(self) -> None:
        while self._pieces and self._pieces[0][0] == "line":
            self._pieces.pop(0)

    def _sequence(self, nested: bool) -> tuple[Item, ...]:
        if not nested:
            self._skip_lines()
        items: list[tuple[Item, ...]] = []
        while True:
            if nested:
                self._skip_lines()
            if not self._pieces or self._pieces[0] in (("mark", "|"), ("mark", ")")) or self._pieces[0][0] == "line":
                return tuple(item for group in items for item in group)
            kind, value = self._pieces.pop(0)
            if kind == "times":
                items[-1] = self._repeated(items[-1], value)
            elif kind == "literal":
                items.append(tuple((False, ((point, point),)) for point in _points(value)))
            elif kind == "set":
                items.append(_set(value))
            elif (kind, value) == ("mark", "("):
                items.append((self._rule(self._choice(True)),))
                assert self._pieces.pop(0) == ("mark", ")")
            else:
                items.append(((True, ()),) if kind == "mark" else (value,))

    def _rule(self, bodies: Bodies) -> str:
        name = f"{len(self.rules)}'"
        self.rules[name] = bodies
        return name

    def _repeated(self, item: tuple[Item, ...], times: str) -> tuple[Item, ...]:
        if times in _USUAL:
            least, most = _USUAL[times]
        else:
            low, comma, high = times.strip("{}").partition(",")
            least = int(low)
            most = (int(high) if high.strip() else None) if comma else least
        if most is None:
            more = self._rule([()])
            self.rules[more].append((more, *item))
            return (*item * least, more)
        tail: tuple[Item, ...] = ()
        for _ in range(most - least):
            tail = (self._rule([(), (*item, *tail)]),)
        return (*item * least, *tail)


_NO_END = 10**6


def _points(text: str) -> list[int]:
    found = []
    for part in _ESCAPE.finditer(text):
        number = part[1] or part[2] or part[3]
        plain = {"t": "\t", "r": "\r", "n": "\n"}.get(part[4], part[4]) if part[4] else part[5]
        found.append(int(number, 16) if number else ord(plain))
    return found


def _set(text: str) -> tuple[Item, ...]:
    negated = text.startswith("^")
    parts = [part[0] for part in _ESCAPE.finditer(text[negated:])]
    ranges, i = [], 0
    while i < len(parts):
        last = _points(parts[i])
        first = last[0]
        i += 1
        if i + 1 < len(parts) and parts[i] == "-":
            last = _points(parts[i + 1])
            i += 2
        ranges.append((first, last[0]))
    return ((negated, tuple(ranges)),) if ranges else ()


def random_grammar(rng: random.Random) -> str:
    """A grammar of few characters and rules, which overlap, recur and repeat; some have no text."""
    names = ["root", "start", "y-1", "z_2"][: rng.randint(1, 4)]
    return "\n".join(f"{name} ::= {_random_choice(rng, names, 0)}" for name in names)


def _random_choice(rng: random.Random, names: list[str], depth: int) -> str:
    sequences = (" ".join(_random_item(rng, names, depth) for _ in range(rng.randint(1, 3))) for _ in range(9))
    return " | ".join(next(sequences) if rng.random() < 0.93 else '""' for _ in range(rng.choice([1, 1, 2, 3])))


def _random_item(rng: random.Random, names: list[str], depth: int) -> str:
    kind = rng.random()
    if depth > 3 or kind < 0.3:
        return f'"{"".join(rng.choice("abc") for _ in range(rng.randint(1, 3)))}"'
    if kind < 0.45:
        return rng.choice(["[ab]", "[^a]", "[a-c]", "[bc]", ".", "[^ab\\u00e9]", "[é-ö]", "[a&&b]"])
    if kind < 0.65:
        return rng.choice(names)
    inner = f"({_random_choice(rng, names, depth + 1)})"
    return inner + (rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"]) if kind > 0.8 else "")


def mutated(text: str, rng: random.Random, alphabet: str) -> str:
    """The text with one character inserted, removed or replaced, or cut off at a random place."""
    i, char = rng.randint(0, len(text)), rng.choice(alphabet)
    return rng.choice([text[:i] + char + text[i:], text[:i] + text[i + 1 :], text[:i], text[:i] + char + text[i + 1 :]])
