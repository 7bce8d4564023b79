"""Prompt lookup: proposes what followed the newest tokens at their previous occurrence in the sequence. Pure.

The longest suffix of `shortest` to `longest` tokens that occurred before counts, at its latest place. So a proposal is
a function of the tokens. If too few tokens follow that place, they are repeated. Finished answers are searched in the
same way and used if a longer suffix occurs in them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import Sequence
from worker.engine.speculation.finished_answers import END, FinishedAnswers, Tokens

# Most tokens of live sequences kept as arrays, 6 bytes each: converting a long list takes longer than searching it.
# An entry keeps its sequence's list alive, so `forget` must drop ended sequences.
MOST_KEPT: Final = 1 << 22
_SMALLEST: Final = 256
# Places compared one by one, latest first; further ones are compared together, with numpy.
_FEW_PLACES: Final = 32
# Factor of the previous token in a mark: odd, so that different tokens give different products modulo 2^16.
_FACTOR: Final = 40503


class _TokenArrays:
    """A sequence's tokens as arrays that grow with it.

    Each place has a mark of 16 bits made from its token and the one before. A search of a long sequence is bound by
    memory, and marks are half as large as tokens.
    """

    def __init__(self, tokens: list[int], shortest: int) -> None:
        self.tokens = tokens
        self._factor = _FACTOR if shortest > 1 else 0
        self._array = np.empty(_SMALLEST, np.int32)
        self._marks = np.empty(_SMALLEST, np.uint16)
        self._count = 0

    @property
    def size(self) -> int:
        """Number of tokens for which the arrays have room."""
        return len(self._array)

    def upto_now(self) -> tuple[Tokens, npt.NDArray[np.uint16]]:
        """All tokens of the sequence and their marks, [L] each."""
        first, count = self._count, len(self.tokens)
        if count > self.size:
            self._grow(max(count, 2 * self.size))
        self._array[first:count] = self.tokens[first:]
        if count == first + 1 and first:
            self._marks[first] = (self.tokens[first - 1] * self._factor + self.tokens[first]) & 0xFFFF
        elif count > first:
            self._mark(first, count)
        self._count = count
        return self._array[:count], self._marks[:count]

    def _mark(self, first: int, count: int) -> None:
        own, before = self._array[first:count], self._array[max(0, first - 1) : count - 1]
        self._marks[first:count] = own.astype(np.uint16)
        self._marks[count - len(before) : count] += before.astype(np.uint16) * np.uint16(self._factor)

    def _grow(self, size: int) -> None:
        for name in ("_array", "_marks"):
            kept = getattr(self, name)
            grown = np.empty(size, kept.dtype)
            grown[: self._count] = kept[: self._count]
            setattr(self, name, grown)


class NgramProposer:
    """Proposer by prompt lookup (Proposer in worker/engine/speculation/drafter.py).

    Args:
        shortest: fewest tokens of a suffix.
        longest: most tokens of a suffix.
        answers: finished answers to search as well; None for none.
    """

    def __init__(self, shortest: int, longest: int, answers: FinishedAnswers | None = None) -> None:
        self._shortest = shortest
        self._longest = longest
        self._answers = answers
        # By sequence, least recently used first.
        self._kept: OrderedDict[int, _TokenArrays] = OrderedDict()
        self._num_kept = 0
        # 1 for each place with the newest token's mark; bytes, because `rfind` finds the last 1 fastest.
        self._alike = bytearray(_SMALLEST)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """`most` tokens that followed the suffix before; empty if it did not occur before."""
        tokens, marks = self._tokens(seq)
        place, length = self._latest(seq.token_ids, tokens, marks)
        if self._answers is not None and length < self._longest:
            answers = self._answers.beside(seq)
            others, longer = self._places(answers, tokens, np.flatnonzero(answers == tokens[-1]))
            others = others[answers[others + 1] != END] if longer > length else others[:0]
            if len(others) and longer >= self._shortest:
                return _up_to_end(answers[others[-1] + 1 :][:most])
        return continuation(seq.token_ids, place, most) if length >= self._shortest else []

    def forget(self, seq: Sequence) -> None:
        """Frees the token arrays of an ended sequence."""
        if (kept := self._kept.pop(seq.id, None)) is not None:
            self._num_kept -= kept.size

    def _tokens(self, seq: Sequence) -> tuple[Tokens, npt.NDArray[np.uint16]]:
        kept = self._kept.pop(seq.id, None)
        if kept is not None:
            self._num_kept -= kept.size
        if kept is None or kept.tokens is not seq.token_ids:
            kept = _TokenArrays(seq.token_ids, self._shortest)
        found = kept.upto_now()
        self._kept[seq.id] = kept
        self._num_kept += kept.size
        while self._num_kept > MOST_KEPT and len(self._kept) > 1:
            self._num_kept -= self._kept.popitem(last=False)[1].size
        return found

    def _latest(self, token_ids: list[int], tokens: Tokens, marks: npt.NDArray[np.uint16]) -> tuple[int, int]:
        """Latest place at which the longest suffix with an earlier occurrence ends, and its length."""
        end = len(tokens) - 1
        if end > len(self._alike):
            self._alike = bytearray(2 * end)
        alike = np.frombuffer(self._alike, np.bool_)[:end]
        np.equal(marks[:end], marks[end], out=alike)
        best, length = -1, 0
        for _ in range(_FEW_PLACES):
            end = self._alike.rfind(1, 0, end)
            if end < 0:
                return best, length
            if (own := self._length_at(token_ids, end)) > length:
                best, length = end, own
                if length == self._longest:
                    return best, length
        others, longer = self._places(tokens, tokens, _with(tokens, tokens[-1], np.flatnonzero(alike[:end])))
        return (int(others[-1]), longer) if longer > length else (best, length)

    def _length_at(self, token_ids: list[int], place: int) -> int:
        """Number of tokens up to a place that equal the newest ones, at most `longest`."""
        length = 0
        while length < self._longest and length <= place and token_ids[place - length] == token_ids[-1 - length]:
            length += 1
        return length

    def _places(self, within: Tokens, tokens: Tokens, found: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], int]:
        """Returns the places of the newest token at which the longest suffix ends, and its length, or 0."""
        length = min(1, len(found))
        while length and length < min(self._longest, len(tokens)):
            before = found[found >= length]
            longer = _with(within, tokens[-1 - length], before - length) + length
            if not len(longer):
                break
            found, length = longer, length + 1
        return found, length


def _with(within: Tokens, token: int, places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Returns those of `places` that hold a token."""
    kept: npt.NDArray[np.intp] = places[within[places] == token]
    return kept


def _up_to_end(answer: Tokens) -> list[int]:
    tokens: list[int] = answer.tolist()
    return tokens[: tokens.index(END)] if END in tokens else tokens


def continuation(token_ids: list[int], place: int, most: int) -> list[int]:
    """`most` tokens after `place`; those up to the end are repeated if they are fewer."""
    following = token_ids[place + 1 : place + 1 + most]
    return following if len(following) == most else (following * most)[:most]
