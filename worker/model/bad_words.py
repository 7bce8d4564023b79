"""Finds the tokens that would complete a forbidden sequence of ids in the output. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kernels.no_token import NO_TOKEN

Ids = tuple[int, ...]


class BadWords:
    """Forbidden sequences, indexed by the token before their last one.

    Args:
        sequences: of one id or more each.

    Attributes:
        reach: number of newest output tokens that matter.
    """

    def __init__(self, sequences: Iterable[Ids]) -> None:
        self._alone = list[int]()
        self._behind = dict[int, list[tuple[Ids, int]]]()
        self.reach = 0
        for *before, last in sequences:
            if before:
                self._behind.setdefault(before[-1], []).append((tuple(before), last))
                self.reach = max(self.reach, len(before))
            else:
                self._alone.append(last)

    def next_ids(self, output: list[int]) -> list[int]:
        """Ids that would complete a forbidden sequence after `output`; its last `reach` tokens are enough."""
        found = self._behind.get(output[-1], ()) if output else ()
        return [*self._alone, *(last for before, last in found if _ends_with(output, before))]

    def next_pairs(self, output: list[int]) -> list[tuple[int, int]]:
        """Ids that would complete a forbidden sequence after `output` and one more token: (that token, id), NO_TOKEN
        for any."""
        pairs = [(NO_TOKEN, last) for last in self._alone]
        for newest, found in self._behind.items():
            pairs += ((newest, last) for before, last in found if _ends_with(output, before[:-1]))
        return pairs


def _ends_with(output: list[int], end: Ids) -> bool:
    return not end or tuple(output[-len(end) :]) == end
