"""Restart policy: when a child that died is started again, and when its supervisor gives up. Pure: deaths in,
decisions out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
MAX_DEATHS = 3
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the child again: it died `deaths` times within the window."""

    deaths: int


@dataclass(slots=True)
class RestartPolicy:
    """Back-off and the limit of deaths for one child.

    Invariants: the first death of a streak is answered after FIRST_DELAY_S, each further one after twice as long, never
    longer than MAX_DELAY_S. A streak ends when the child has gone WINDOW_S without dying. MAX_DEATHS deaths within
    WINDOW_S, and nothing else, give up.
    """

    _last_deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS))
    _streak: int = 0

    def died(self, now: float) -> Restart | GiveUp:
        """Decides after a death.

        Args:
            now: seconds on a monotonic clock, never less than in an earlier call.
        """
        if self._last_deaths and now - self._last_deaths[-1] > WINDOW_S:
            self._streak = 0
        self._streak += 1
        self._last_deaths.append(now)
        recent = sum(1 for death in self._last_deaths if now - death <= WINDOW_S)
        if recent == MAX_DEATHS:
            return GiveUp(recent)
        # The exponent is bounded, because 2.0**n overflows.
        return Restart(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._streak - 1, 32)))
