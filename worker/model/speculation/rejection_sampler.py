"""Verification of drafts by coupling: a draft is accepted if it is the token that the model draws itself.

Every row is sampled as a plain decode would sample it, with the noise of its seed and position, so nothing is random in
the verification, and no distribution is changed by it: a draft decides how many tokens a step brings, never which. That
leaves nothing to reject by chance; the name is the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kernels.no_token import NO_TOKEN
from kernels.upload import to_device

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """Drafts of F sequences, D in all, and the sampled rows that verify them.

    Attributes:
        draft_token_ids: int64 [D], those of each sequence one after the other; NO_TOKEN for those that the host does
            not know.
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

    @cached_property
    def are_known(self) -> bool:
        """True if the host knows every draft."""
        return not len(self.draft_token_ids) or NO_TOKEN not in self.draft_token_ids


@dataclass(frozen=True)
class Verified:
    """Result of a verification, on the device that has drawn the tokens.

    Attributes:
        newest: int64 [F], the token behind the right drafts of each sequence; NO_TOKEN where there is none.
        num_rejected: int64 [F], its other drafts.
    """

    newest: torch.Tensor
    num_rejected: torch.Tensor


class RejectionSampler:
    """Finds how much of each sequence's drafts is right: on the host, or where the tokens are drawn."""

    def accept(self, metadata: SpecDecodeMetadata, token_ids: list[int]) -> list[tuple[int, ...]]:
        """The tokens that each sequence has got: its right drafts, and the token that the row behind them has drawn.

        Args:
            metadata: of the step, whose drafts are known.
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
        return self.accepted(
            metadata, token_ids, metadata.num_draft_tokens - np.minimum(reached, metadata.num_draft_tokens)
        )

    def accepted(self, metadata: SpecDecodeMetadata, token_ids: list[int], num_rejected: Ints) -> list[tuple[int, ...]]:
        """`accept`, where somebody else has found how many drafts of each sequence are wrong, int64 [F]."""
        counts = metadata.num_draft_tokens
        firsts = metadata.bonus_logits_indices - counts
        bounds = zip(firsts.tolist(), (counts - num_rejected).tolist(), strict=True)
        return [tuple(token_ids[first : first + count + 1]) for first, count in bounds]

    def verify(self, metadata: SpecDecodeMetadata, token_ids: torch.Tensor, drafts: torch.Tensor) -> Verified:
        """The same on the device, for which nobody waits.

        Args:
            metadata: of the step; its drafts need not be known.
            token_ids: int64 [R], of all rows, as they were drawn.
            drafts: int64 [D], the drafts that were computed; none is NO_TOKEN.
        """
        counts = metadata.num_draft_tokens
        begins, firsts = np.cumsum(counts) - counts, metadata.bonus_logits_indices - counts
        # As many columns as the longest run needs: a shorter one goes on with others' drafts, which do not count.
        places = np.minimum(begins[:, None] + np.arange(counts.max(initial=0)), len(drafts) - 1)
        columns = (metadata.target_logits_indices, places.ravel(), counts, firsts)
        given = to_device(np.concatenate(columns), token_ids.device)
        rows, there, num_drafts, first = torch.split(given, [len(column) for column in columns])
        are_right = token_ids.index_select(0, rows) == drafts
        runs = are_right.index_select(0, there).view(places.shape).cumprod(1).sum(1)
        num_right = torch.minimum(runs, num_drafts)
        return Verified(token_ids.index_select(0, first + num_right), num_drafts - num_right)
