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

from worker.engine.finished_answers import END, FinishedAnswers, Tokens
from worker.engine.sequence import Sequence

# Tokens of sequences that are kept as arrays, 4 bytes each: making one of a long list takes longer than a search.
MOST_KEPT: Final = 1 << 22
_SMALLEST: Final = 256


class _Tokens:
    """A sequence's list of tokens as an array that grows with it."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._array = np.empty(_SMALLEST, np.int32)
        self._count = 0

    @property
    def size(self) -> int:
        """Tokens that there is room for."""
        return len(self._array)

    def upto_now(self) -> Tokens:
        """All tokens, int32 [L]."""
        count = len(self.tokens)
        if count > self.size:
            grown = np.empty(max(count, 2 * self.size), np.int32)
            grown[: self._count] = self._array[: self._count]
            self._array = grown
        self._array[self._count : count] = self.tokens[self._count :]
        self._count = count
        return self._array[:count]


class NgramProposer:
    """Proposes by lookup; a Proposer (worker/engine/drafter.py).

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

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """The `most` tokens that followed; none where no suffix came before."""
        tokens = self._tokens(seq)
        found, length = self._places(tokens[:-1], tokens)
        if self._answers is not None and length < self._longest:
            answers = self._answers.beside(seq)
            others, longer = self._places(answers, tokens)
            others = others[answers[others + 1] != END] if longer > length else others[:0]
            if len(others) and longer >= self._shortest:
                return _up_to_end(answers[others[-1] + 1 :][:most])
        return continuation(tokens, int(found[-1]), most) if length >= self._shortest else []

    def _tokens(self, seq: Sequence) -> Tokens:
        kept = self._kept.pop(seq.id, None)
        if kept is not None:
            self._num_kept -= kept.size
        if kept is None or kept.tokens is not seq.token_ids:
            kept = _Tokens(seq.token_ids)
        tokens = kept.upto_now()
        self._kept[seq.id] = kept
        self._num_kept += kept.size
        while self._num_kept > MOST_KEPT and len(self._kept) > 1:
            self._num_kept -= self._kept.popitem(last=False)[1].size
        return tokens

    def _places(self, within: Tokens, tokens: Tokens) -> tuple[npt.NDArray[np.intp], int]:
        """The places where the longest suffix of `tokens` ends that is in `within`, and its length, 0 for none."""
        found = np.flatnonzero(within == tokens[-1])
        length = min(1, len(found))
        while length and length < min(self._longest, len(tokens)):
            before = found[found >= length]
            longer = before[within[before - length] == tokens[-1 - length]] if len(before) else before
            if not len(longer):
                break
            found, length = longer, length + 1
        return found, length


def _up_to_end(answer: Tokens) -> list[int]:
    tokens: list[int] = answer.tolist()
    return tokens[: tokens.index(END)] if END in tokens else tokens


def continuation(tokens: Tokens, place: int, most: int) -> list[int]:
    """The tokens behind `place` up to the end of `tokens`, again and again, `most` of them."""
    following = tokens[place + 1 : place + 1 + most]
    if len(following) < most:
        following = np.resize(tokens[place + 1 :], most)
    return following.tolist()  # type: ignore[no-any-return]
