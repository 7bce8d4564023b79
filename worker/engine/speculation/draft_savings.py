"""Account of the time that drafts save and cost. Pure, no clock.

What steps with drafts take is compared with what plain ones would have taken for the same tokens. Losses may add up to
a small part of all time; beyond that there are no drafts until it has grown again. So a decision that is wrong costs
hardly more, but for what looks like an interruption (`_MOST_LONGER`). Past gains pay for a few steps and no more, since
what paid at one load does not at another; for more where a model drafts, so that a passage that is hard to draft does
not end what pays on the whole: there it takes long until drafts are tried again.
"""

from __future__ import annotations

from typing import Final

# Part of the time that may be lost, as if it had been saved.
_ALLOWED: Final = 0.01
# Plain steps whose time is kept of what was saved, at most: by drafts that cost nothing to make, and by a model's.
_MOST_KEPT: Final = 2.0
_MOST_KEPT_OF_MODEL: Final = 24.0
# A step may have been interrupted. It counts for at most so many times what was expected; one for which a model drafts
# for at most so many plain ones more than that, as a plain one does (step_costs.py), since it takes several times as
# long and is interrupted as much more often.
_LONGEST: Final = 3.0
_MOST_LONGER: Final = 1.0


class DraftSavings:
    """Seconds saved, in balance.

    Attributes:
        of_model: True if a model makes drafts.
    """

    def __init__(self) -> None:
        self.of_model = False
        self._balance_s = 0.0
        self._token_s = 0.0

    @property
    def allows(self) -> bool:
        """True if no more was lost than may be."""
        return self._balance_s >= 0.0

    def allows_beyond(self, seconds: float) -> bool:
        """True if no more was lost than may be, and so many seconds that the next steps may bring back."""
        return self._balance_s >= -seconds

    def step(
        self, duration_s: float, plain_s: float, num_seqs: int, expected_s: float | None, *, unnoted_s: float = 0.0
    ) -> None:
        """A step has taken so long; `accepted` follows if it had drafts.

        Args:
            duration_s: that it took.
            plain_s: that it would have taken without any.
            num_seqs: that it brought at least a token each.
            expected_s: that it was expected to take, of one that verified drafts or made any; None for a plain one.
            unnoted_s: seconds of plain steps before it that were not noted.
        """
        self._balance_s += _ALLOWED * (duration_s + unnoted_s)
        if expected_s is not None:
            expected_s = max(plain_s, expected_s)
            longest_s = expected_s + _MOST_LONGER * plain_s if self.of_model else _LONGEST * expected_s
            self._balance_s += plain_s - min(duration_s, longest_s)
        most_kept = _MOST_KEPT_OF_MODEL if self.of_model else _MOST_KEPT
        self._balance_s = min(self._balance_s, most_kept * plain_s)
        self._token_s = plain_s / num_seqs

    def spend(self, seconds: float) -> None:
        """Drafts have taken so long in a step that is not told otherwise."""
        self._balance_s -= seconds

    def accepted(self, num_tokens: int) -> None:
        """So many drafts of a sequence were right in the newest step."""
        self._balance_s += num_tokens * self._token_s
