"""Account of the time that drafts save and cost. Pure, no clock.

What steps with drafts take is compared with what plain ones would have taken for the same tokens. Losses may add up to
a small part of all time; beyond that there are no drafts until it has grown again. So a decision that is wrong, for
whatever reason, costs no more. Past gains pay for a few steps and no more, since what paid at one load does not at
another.
"""

from __future__ import annotations

from typing import Final

# Part of the time that may be lost, as if it had been saved.
_ALLOWED: Final = 0.01
# Plain steps whose time is kept of what was saved, at most; and as so many, or so many of those with drafts before it,
# one step with drafts counts at most.
_MOST_KEPT: Final = 2.0
_LONGEST: Final = 3.0


class DraftSavings:
    """Seconds saved, in balance."""

    def __init__(self) -> None:
        self._balance_s = 0.0
        self._token_s = 0.0
        # Of the last step with drafts.
        self._last_s = 0.0

    @property
    def allows(self) -> bool:
        """True if no more was lost than may be."""
        return self._balance_s >= 0.0

    def allows_beyond(self, seconds: float) -> bool:
        """True if no more was lost than may be, and so many seconds that the next steps may bring back."""
        return self._balance_s >= -seconds

    def step(self, duration_s: float, plain_s: float, num_seqs: int, *, has_drafts: bool) -> None:
        """A step has taken so long; `accepted` follows if it had drafts.

        Args:
            duration_s: that it took.
            plain_s: that it would have taken without any.
            num_seqs: that it brought at least a token each.
            has_drafts: whether it verified any, or made any.
        """
        self._balance_s += _ALLOWED * duration_s
        if has_drafts:
            self._balance_s += plain_s - min(duration_s, _LONGEST * max(plain_s, self._last_s))
            self._last_s = duration_s
        self._balance_s = min(self._balance_s, _MOST_KEPT * plain_s)
        self._token_s = plain_s / num_seqs

    def accepted(self, num_tokens: int) -> None:
        """So many drafts of a sequence were right in the newest step."""
        self._balance_s += num_tokens * self._token_s
