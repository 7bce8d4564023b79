"""Counts of verified and accepted draft tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import structlog

from common.wire.draft_counts import Counts

log = structlog.get_logger(__name__)

_LOG_EVERY: Final = 1000


class DraftCounter:
    """Counts drafts of verifications by position."""

    __slots__ = ("_with_accepted", "_with_drafts")

    def __init__(self) -> None:
        # Verifications by number of drafts, and by number of accepted drafts.
        self._with_drafts = [0]
        self._with_accepted = [0]

    def count(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        """Adds `times` verifications of `num_drafts` drafts of one sequence, `num_accepted` of them accepted."""
        if num_drafts >= len(self._with_drafts):
            more = [0] * (num_drafts + 1 - len(self._with_drafts))
            self._with_drafts += more
            self._with_accepted += more
        self._with_drafts[num_drafts] += times
        self._with_accepted[num_accepted] += times

    @property
    def by_position(self) -> tuple[Counts, ...]:
        """Counts of each position."""
        drafts, accepted = (
            list(accumulate(reversed(counts[1:])))[::-1] for counts in (self._with_drafts, self._with_accepted)
        )
        return tuple(zip(drafts, accepted, strict=True))


class SpecStats:
    """Counts of draft tokens since the start, with a log line every 1000.

    Args:
        logs: False for no log lines.

    Attributes:
        total_draft_tokens: number of verified drafts.
        total_accepted_tokens: number of accepted ones.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self.total_draft_tokens = 0
        self.total_accepted_tokens = 0
        self._counter = DraftCounter()
        self._logs = logs

    @property
    def by_position(self) -> tuple[Counts, ...]:
        """Verified and accepted drafts by position behind the newest token."""
        return self._counter.by_position

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of all drafts; 0 before the first draft."""
        return self.total_accepted_tokens / self.total_draft_tokens if self.total_draft_tokens else 0.0

    def take(self, outcomes: Mapping[tuple[int, int], int]) -> None:
        """Adds one step's draft counts.

        Args:
            outcomes: number of sequences by their numbers of verified and of accepted drafts.
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
