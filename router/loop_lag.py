"""How late the event loop is: what a request that arrives at a random moment waits before the loop looks at it.

A timer notes by how much it is late. While the loop is held for longer than its interval, timers that should have fired
meanwhile would have been late too: they are counted as well, so that one long stall is not one late timer among
thousands (coordinated omission). The clock of uvloop's timers has a resolution of 1 ms, and so has the result.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

# To wake an idle process takes some 0.1 ms of CPU, which a worker on the same cores may be computing on.
INTERVAL_S: Final = 0.1
# Upper bounds of the classes: 0.1 ms to 10 s, each 1.2 times the one before.
BOUNDS_S: Final = tuple(1e-4 * 1.2**i for i in range(64))
# A stall is counted up to here, so that a suspended process does not count for ever.
_MAX_COUNTED_S: Final = 10.0


def counted(lag_s: float, interval_s: float) -> Iterator[float]:
    """A lag, and those of the timers that should have fired within it, one every `interval_s`."""
    lag_s = min(lag_s, _MAX_COUNTED_S)
    while lag_s >= 0:
        yield lag_s
        lag_s -= interval_s


class LagHistogram:
    """Counts of lags by class.

    Attributes:
        counts: one per bound, of lags up to it and above the bound before; the last one counts all above.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.counts = list(counts) or [0] * (len(BOUNDS_S) + 1)

    def record(self, lag_s: float, interval_s: float = INTERVAL_S) -> None:
        """Counts a lag, and those of the timers that should have fired within it, one every `interval_s`."""
        for each in counted(lag_s, interval_s):
            self.counts[bisect_left(BOUNDS_S, each)] += 1

    def since(self, earlier: LagHistogram) -> LagHistogram:
        """What has come after `earlier`, a copy of this one's past."""
        return LagHistogram([now - then for now, then in zip(self.counts, earlier.counts, strict=True)])

    def quantile(self, q: float) -> float:
        """The upper bound of the class that holds quantile `q`, seconds; 0 when nothing has been counted."""
        left = q * sum(self.counts)
        for count, bound in zip(self.counts, (*BOUNDS_S, _MAX_COUNTED_S), strict=True):
            left -= count
            if count and left <= 0:
                return bound
        return 0.0


class LoopLag:
    """Watches the running event loop until `stop`.

    Args:
        clock: monotonic seconds.
        on_lag: told every lag that is counted, in seconds; None for nobody.
        interval_s: from one look to the next, seconds.

    Attributes:
        histogram: what has been seen since the start.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_lag: Callable[[float], None] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.histogram = LagHistogram()
        self._interval_s = interval_s
        self._on_lag = on_lag
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
        self.histogram.record(lag_s, self._interval_s)
        if self._on_lag is not None:
            for each in counted(lag_s, self._interval_s):
                self._on_lag(each)
        self.start()
