"""Rewrites rules that end with themselves as repetitions: `ws ::= ([ \\t\\n] ws)?` becomes `[ \\t\\n]*`.

For each open level of such a rule, the library's parser takes one more step at every byte. And a rule that refers to
itself cannot be a terminal.
"""

from __future__ import annotations

from typing import NamedTuple

from common.constraints.gbnf.reader import EMPTY, Choice, Node, NodeSequence, Ref, Repeat, children


class _Parts(NamedTuple):
    """A rule's body as alternatives.

    Attributes:
        again: for each alternative that ends with the rule itself, the part before it.
        ends: the other alternatives.
    """

    again: tuple[Node, ...]
    ends: tuple[Node, ...]


def with_repetition(name: str, body: Node) -> Node:
    """Rewrites a rule's body as a repetition if the rule refers to itself only at the end of alternatives."""
    parts = _split(name, body)
    if parts is None or not parts.again or not parts.ends:
        return body
    return NodeSequence((Repeat(_choice(parts.again), 0, None), _choice(parts.ends)))


def _split(name: str, node: Node) -> _Parts | None:
    """Splits a body into alternatives; None if the rule refers to itself before the end of one."""
    if isinstance(node, Ref) and node.name == name:
        return _Parts((EMPTY,), ())
    if isinstance(node, Choice):
        every = [_split(name, item) for item in node.items]
        known = [parts for parts in every if parts is not None]
        if len(known) < len(every):
            return None
        return _Parts(
            tuple(one for parts in known for one in parts.again), tuple(one for parts in known for one in parts.ends)
        )
    if isinstance(node, Repeat) and (node.least, node.most) == (0, 1):
        parts = _split(name, node.item)
        return None if parts is None else _Parts(parts.again, (*parts.ends, EMPTY))
    if isinstance(node, NodeSequence) and node.items:
        *before, last = node.items
        parts = _split(name, last)
        if parts is None or any(_refers(name, item) for item in before):
            return None
        return _Parts(*(tuple(NodeSequence((*before, one)) for one in some) for some in parts))
    return None if _refers(name, node) else _Parts((), (node,))


def _refers(name: str, node: Node) -> bool:
    if isinstance(node, Ref):
        return node.name == name
    return any(_refers(name, inner) for inner in children(node))


def _choice(items: tuple[Node, ...]) -> Node:
    return items[0] if len(items) == 1 else Choice(items)
