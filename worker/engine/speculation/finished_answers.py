"""Finished answers in which prompt lookup looks too: those to prompts that begin alike. Pure.

Invariants:
- an answer is found by sequences of its own cache salt and adapter alone, whose prompts have the same first tokens;
- what is kept is bounded; of the beginnings the one goes first that was used least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import Sequence

Tokens = npt.NDArray[np.int32]
# First tokens of prompts that begin alike; of a shorter one all.
PREFIX_TOKENS: Final = 16
# Tokens of answers to such prompts, the newest: a search of more takes longer than it may.
MOST_OF_PREFIX: Final = 1 << 14
# Stands behind each answer. No token is equal to it.
END: Final = -1
_NOTHING: Final = np.empty(0, np.int32)
_Key: TypeAlias = tuple[bytes, int | None, tuple[int, ...]]


class FinishedAnswers:
    """Answers by what their prompts begin with.

    Args:
        most: tokens that are kept in all, 4 bytes each.
        context: last tokens of the prompt that are kept with an answer.

    Attributes:
        num_tokens: that are kept.
    """

    def __init__(self, most: int, context: int) -> None:
        self._most = most
        self._context = context
        self._kept: OrderedDict[_Key, Tokens] = OrderedDict()
        self.num_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Takes the answer of a sequence that has ended; of one that is embedded there is none."""
        if seq.pooling is not None:
            return
        begin = max(0, seq.num_prompt_tokens - self._context)
        answer = np.array([*seq.token_ids[begin:], END], np.int32)
        key = _key(seq)
        kept = self._kept.pop(key, _NOTHING)
        self.num_tokens -= len(kept)
        # The same once more brings nothing.
        if answer.tobytes() not in kept.tobytes():
            kept = np.concatenate((kept, answer))[-min(MOST_OF_PREFIX, self._most) :]
        self._kept[key] = kept
        self.num_tokens += len(kept)
        while self.num_tokens > self._most:
            self.num_tokens -= len(self._kept.popitem(last=False)[1])

    def beside(self, seq: Sequence) -> Tokens:
        """Answers to prompts that begin as that of a sequence does, int32 [L], the newest last, END behind each."""
        key = _key(seq)
        if (kept := self._kept.get(key)) is None:
            return _NOTHING
        self._kept.move_to_end(key)
        return kept


def _key(seq: Sequence) -> _Key:
    return seq.cache_salt, seq.hash_root, tuple(seq.token_ids[: min(PREFIX_TOKENS, seq.num_prompt_tokens)])
