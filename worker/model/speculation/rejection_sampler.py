"""Verifies drafts: a draft is accepted if the model itself samples that token.

Every row is sampled as in a plain decode, with the noise of its seed and position. So the verification draws no random
numbers and changes no distribution: drafts change how many tokens a step outputs, never which. Nothing is rejected by
chance, in spite of the usual name of the class.
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
        draft_token_ids: int64 [D], sequence by sequence; NO_TOKEN for a draft that only the device knows.
        num_draft_tokens: int64 [F], drafts of each sequence.
        target_logits_indices: int64 [D], the row before each draft, whose sampled token the draft must equal.
        bonus_logits_indices: int64 [F], the row of each sequence's last draft.
    """

    draft_token_ids: Ints
    num_draft_tokens: Ints
    target_logits_indices: Ints
    bonus_logits_indices: Ints

    @classmethod
    def of(cls, drafts: list[list[int]]) -> SpecDecodeMetadata:
        """Metadata of drafts by sequence."""
        counts = np.array([len(own) for own in drafts], np.int64)
        last = np.cumsum(counts + 1) - 1
        every = np.arange(counts.sum() + len(drafts))
        return cls(np.array(list(chain.from_iterable(drafts)), np.int64), counts, np.delete(every, last), last)

    @cached_property
    def are_known(self) -> bool:
        """True if the host knows every draft."""
        return not len(self.draft_token_ids) or NO_TOKEN not in self.draft_token_ids


@dataclass(frozen=True)
class VerifiedDrafts:
    """Result of a verification on the device.

    Attributes:
        newest: int64 [F], the token after each sequence's accepted drafts; NO_TOKEN without one.
        num_rejected: int64 [F], number of rejected drafts.
    """

    newest: torch.Tensor
    num_rejected: torch.Tensor


class RejectionSampler:
    """Finds the accepted drafts of each sequence, on the host or on the device."""

    def accept(self, metadata: SpecDecodeMetadata, token_ids: list[int]) -> list[tuple[int, ...]]:
        """New tokens of each sequence: its accepted drafts and the token sampled after them.

        Args:
            metadata: the step's drafts, all known to the host.
            token_ids: sampled tokens of all rows.
        """
        if not len(metadata.draft_token_ids):
            return list(zip(token_ids))
        drawn = np.array(token_ids, np.int64)
        wrong = np.append(drawn[metadata.target_logits_indices] != metadata.draft_token_ids, True)
        # The appended one marks the end of all drafts.
        first_wrong = np.flatnonzero(wrong)
        begins = np.cumsum(metadata.num_draft_tokens) - metadata.num_draft_tokens
        reached = first_wrong[np.searchsorted(first_wrong, begins)] - begins
        return self.accepted(
            metadata, token_ids, metadata.num_draft_tokens - np.minimum(reached, metadata.num_draft_tokens)
        )

    def accepted(self, metadata: SpecDecodeMetadata, token_ids: list[int], num_rejected: Ints) -> list[tuple[int, ...]]:
        """`accept` for a known number of rejected drafts of each sequence, int64 [F]."""
        counts = metadata.num_draft_tokens
        firsts = metadata.bonus_logits_indices - counts
        bounds = zip(firsts.tolist(), (counts - num_rejected).tolist(), strict=True)
        return [tuple(token_ids[first : first + count + 1]) for first, count in bounds]

    def verify(self, metadata: SpecDecodeMetadata, token_ids: torch.Tensor, drafts: torch.Tensor) -> VerifiedDrafts:
        """Verifies on the device, without waiting for it.

        Args:
            metadata: the step's drafts, known to the host or not.
            token_ids: int64 [R], sampled tokens of all rows.
            drafts: int64 [D], the computed drafts; none is NO_TOKEN.
        """
        counts = metadata.num_draft_tokens
        begins, firsts = np.cumsum(counts) - counts, metadata.bonus_logits_indices - counts
        # One column for each draft of the longest run; a shorter run continues with other drafts, cut off by `minimum`.
        places = np.minimum(begins[:, None] + np.arange(counts.max(initial=0)), len(drafts) - 1)
        columns = (metadata.target_logits_indices, places.ravel(), counts, firsts)
        given = to_device(np.concatenate(columns), token_ids.device)
        rows, there, num_drafts, first = torch.split(given, [len(column) for column in columns])
        are_right = token_ids.index_select(0, rows) == drafts
        runs = are_right.index_select(0, there).view(places.shape).cumprod(1).sum(1)
        num_right = torch.minimum(runs, num_drafts)
        return VerifiedDrafts(token_ids.index_select(0, first + num_right), num_drafts - num_right)
