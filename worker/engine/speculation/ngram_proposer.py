"""Prompt lookup: what followed the newest tokens of a sequence when they came before in it. Pure.

Of the suffixes of `longest` down to `shortest` tokens the longest one that came before counts, and of its places the
latest; so a proposal is a function of the tokens. What stands there up to the end is repeated where it is too short.
Finished answers are looked through likewise: they count where a longer suffix came before in them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import Sequence
from worker.engine.speculation.finished_answers import END, FinishedAnswers, Tokens

# Most tokens of live sequences kept as arrays, 6 bytes each: making an array of a long list takes longer than a search.
# Each entry also refers to its sequence's own list, so an ended sequence must be forgotten.
MOST_KEPT: Final = 1 << 22
_SMALLEST: Final = 256
# Places that are looked at one by one, from the latest on; more are looked at together.
_FEW_PLACES: Final = 32
# Of the token before, in marks: odd, so that no two of these give the same by themselves.
_FACTOR: Final = 40503


class _Tokens:
    """A sequence's list of tokens as arrays that grow with it.

    A place has a mark of 16 bits, of its token and the one before: a search reads a long sequence from memory, and
    marks are half as much as tokens.
    """

    def __init__(self, tokens: list[int], shortest: int) -> None:
        self.tokens = tokens
        self._factor = _FACTOR if shortest > 1 else 0
        self._array = np.empty(_SMALLEST, np.int32)
        self._marks = np.empty(_SMALLEST, np.uint16)
        self._count = 0

    @property
    def size(self) -> int:
        """Tokens that there is room for."""
        return len(self._array)

    def upto_now(self) -> tuple[Tokens, npt.NDArray[np.uint16]]:
        """All tokens and their marks, [L] each."""
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
    """Proposes by lookup; a Proposer (worker/engine/speculation/drafter.py).

    Args:
        shortest: tokens of a suffix, at least.
        longest: at most.
        answers: finished ones that are looked through too; None for none.
    """

    def __init__(self, shortest: int, longest: int, answers: FinishedAnswers | None = None) -> None:
        self._shortest = shortest
        self._longest = longest
        self._answers = answers
        # By sequence, those that were looked up last behind the others.
        self._kept: OrderedDict[int, _Tokens] = OrderedDict()
        self._num_kept = 0
        # Whether places have the newest mark: bytes, of which the last one that is 1 is found soonest.
        self._alike = bytearray(_SMALLEST)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """The `most` tokens that followed; none where no suffix came before."""
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
            kept = _Tokens(seq.token_ids, self._shortest)
        found = kept.upto_now()
        self._kept[seq.id] = kept
        self._num_kept += kept.size
        while self._num_kept > MOST_KEPT and len(self._kept) > 1:
            self._num_kept -= self._kept.popitem(last=False)[1].size
        return found

    def _latest(self, token_ids: list[int], tokens: Tokens, marks: npt.NDArray[np.uint16]) -> tuple[int, int]:
        """The latest place where the longest suffix ends that came before, and its length, which may be too short."""
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
        """Tokens up to a place that are the newest ones, `longest` at most."""
        length = 0
        while length < self._longest and length <= place and token_ids[place - length] == token_ids[-1 - length]:
            length += 1
        return length

    def _places(self, within: Tokens, tokens: Tokens, found: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], int]:
        """Narrows places of the newest token to those where the longest suffix ends; and its length, 0 for none."""
        length = min(1, len(found))
        while length and length < min(self._longest, len(tokens)):
            before = found[found >= length]
            longer = _with(within, tokens[-1 - length], before - length) + length
            if not len(longer):
                break
            found, length = longer, length + 1
        return found, length


def _with(within: Tokens, token: int, places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The places of some that have a token."""
    kept: npt.NDArray[np.intp] = places[within[places] == token]
    return kept


def _up_to_end(answer: Tokens) -> list[int]:
    tokens: list[int] = answer.tolist()
    return tokens[: tokens.index(END)] if END in tokens else tokens


def continuation(token_ids: list[int], place: int, most: int) -> list[int]:
    """The tokens behind `place` up to the end, again and again, `most` of them."""
    following = token_ids[place + 1 : place + 1 + most]
    return following if len(following) == most else (following * most)[:most]
