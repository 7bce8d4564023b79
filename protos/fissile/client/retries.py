"""Time and place of a call that is made again. Pure: `now` comes in."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fissile.client.errors import FissileError

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0
# Reasons of a router that has no room now.
FULL = frozenset({"QUEUE_FULL", "TENANT_LIMIT"})
# Most routers behind one name; each is tried in turn. An IP address with a port is one router.
_ROUTERS_OF_A_NAME = 8
_ONE_ADDRESS = re.compile(r"(\d+\.\d+\.\d+\.\d+|\[[0-9a-fA-F:.]+\]):\d+")


@dataclass(slots=True)
class Retries:
    """The attempts of one call over a list of routers.

    Attributes:
        targets: addresses of the routers.
        give_up_s: how long the call is made again since its first failure without a message in between; 0 is never.
            A router that has waited this long for a worker is not asked again.
        place: of the router that is asked now.
        waits_when_full: False gives up as soon as each router has refused a call that has not begun for its full queue.
    """

    targets: Sequence[str]
    give_up_s: float
    place: int = 0
    waits_when_full: bool = True
    _has_begun: bool = False
    _failed_since: float | None = None
    _wait_s: float = _FIRST_WAIT_S
    _refusals: Counter[str] = field(default_factory=Counter)
    _draw: random.Random = field(default_factory=random.Random)

    @property
    def target(self) -> str:
        """Address of the router to ask."""
        return self.targets[self.place % len(self.targets)]

    def progress(self) -> None:
        """Notes that something was received."""
        self._failed_since, self._wait_s, self._has_begun = None, _FIRST_WAIT_S, True
        self._refusals.clear()

    def failed(self, error: FissileError, now: float) -> float | None:
        """Seconds until the next attempt, at the next router; None to give up.

        Args:
            error: how the attempt has ended.
            now: monotonic seconds.
        """
        since = self._failed_since = now if self._failed_since is None else self._failed_since
        if not self.give_up_s or now - since >= self.give_up_s:
            return None
        if error.waited_s >= self.give_up_s:
            # It would wait as long again, and so would the other routers behind its name.
            self._refusals[self.target] = _ROUTERS_OF_A_NAME
        is_full = error.reason in FULL and not self.waits_when_full and not self._has_begun
        if error.is_of_one_router or is_full:
            self._refusals[self.target] += 1
            return 0.0 if self._move() else None
        if not error.may_go_on or not self._move():
            return None
        wait_s = error.retry_after_s
        # Another router may have what this one lacks.
        if wait_s is None or len(self.targets) > 1:
            wait_s, self._wait_s = self._wait_s * self._draw.uniform(0.5, 1.0), min(2 * self._wait_s, _LONGEST_WAIT_S)
        return min(wait_s, since + self.give_up_s - now)

    def _move(self) -> bool:
        """Moves to the next router that has not refused for good; False if there is none."""
        for step in range(1, len(self.targets) + 1):
            target = self.targets[(self.place + step) % len(self.targets)]
            if self._refusals[target] < (1 if _ONE_ADDRESS.fullmatch(target) else _ROUTERS_OF_A_NAME):
                self.place += step
                return True
        return False
