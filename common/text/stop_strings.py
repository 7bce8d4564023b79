"""Searches streamed text for stop strings (Aho-Corasick).

The match that ends first wins, and the longest of several that end together. So the result does not depend on how the
text was cut into pieces. Each character is read once. Text is held back exactly while it may begin a stop string.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopResult:
    """Result of adding a piece of text.

    Attributes:
        emit: text that may be sent now.
        matched: the stop string that ended the text; None before a match.
    """

    emit: str
    matched: str | None


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    # Length of the longest stop string that ends here; 0 for none.
    match: int = 0


class StopStrings:
    """Searches one stream of text for stop strings.

    Args:
        stops: non-empty stop strings; with an empty tuple all text passes.
        include: True if the matched string stays in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._include = include
        self._root = self._state = _automaton(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Adds the next piece of text. After a match all further text is dropped."""
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._root.next:
            return StopResult(text, None)
        pending = self._held + text
        for i, char in enumerate(text, start=len(self._held) + 1):
            self._state = _step(self._root, self._state, char)
            if self._state.match:
                return self._match(pending[:i])
        keep = self._state.depth
        cut = len(pending) - keep
        self._held = pending[cut:]
        return StopResult(pending[:cut], None)

    def flush(self) -> str:
        """Returns the text held back, at the end of a stream without a match."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _match(self, text: str) -> StopResult:
        start = len(text) - self._state.match
        self._matched, self._held = text[start:], ""
        return StopResult(text if self._include else text[:start], self._matched)


def _step(root: _Node, state: _Node, char: str) -> _Node:
    while char not in state.next and state.fail is not None:
        state = state.fail
    return state.next.get(char, root)


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(depth=node.depth + 1))
        node.match = len(stop)
    _link(root)
    return root


def _link(root: _Node) -> None:
    """Sets each node's failure link, and the match that the node inherits through it, breadth first."""
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            child.fail = root if node.fail is None else _step(root, node.fail, char)
            # A node's own string is longer than any it inherits.
            child.match = child.match or child.fail.match
            queue.append(child)
