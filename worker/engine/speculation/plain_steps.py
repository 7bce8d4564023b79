"""Says when steps are plain so that those with drafts can be compared with them, and which plain steps count. Pure.

Nobody knows what drafts save without what plain steps take, and that changes. But a plain step behind ones for which a
model made drafts takes longer than one behind plain ones, for a small model half as long again: code, weights and
predicted branches have left the processor. Who compared drafts with it would find them better than they are. So a
comparison is some plain steps in a row, of which the last ones count; it comes less often where it finds nothing new.
Steps right behind prompts do not count either.
"""

from __future__ import annotations

from typing import Final

# Plain steps behind those of a model, and behind prompts, that do not count; and those of a comparison that do.
_SETTLING: Final = 6
_BEHIND_PROMPTS: Final = 2
_COUNTED: Final = 2
# Steps with drafts between two comparisons: at first, and at most.
_SHORTEST: Final = 32
_LONGEST: Final = 512
# A comparison comes earlier as soon as steps, or those for which a model drafts, take so much more or less than at the
# last one: that may be true of steps with drafts alone. Where a model drafts so many steps at least lie between two.
_SURPRISE: Final = 0.1
_SURPRISE_OF_DRAFTING: Final = 0.2
_LEAST_APART: Final = 16
# A level is a new one if it differs by more than so many times the usual difference: a mean, in which the newest
# comparison counts so much.
_MOST_USUAL: Final = 2.0
_USUAL_WEIGHT: Final = 0.2


class PlainSteps:
    """Turns of steps with drafts and plain ones."""

    def __init__(self) -> None:
        # Steps with drafts since the last plain one, and until the next comparison.
        self._num_drafting = 0
        self._every = _SHORTEST
        # Plain steps left until they count: behind drafts, behind prompts; and of a comparison.
        self._settling = 0
        self._behind_prompts = 0
        self._left = 0
        # True behind the last step of a comparison: drafts have not ended by it.
        self._resumes = False
        # Levels of steps, and of those with proposals, at the last plain step that counted; of steps at the last
        # comparison.
        self._levels = 1.0, 1.0
        self._compared = 1.0
        # Part by which it differed from one comparison to the next.
        self._usual = 0.0

    @property
    def drafts(self) -> bool:
        """True if the last step had drafts, or would have had but for a comparison."""
        return self._num_drafting > 0 or self._left > 0 or self._resumes

    @property
    def are_settled(self) -> bool:
        """True if drafts are over for so long that a plain step takes no longer for them."""
        return self._settling == 0

    @property
    def count(self) -> bool:
        """True if a plain step would tell now what plain ones take."""
        return self._settling == 0 and self._behind_prompts == 0

    def prompted(self) -> None:
        """A step had prompts."""
        self._behind_prompts = _BEHIND_PROMPTS

    def is_due(self, level: float, of_drafting: float) -> bool:
        """True if the next step is a plain one, to compare with.

        Args:
            level: of steps now (StepCosts).
            of_drafting: of those for which a model drafts, beside that.
        """
        if self._num_drafting == 0:
            return self._left > 0
        surprise, other = abs(level / self._levels[0] - 1), abs(of_drafting / self._levels[1] - 1)
        return (
            self._num_drafting >= self._every
            or surprise > _SURPRISE
            or (self._num_drafting >= _LEAST_APART and other > _SURPRISE_OF_DRAFTING)
        )

    def drafted(self, *, by_model: bool) -> None:
        """A step has verified drafts, or a model has made some in it."""
        self._num_drafting += 1
        self._behind_prompts = max(0, self._behind_prompts - 1)
        self._left, self._resumes = 0, False
        if by_model:
            self._settling = _SETTLING

    def passed(self, level: float, of_drafting: float) -> None:
        """A plain step is over; the levels are those with what it has told."""
        if self._num_drafting and self.is_due(level, of_drafting):
            self._left = self._settling + _COUNTED if self._settling else 1
        self._num_drafting = 0
        if self.count:
            self._levels = level, of_drafting
        self._settling = max(0, self._settling - 1)
        self._behind_prompts = max(0, self._behind_prompts - 1)
        self._resumes = self._left == 1
        if self._resumes:
            self._compare(level)
        self._left = max(0, self._left - 1)

    def _compare(self, level: float) -> None:
        """Comparisons come more often where one has found another level than the one before it; not where levels always
        differ as much, since then nothing was learnt."""
        difference = abs(level / self._compared - 1)
        is_new = difference > max(_SURPRISE, _MOST_USUAL * self._usual)
        self._every = _SHORTEST if is_new else min(2 * self._every, _LONGEST)
        self._compared = level
        self._usual += _USUAL_WEIGHT * (min(difference, 1.0) - self._usual)
