"""Rewrites loops over texts and recursive rules: `([^<] | element)*` becomes `[^<]* (element [^<]*)*`.

Both forms have the same texts. In the first form one text may follow another, so each is read character by character.
In the second form `[^<]*` is a terminal.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from common.constraints.gbnf.reader import Choice, Node, NodeSequence, Ref, Repeat, children
from common.constraints.gbnf.rules import Rules

# Most levels of rules that are searched for the alternatives of a loop.
_MOST_RULES: Final = 8


class _LoopParts(NamedTuple):
    """Alternatives of a node: `texts` may be terminals, `others` may not."""

    texts: tuple[Node, ...]
    others: tuple[Node, ...]


def with_whole_texts(rules: Rules) -> dict[str, Node]:
    """Rules in which each loop over texts and recursive rules has the second form."""
    return _Loops(rules).rewritten()


class _Loops:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # New rules for alternatives of rules that loops refer to. Their names have a blank, as no name in a grammar.
        self._made: dict[str, Node] = {}
        self._parts: dict[str, _LoopParts] = {}

    def rewritten(self) -> dict[str, Node]:
        made = {name: self._node(body) for name, body in self._rules.rules.items()}
        # `_node` may add further rules to `_made`.
        for name in (waiting := list(self._made)):
            known = len(self._made)
            made[name] = self._node(self._made[name])
            waiting += list(self._made)[known:]
        return made

    def _node(self, node: Node) -> Node:
        if not children(node) or self._rules.sizes.get(node) is not None:
            return node
        if isinstance(node, NodeSequence | Choice):
            return type(node)(tuple(self._node(item) for item in node.items))
        assert isinstance(node, Repeat)
        texts, others = self._split(node.item, 0)
        if not texts or not others or node.most is not None or node.least > 1:
            return Repeat(self._node(node.item), node.least, node.most)
        some = Repeat(_choice(texts), 0, None)
        turn = NodeSequence((_choice(tuple(self._node(other) for other in others)), some))
        if node.least == 0:
            return NodeSequence((some, Repeat(turn, 0, None)))
        one = NodeSequence((Repeat(_choice(texts), 1, None), Repeat(turn, 0, None)))
        return Choice((one, Repeat(turn, 1, None)))

    def _split(self, node: Node, depth: int) -> _LoopParts:
        if self._rules.sizes.get(node) is not None:
            return _LoopParts((node,), ())
        if isinstance(node, Ref) and depth < _MOST_RULES:
            if node.name not in self._parts:
                # A rule that refers to itself is not split there.
                self._parts[node.name] = _LoopParts((), (node,))
                self._parts[node.name] = self._split_rule(node, depth + 1)
            return self._parts[node.name]
        if not isinstance(node, Choice):
            return _LoopParts((), (node,))
        every = [self._split(item, depth) for item in node.items]
        return _LoopParts(
            tuple(one for parts in every for one in parts.texts), tuple(one for parts in every for one in parts.others)
        )

    def _split_rule(self, ref: Ref, depth: int) -> _LoopParts:
        body = self._rules.rules.get(ref.name, ref)
        texts, others = self._split(body, depth) if isinstance(body, Choice) else _LoopParts((), (body,))
        if not texts or not others:
            return _LoopParts((), (ref,))
        text, other = f"{ref.name} text", f"{ref.name} other"
        self._made[text] = _choice(texts)
        self._made[other] = _choice(others)
        return _LoopParts((Ref(text, ref.at),), (Ref(other, ref.at),))


def _choice(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Choice(items)
