"""Statistics of draft tokens: how many the model has accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

from common.wire.draft_counts import Counts, DraftCounter

log = structlog.get_logger(__name__)

_LOG_EVERY: Final = 1000


class SpecStats:
    """Counts since the start; a log line after every 1000 draft tokens.

    Args:
        logs: False for no log lines.

    Attributes:
        total_draft_tokens: drafts that were verified.
        total_accepted_tokens: those of them that were the model's own tokens.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self.total_draft_tokens = 0
        self.total_accepted_tokens = 0
        self._counter = DraftCounter()
        self._logs = logs

    @property
    def by_position(self) -> tuple[Counts, ...]:
        """Drafts verified and accepted: the first ones behind a token, the second ones, and so on."""
        return self._counter.by_position

    @property
    def acceptance_rate(self) -> float:
        """Accepted part of all drafts; 0 before the first."""
        return self.total_accepted_tokens / self.total_draft_tokens if self.total_draft_tokens else 0.0

    def take(self, outcomes: Mapping[tuple[int, int], int]) -> None:
        """Takes what a step has brought.

        Args:
            outcomes: number of sequences that had so many drafts of which so many were accepted: one less than the
                tokens that the step has output of each.
        """
        logged = self.total_draft_tokens // _LOG_EVERY
        for (num_drafts, num_accepted), times in outcomes.items():
            self.total_draft_tokens += times * num_drafts
            self.total_accepted_tokens += times * num_accepted
            self._counter.count(num_drafts, num_accepted, times)
        if self._logs and self.total_draft_tokens // _LOG_EVERY > logged:
            log.info(
                f"[MTP Stats] Total draft tokens: {self.total_draft_tokens}, Accepted: {self.total_accepted_tokens}, "
                f"Acceptance rate: {self.acceptance_rate:.2%}"
            )
