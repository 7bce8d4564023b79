"""Conduct of an address: when it is dialled again, and how much of a worker there is trusted with new work. Pure.

Invariants:
  * A worker that was well is dialled again at once, and then every REDIAL_S: the interval grows with the time for which
    the address has failed (after a minute away a worker is found within three seconds), to MAX_REDIAL_S, or to
    MAX_REDIAL_UNREADY_S while something answers there. Each differs by chance, so that routers do not dial in step.
  * A life is the time of one process. Who has died young SHORT_LIVES times or more in a row is on probation when it
    comes back, and is dialled later from death to death. A life that ended in good order is not one of them.
"""

from __future__ import annotations

from collections.abc import Callable

from common.limits import (
    MAX_PROBATION_S,
    MAX_REDIAL_S,
    MAX_REDIAL_UNREADY_S,
    PROBATION_S,
    REDIAL_GROWTH,
    REDIAL_JITTER,
    REDIAL_S,
    SHORT_LIFE_S,
    SHORT_LIVES,
)


class Conduct:
    """The record of one address. Times are monotonic seconds.

    Args:
        chance: gives a number in [0, 1), another one each time.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._instance = ""
        self._began = 0.0
        self._ended: float | None = None
        # Lives in a row that were short, the one that is under way not counted.
        self._short_lives = 0
        self._failing_since: float | None = None

    def came_up(self, instance: str, now: float) -> None:
        """A stream with a process has been opened; the same one as before goes on with its life."""
        self._failing_since = None
        if instance != self._instance:
            self._end_life()
            self._instance, self._began = instance, now
        self._ended = None

    def went_down(self, now: float, *, in_good_order: bool) -> None:
        """The stream has ended. In good order: the worker had said so, or this router wanted it."""
        self._failing_since = None
        self._ended = now
        if in_good_order:
            self._short_lives = 0
            self._instance = ""

    def probation_s(self, now: float) -> float:
        """For how long the worker that has come up is on probation, seconds; 0 when it is not."""
        if self._short_lives < SHORT_LIVES:
            return 0.0
        whole_s = min(PROBATION_S * 2.0 ** min(self._short_lives - SHORT_LIVES, 10), MAX_PROBATION_S)
        return max(0.0, self._began + whole_s - now)

    def redial_after_s(self, now: float, *, answers: bool) -> float:
        """Seconds until the next dial, after one that has failed, or a stream that was over at once.

        Args:
            now: monotonic seconds.
            answers: whether a process there says itself that it does not serve.
        """
        if self._failing_since is None:
            self._failing_since = now
        longest_s = MAX_REDIAL_UNREADY_S if answers else MAX_REDIAL_S
        young_deaths = self._short_lives + (self._ended is not None and self._ended - self._began < SHORT_LIFE_S)
        punished_s = REDIAL_S * 2.0 ** min(max(0, young_deaths - SHORT_LIVES), 10)
        wait_s = max(REDIAL_S, REDIAL_GROWTH * (now - self._failing_since), punished_s)
        return min(wait_s, longest_s) * (1 + REDIAL_JITTER * (self._chance() - 0.5))

    def _end_life(self) -> None:
        """The process that was here last is gone."""
        if not self._instance or self._ended is None:
            return
        is_short = self._ended - self._began < SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0
