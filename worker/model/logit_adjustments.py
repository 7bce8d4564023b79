"""From the tokens of a sequence to what its penalties change in a row of logits.

The order of the changes is the kernels' (docs/explanation/determinism.md); here is which ids they concern. Repetition:
every id of prompt and output; presence and frequency: ids of the output only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from kernels.penalties import Penalties, SeenIds
from worker.engine.batch import TokenHistory

# Sequences that do not run now, of which anything is kept.
MOST_IDLE: Final = 512


@dataclass(slots=True)
class _Known:
    """A sequence's list of tokens, how much of its output is counted, the counts, and its three penalties."""

    tokens: list[int]
    count: int
    seen: SeenIds
    factors: tuple[float, float, float]

    @classmethod
    def of(cls, history: TokenHistory) -> _Known:
        """All of a history, counted at once."""
        params = history.params
        factors = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return cls(history.tokens, history.num_output, SeenIds(history.prompt_ids, history.output_ids), factors)

    def behind(self, drafts: tuple[int, ...]) -> _Known:
        """A copy that has counted drafts too: they may be wrong."""
        seen = self.seen.copy()
        for token in drafts:
            seen.add(token)
        return replace(self, count=self.count + len(drafts), seen=seen)


class SeenTokens:
    """The ids that penalized sequences have seen, kept from step to step: each token is counted once."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def penalties(self, histories: Mapping[int, TokenHistory], late: torch.Tensor | None = None) -> Penalties | None:
        """The penalties of the rows that are the keys; None when there are none.

        Args:
            histories: by row of logits, of penalized sequences.
            late: as Penalties has it, of each row that is a key.
        """
        if not histories:
            return None
        found = [self._counted(history) for history in histories.values()]
        self._forget(histories)
        factors = np.array([known.factors for known in found], np.float32)
        rows = np.array(list(histories), np.int64)
        return Penalties(rows, [known.seen for known in found], factors[:, 0], factors[:, 1], factors[:, 2], late)

    def _counted(self, history: TokenHistory) -> _Known:
        if history.drafts:
            return self._counted(replace(history, drafts=())).behind(history.drafts)
        known = self._known.get(history.seq_id)
        # Another list of tokens; or a step that had counted a token was interrupted.
        if known is None or known.tokens is not history.tokens or known.count > history.num_output:
            known = self._known[history.seq_id] = _Known.of(history)
            return known
        new = history.output_from(known.count)
        for token in new:
            known.seen.add(token)
        known.count += len(new)
        return known

    def _forget(self, histories: Mapping[int, TokenHistory]) -> None:
        """Bounds what is kept of sequences that have ended or wait: as many as run now, and some."""
        if len(self._known) > 2 * len(histories) + MOST_IDLE:
            now = {history.seq_id for history in histories.values()}
            self._known = {seq_id: known for seq_id, known in self._known.items() if seq_id in now}
