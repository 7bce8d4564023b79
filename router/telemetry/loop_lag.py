"""Lag of the event loop: the time that a request arriving at a random moment waits before the loop looks at it.

A timer notes by how much it is late. While the loop is held for longer than its interval, timers that should have fired
meanwhile would have been late too: they are counted as well, so that one long stall is not one late timer among
thousands (coordinated omission). The clock of uvloop's timers has a resolution of 1 ms, and so has the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

# To wake an idle process takes some 0.1 ms of CPU, which a worker on the same cores may be computing on.
INTERVAL_S: Final = 0.25
# A stall is counted up to here, so that a suspended process does not count for ever.
MAX_COUNTED_S: Final = 10.0


def counted(lag_s: float, interval_s: float) -> Iterator[float]:
    """A lag, and those of the timers that should have fired within it, one every `interval_s`."""
    lag_s = min(lag_s, MAX_COUNTED_S)
    while lag_s >= 0:
        yield lag_s
        lag_s -= interval_s


class LoopLag:
    """Watches the running event loop until `stop`.

    Args:
        on_lag: told every lag that is counted, in seconds.
        clock: monotonic seconds.
        interval_s: from one look to the next, seconds.
    """

    def __init__(
        self,
        on_lag: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._on_lag = on_lag
        self._interval_s = interval_s
        self._clock = clock
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins; on the loop that is to be watched."""
        self._due = self._clock() + self._interval_s
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        """Ends; may be called twice, and without a start."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        lag_s = max(0.0, self._clock() - self._due)
        try:
            for each in counted(lag_s, self._interval_s):
                self._on_lag(each)
        finally:
            self.start()
