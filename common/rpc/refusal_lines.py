"""A bound on the log lines of refused calls: a call that costs its client 50 bytes must not cost 256 bytes of log."""

from __future__ import annotations

from collections import Counter
from typing import Final

from common.limits import MAX_REFUSAL_LINES, REFUSAL_LINES_PER_S

SUMMARY_S: Final = 1.0


class RefusalLines:
    """Decides which refused calls get a log line, and counts the others by status.

    MAX_REFUSAL_LINES may be written at once, then REFUSAL_LINES_PER_S.
    """

    def __init__(self) -> None:
        self._left = float(MAX_REFUSAL_LINES)
        self._counted_at = 0.0
        self._unwritten: Counter[str] = Counter()

    def take(self, status: str, now: float) -> bool:
        """True if a call that ended with `status` gets a line; otherwise it is counted."""
        earned = max(0.0, now - self._counted_at) * REFUSAL_LINES_PER_S
        self._left = min(float(MAX_REFUSAL_LINES), self._left + earned)
        self._counted_at = now
        if self._left >= 1:
            self._left -= 1
            return True
        self._unwritten[status] += 1
        return False

    def take_unwritten(self) -> dict[str, int]:
        """Number of calls without a line since the last call, by status."""
        counted = dict(self._unwritten)
        self._unwritten.clear()
        return counted
