"""Send times of a benchmark's requests: closed loop and open loop. Pure: times are seconds since a run's begin.

A closed loop keeps a number of requests in flight: a slow service is asked less. An open loop sends at times of its
own, whatever the service does, and a request's latency counts from the time at which it was to be sent: what it waits
for, in the service or in a client that is late, is part of it (no coordinated omission, Tene 2013).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Extent:
    """End of a run: after a number of requests or a time, whichever is first.

    Attributes:
        requests: to send; None is no limit.
        duration_s: after which none is sent any more; those in flight are waited for. None is no limit.

    Raises:
        ValueError: there is no limit, or one of them is not above 0.
    """

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise ValueError("a run needs a number of requests or a duration")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests is {self.requests}; valid: at least 1")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError(f"duration is {self.duration_s} s; valid: above 0")

    def allows(self, sent: int, at: float) -> bool:
        """True if a request may be sent at `at` when `sent` have been."""
        return (self.requests is None or sent < self.requests) and (self.duration_s is None or at < self.duration_s)


class Load(Protocol):
    """Decides when requests are sent."""

    def take(self, now: float, in_flight: int) -> list[float]:
        """Due times of the requests that are due now; they count as sent from here on."""
        ...

    def next_time(self) -> float | None:
        """Time at which the next one is due; None: when a request ends, or never."""
        ...

    def exhausted(self, now: float) -> bool:
        """True if no further request will be due."""
        ...


class ClosedLoop:
    """Keeps `concurrency` requests in flight; when one ends, the next is sent at once.

    Raises:
        ValueError: `concurrency` is below 1.
    """

    def __init__(self, concurrency: int, extent: Extent) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; valid: at least 1")
        self.concurrency = concurrency
        self._extent = extent
        self._sent = 0

    def take(self, now: float, in_flight: int) -> list[float]:
        """Due times of new requests, one for each free place."""
        due: list[float] = []
        while in_flight + len(due) < self.concurrency and not self.exhausted(now):
            self._sent += 1
            due.append(now)
        return due

    def next_time(self) -> None:
        """Returns None: the end of a request decides."""
        return

    def exhausted(self, now: float) -> bool:
        """True if the extent is used up."""
        return not self._extent.allows(self._sent, now)


class OpenLoop:
    """Sends requests at given intervals.

    Args:
        gaps: before each request, the first one included; without end.
        extent: a request that would be due after its duration is not sent.
    """

    def __init__(self, gaps: Iterator[float], extent: Extent) -> None:
        self._gaps = gaps
        self._extent = extent
        self._sent = 0
        self._next = next(gaps)

    def take(self, now: float, in_flight: int) -> list[float]:
        """Due times up to now."""
        due: list[float] = []
        while self._next <= now and not self.exhausted(now):
            self._sent += 1
            due.append(self._next)
            self._next += next(self._gaps)
        return due

    def next_time(self) -> float:
        """The time of the next request."""
        return self._next

    def exhausted(self, now: float) -> bool:
        """True if the extent ends before the next request."""
        return not self._extent.allows(self._sent, self._next)


def gaps(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Times between requests, without end: gamma distributed with mean 1/rate, by a seed.

    Args:
        rate: requests per second, above 0.
        burstiness: the distribution's shape, above 0. 1: exponential, so that requests come as a Poisson process;
            above it they come more evenly, `inf` at equal distances; below it in bursts. The variance of a gap is
            1 / (rate^2 * burstiness).
        seed: the same seed gives the same times.

    Raises:
        ValueError: `rate` or `burstiness` is out of range.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}; valid: a number above 0, requests per second")
    if not burstiness > 0:
        raise ValueError(f"burstiness is {burstiness}; valid: a number above 0, 1 for Poisson, inf for equal distances")
    return _gaps(rate, burstiness, random.Random(f"gaps {seed}"))


def _gaps(rate: float, burstiness: float, rnd: random.Random) -> Iterator[float]:
    while True:
        yield 1 / rate if math.isinf(burstiness) else rnd.gammavariate(burstiness, 1 / (rate * burstiness))
