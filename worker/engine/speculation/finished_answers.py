"""Finished answers for prompt lookup, by the first tokens of their prompts. Pure.

Invariants:
- only sequences with the same cache salt, adapter and first prompt tokens find an answer;
- the number of tokens is bounded: the least recently used beginning of prompts is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import Sequence

Tokens = npt.NDArray[np.int32]
# First tokens of a prompt that must be equal; all tokens of a shorter prompt.
PREFIX_TOKENS: Final = 16
# Newest tokens kept for one beginning: a search of 16,384 tokens takes 9 us.
MOST_OF_PREFIX: Final = 1 << 14
# Follows each answer; equal to no token.
END: Final = -1
_NOTHING: Final = np.empty(0, np.int32)
_Key: TypeAlias = tuple[bytes, int | None, tuple[int, ...]]


class FinishedAnswers:
    """Finished answers by the beginning of their prompts.

    Args:
        most: most tokens in all, 4 bytes each.
        context: last tokens of the prompt kept with its answer.

    Attributes:
        num_tokens: number of kept tokens.
    """

    def __init__(self, most: int, context: int) -> None:
        self._most = most
        self._context = context
        self._kept: OrderedDict[_Key, Tokens] = OrderedDict()
        self.num_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Adds an ended sequence's answer; nothing for a pooled sequence, which has none."""
        if seq.pooling is not None:
            return
        begin = max(0, seq.num_prompt_tokens - self._context)
        answer = np.array([*seq.token_ids[begin:], END], np.int32)
        key = _key(seq)
        kept = self._kept.pop(key, _NOTHING)
        self.num_tokens -= len(kept)
        # A second copy of an answer would find nothing new.
        if answer.tobytes() not in kept.tobytes():
            kept = np.concatenate((kept, answer))[-min(MOST_OF_PREFIX, self._most) :]
        self._kept[key] = kept
        self.num_tokens += len(kept)
        while self.num_tokens > self._most:
            self.num_tokens -= len(self._kept.popitem(last=False)[1])

    def beside(self, seq: Sequence) -> Tokens:
        """Answers to prompts with the same beginning as the sequence's: int32 [L], newest last, END after each."""
        key = _key(seq)
        if (kept := self._kept.get(key)) is None:
            return _NOTHING
        self._kept.move_to_end(key)
        return kept


def _key(seq: Sequence) -> _Key:
    return seq.cache_salt, seq.hash_root, tuple(seq.token_ids[: min(PREFIX_TOKENS, seq.num_prompt_tokens)])
