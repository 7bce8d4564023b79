"""Verification of drafts by coupling: a draft is accepted if it is the token that the model draws itself.

Every row is sampled as a plain decode would sample it, with the noise of its seed and position, so nothing is random in
the verification, and no distribution is changed by it: a draft decides how many tokens a step brings, never which. That
leaves nothing to reject by chance; the name is the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """Drafts of F sequences, D in all, and the sampled rows that verify them.

    Attributes:
        draft_token_ids: int64 [D], those of each sequence one after the other.
        num_draft_tokens: int64 [F].
        target_logits_indices: int64 [D], the row in front of each draft, which draws the token that it should be.
        bonus_logits_indices: int64 [F], the row behind all drafts of each sequence.
    """

    draft_token_ids: Ints
    num_draft_tokens: Ints
    target_logits_indices: Ints
    bonus_logits_indices: Ints

    @classmethod
    def of(cls, drafts: list[list[int]]) -> SpecDecodeMetadata:
        """Metadata of the drafts of each sequence."""
        counts = np.array([len(own) for own in drafts], np.int64)
        last = np.cumsum(counts + 1) - 1
        every = np.arange(counts.sum() + len(drafts))
        return cls(np.array(list(chain.from_iterable(drafts)), np.int64), counts, np.delete(every, last), last)


class RejectionSampler:
    """Finds how much of each sequence's drafts is right."""

    def accept(self, metadata: SpecDecodeMetadata, token_ids: list[int]) -> list[tuple[int, ...]]:
        """The tokens that each sequence has got: its right drafts, and the token that the row behind them has drawn.

        Args:
            metadata: of the step.
            token_ids: of all rows, as they were drawn.
        """
        if not len(metadata.draft_token_ids):
            return list(zip(token_ids))
        drawn = np.array(token_ids, np.int64)
        wrong = np.append(drawn[metadata.target_logits_indices] != metadata.draft_token_ids, True)
        # The last one stands for the end of all drafts.
        first_wrong = np.flatnonzero(wrong)
        begins = np.cumsum(metadata.num_draft_tokens) - metadata.num_draft_tokens
        reached = first_wrong[np.searchsorted(first_wrong, begins)] - begins
        accepted = np.minimum(reached, metadata.num_draft_tokens)
        firsts = metadata.bonus_logits_indices - metadata.num_draft_tokens
        bounds = zip(firsts.tolist(), accepted.tolist(), strict=True)
        return [tuple(token_ids[first : first + count + 1]) for first, count in bounds]
