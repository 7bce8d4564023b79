"""Writes grammars in GBNF as the library's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Final

from common.constraints.gbnf.loops import with_whole_texts
from common.constraints.gbnf.reader import (
    ROOT,
    Chars,
    Choice,
    GbnfError,
    Node,
    NodeSequence,
    Ref,
    Repeat,
    SpecialToken,
    children,
    parsed,
)
from common.constraints.gbnf.recursion import with_repetition
from common.constraints.gbnf.rules import MOST_POSITIONS, Rules
from common.constraints.gbnf.terminals import Run, Terminals

# No rule of a grammar has this name.
_START: Final = ""
_NOTHING: Final = '""'
# Most nested brackets in a rule; the library accepts 30.
_MOST_NESTED: Final = 12
# Texts that need no brackets before a repetition: a name, a literal, a class.
_ONE: Final = re.compile(r'\w+|"(?:[^"\\]|\\.)*"|/\[[^\]]*\]/')


def lark_of_gbnf(text: str, *, optional_space: bool = False, special: Collection[str] | None = None) -> str:
    """The Lark form of a grammar in GBNF: rules `r1`, `r2`, ..., terminals `T1`, ..., and parts of these `X1`, ...

    Args:
        text: a grammar.
        optional_space: True if a blank may come before its texts.
        special: names of the model's special tokens; None for any.

    Raises:
        GbnfError: the text is not GBNF, has an unsupported construct, or no text satisfies it.
    """
    start: Node = Ref(ROOT, 0)
    if optional_space:
        start = NodeSequence((Repeat(Chars(((0x20, 0x20),)), 0, 1), start))
    try:
        read = {name: with_repetition(name, body) for name, body in parsed(text, special).items()}
        rules = Rules(with_whole_texts(Rules({_START: start, **read}, _START)), _START)
        return _Writer(rules, Terminals(rules)).written()
    except RecursionError:
        raise GbnfError("it is nested too deeply") from None


class _Writer:
    def __init__(self, rules: Rules, terminals: Terminals) -> None:
        self._rules = rules.rules
        self._terminals = terminals
        # Names in Lark of rules and of parts of terminals. Keys: GBNF names, and nodes nested too deeply.
        self._names: dict[str | Node, str] = {_START: "start"}
        self._parts: dict[str | Node, str] = {}
        # One spelling for each text: the library fails where an alternative is `"a" "bc"` and another one `"abc"`.
        self._literals: dict[Node, str | None] = {}
        # Terminals by their text.
        self._texts: dict[str, str] = {}

    def written(self) -> str:
        lines = []
        for known, written, of in ((self._names, self._rule, self._texts), (self._parts, self._terminal, {})):
            # Writing one may add further ones to `known`.
            waiting = list(known)
            for key in waiting:
                number = len(known)
                lines.append(f"{known[key]}: {written(self._rules[key] if isinstance(key, str) else key, 0)}")
                waiting += list(known)[number:]
            lines += [f"{name}: {text}" for text, name in of.items()]
        return "\n".join(lines)

    def _rule(self, node: Node, depth: int) -> str:
        if isinstance(node, Ref) and not self._terminals.is_terminal(node):
            return self._names.setdefault(node.name, f"r{len(self._names)}")
        if depth > _MOST_NESTED and children(node):
            return self._names.setdefault(node, f"r{len(self._names)}")
        if isinstance(node, NodeSequence):
            return " ".join(self._run(run, depth + 1) for run in self._terminals.runs(node)) or _NOTHING
        if self._terminals.is_terminal(node):
            return self._run(Run((node,)), depth)
        if isinstance(node, Choice):
            return _choice(self._rule(item, depth + 1) for item in node.items)
        if isinstance(node, Repeat):
            return _repeated(node, self._rule(node.item, depth + 1))
        assert isinstance(node, SpecialToken)
        return node.text

    def _run(self, run: Run, depth: int) -> str:
        if not self._terminals.is_terminal(run.items[0]):
            return self._rule(run.items[0], depth)
        texts = self._items(run.items, 0)
        # One literal or class is as short as a name.
        if len(texts) == 1 and texts[0][0] in '"/' and _ONE.fullmatch(texts[0]):
            return texts[0]
        text = " ".join(texts)
        return self._texts.setdefault(text, f"T{len(self._texts)}") if text else _NOTHING

    def _terminal(self, node: Node, depth: int) -> str:
        if (text := self._literal(node)) is not None:
            return _quoted(text)
        if isinstance(node, Ref):
            return self._parts.setdefault(node.name, f"X{len(self._parts)}")
        if depth > _MOST_NESTED and children(node):
            return self._parts.setdefault(node, f"X{len(self._parts)}")
        if isinstance(node, Chars):
            return f"/[{''.join(_range(*one) for one in node.ranges)}]/"
        if isinstance(node, Choice):
            return _choice(self._terminal(item, depth + 1) for item in node.items)
        if isinstance(node, Repeat):
            return _repeated(node, self._terminal(node.item, depth + 1))
        assert isinstance(node, NodeSequence)
        return " ".join(self._items(node.items, depth + 1))

    def _items(self, items: tuple[Node, ...], depth: int) -> list[str]:
        """Texts of a terminal's items; neighbouring literals are joined."""
        made = []
        for is_literal, group in groupby(items, lambda item: self._literal(item) is not None):
            if not is_literal:
                made += [self._terminal(item, depth) for item in group]
            elif text := "".join(self._literal(item) or "" for item in group):
                made.append(_quoted(text))
        return made

    def _literal(self, node: Node) -> str | None:
        """The text of a node that has exactly one text, else None."""
        if node not in self._literals:
            self._literals[node] = self._one_text(node)
        return self._literals[node]

    def _one_text(self, node: Node) -> str | None:
        if isinstance(node, Chars):
            ((first, last), *others) = node.ranges
            return chr(first) if first == last and not others else None
        if isinstance(node, Ref):
            return self._literal(self._rules[node.name])
        texts = [self._literal(inner) for inner in children(node)]
        known = [text for text in texts if text is not None]
        if len(known) < len(texts) or isinstance(node, SpecialToken):
            return None
        if isinstance(node, Choice):
            return known[0] if len(set(known)) == 1 else None
        times = node.least if isinstance(node, Repeat) else 1
        is_fixed = not isinstance(node, Repeat) or node.least == node.most
        return "".join(known) * times if is_fixed and sum(map(len, known)) * times <= MOST_POSITIONS else None


def _choice(texts: Iterable[str]) -> str:
    return f"({' | '.join(dict.fromkeys(texts))})"


def _repeated(node: Repeat, text: str) -> str:
    usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    times = usual or f"{{{node.least},{'' if node.most is None else node.most}}}"
    is_one = isinstance(node.item, Choice) or _ONE.fullmatch(text) is not None
    return text + times if is_one else f"({text}){times}"


def _range(first: int, last: int) -> str:
    return _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"


def _escaped(point: int) -> str:
    # Other characters are written by number, so that none has a special meaning in a class.
    is_plain = chr(point).isalnum() if point < 0x80 else chr(point).isprintable()
    return chr(point) if is_plain else rf"\x{{{point:X}}}"


def _quoted(text: str) -> str:
    # The library's lexer takes no raw control character, and JSON escapes all but this one.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
