"""Finds the token ids that a sequence's penalties change in a row of logits.

The kernels define the order of the changes (docs/explanation/determinism.md). Repetition penalties concern every id of
prompt and output; presence and frequency penalties concern ids of the output only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from kernels.penalties import Penalties, SeenIds
from worker.engine.batch import TokenHistory

# Most sequences that do not run now whose counts are kept.
MOST_IDLE: Final = 512


@dataclass(slots=True)
class _TokenCounts:
    """Token list of a sequence, how much of its output is counted, the counts, and its three penalties."""

    tokens: list[int]
    count: int
    seen: SeenIds
    factors: tuple[float, float, float]

    @classmethod
    def of(cls, history: TokenHistory) -> _TokenCounts:
        """Counts all tokens of a history at once."""
        params = history.params
        factors = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return cls(history.tokens, history.num_output, SeenIds(history.prompt_ids, history.output_ids), factors)

    def behind(self, drafts: tuple[int, ...]) -> _TokenCounts:
        """A copy that also counts `drafts`, which may be wrong."""
        seen = self.seen.copy()
        for token in drafts:
            seen.add(token)
        return replace(self, count=self.count + len(drafts), seen=seen)


class SeenTokens:
    """The ids that penalized sequences have seen, kept from step to step: each token is counted once."""

    def __init__(self) -> None:
        self._known: dict[int, _TokenCounts] = {}

    def penalties(self, histories: Mapping[int, TokenHistory], late: torch.Tensor | None = None) -> Penalties | None:
        """The penalties of these rows; None if there are none.

        Args:
            histories: by row of logits, of penalized sequences.
            late: of these rows, as Penalties has it.
        """
        if not histories:
            return None
        found = [self._counted(history) for history in histories.values()]
        self._forget(histories)
        factors = np.array([known.factors for known in found], np.float32)
        rows = np.array(list(histories), np.int64)
        return Penalties(rows, [known.seen for known in found], factors[:, 0], factors[:, 1], factors[:, 2], late)

    def _counted(self, history: TokenHistory) -> _TokenCounts:
        if history.drafts:
            return self._counted(replace(history, drafts=())).behind(history.drafts)
        known = self._known.get(history.seq_id)
        # Another list of tokens; or a step that had counted a token was interrupted.
        if known is None or known.tokens is not history.tokens or known.count > history.num_output:
            known = self._known[history.seq_id] = _TokenCounts.of(history)
            return known
        new = history.output_from(known.count)
        for token in new:
            known.seen.add(token)
        known.count += len(new)
        return known

    def _forget(self, histories: Mapping[int, TokenHistory]) -> None:
        """Bounds the counts kept of sequences that have ended or wait: as many as run now, plus MOST_IDLE."""
        if len(self._known) > 2 * len(histories) + MOST_IDLE:
            now = {history.seq_id for history in histories.values()}
            self._known = {seq_id: known for seq_id, known in self._known.items() if seq_id in now}
