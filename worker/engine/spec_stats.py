"""Statistics of draft tokens: how many the model has accepted."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_LOG_EVERY: Final = 1000


class SpecStats:
    """Counts since the start; a log line after every 1000 draft tokens.

    Attributes:
        total_draft_tokens: drafts that were verified.
        total_accepted_tokens: those of them that were the model's own tokens.
    """

    def __init__(self) -> None:
        self.total_draft_tokens = 0
        self.total_accepted_tokens = 0
        # Verifications by how many drafts they had, and by how many were accepted.
        self._with_drafts: list[int] = [0]
        self._with_accepted: list[int] = [0]

    @property
    def by_position(self) -> list[tuple[int, int]]:
        """Drafts verified and accepted: the first ones behind a token, the second ones, and so on."""
        drafts, accepted = (
            list(accumulate(reversed(counts[1:])))[::-1] for counts in (self._with_drafts, self._with_accepted)
        )
        return list(zip(drafts, accepted, strict=True))

    @property
    def acceptance_rate(self) -> float:
        """Accepted part of all drafts; 0 before the first."""
        return self.total_accepted_tokens / self.total_draft_tokens if self.total_draft_tokens else 0.0

    def update(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence's step has verified drafts and accepted some: one less than the tokens that it has output."""
        logged = self.total_draft_tokens // _LOG_EVERY
        self.count(num_drafts, num_accepted)
        if self.total_draft_tokens // _LOG_EVERY > logged:
            log.info(
                f"[MTP Stats] Total draft tokens: {self.total_draft_tokens}, Accepted: {self.total_accepted_tokens}, "
                f"Acceptance rate: {self.acceptance_rate:.2%}"
            )

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """`update` without a log line."""
        self.total_draft_tokens += num_drafts
        self.total_accepted_tokens += num_accepted
        if (more := num_drafts + 1 - len(self._with_drafts)) > 0:
            self._with_drafts += [0] * more
            self._with_accepted += [0] * more
        self._with_drafts[num_drafts] += 1
        self._with_accepted[num_accepted] += 1
