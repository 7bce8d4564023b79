"""Encodes histories of penalized rows for an engine's ranks as new tokens. Pure.

Both ends keep the outputs that have been told: an output only grows, so that a step of 256 sequences with 8000 tokens
each tells 256 tokens.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, TokenHistory

# Number of tokens kept, or twice those of a batch if that is more; beyond it both ends start again.
_MAX_TOKENS: Final = 1 << 20
# News of a history: facts sent once per sequence, the end of its output, and the new tokens.
_Once = tuple[SamplingParams, npt.NDArray[np.int64], bytes]
_News = tuple[_Once | None, int, list[int]]


class HistoryEncoder:
    """The engine's end of the encoding. Everything encoded must be decoded, in the same order."""

    def __init__(self) -> None:
        # By sequence: its list of tokens, and how much of its output has been told.
        self._told: dict[int, tuple[list[int], int]] = {}
        self._num_told = 0

    def encode(self, batch: ScheduledBatch) -> tuple[bool, dict[int, _News]]:
        """Encodes what the other end needs: whether to forget all outputs, and the news of each row that has a
        history."""
        forget = self._num_told > max(_MAX_TOKENS, 2 * sum(h.num_output for h in batch.histories.values()))
        if forget:
            self._told.clear()
            self._num_told = 0
        return forget, {i: self._news(history) for i, history in batch.histories.items()}

    def _news(self, history: TokenHistory) -> _News:
        tokens, count = self._told.get(history.seq_id, (None, 0))
        once = None
        if tokens is not history.tokens:
            once, count = (history.params, history.prompt_ids, history.cache_salt), 0
        new = history.output_from(count)
        self._told[history.seq_id] = history.tokens, count + len(new)
        self._num_told += len(new)
        return once, history.num_output, new


class HistoryDecoder:
    """A rank's end of the encoding."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[_Once, list[int]]] = {}

    def decode(self, seq_ids: list[int], told: Any) -> dict[int, TokenHistory]:
        """Restores the histories of a batch of these sequences that `HistoryEncoder.encode` encoded."""
        forget, news = told
        if forget:
            self._told.clear()
        return {i: self._history(seq_ids[i], *own) for i, own in news.items()}

    def _history(self, seq_id: int, once: _Once | None, end: int, new: list[int]) -> TokenHistory:
        if once is not None:
            self._told[seq_id] = once, []
        (params, prompt_ids, cache_salt), tokens = self._told[seq_id]
        tokens.extend(new)
        return TokenHistory(seq_id, params, prompt_ids, tokens, 0, end, cache_salt=cache_salt)
