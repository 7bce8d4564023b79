"""Paces sequences whose constraints take long, so that others do not wait for these in every step. Pure.

A step waits for the masks of all its rows, and a mask may take tens of milliseconds. So each sequence pays for the CPU
time of its masks: until that is a `SHARE` of the time that passes it is not decoded, while others are that never had to
pay. All of them pay into one account, so that many have no larger share than one. What a new grammar takes until its
masks are quick is free, as far as little was charged before (`FREE_S`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

# Of the engine's time, for constraints that take long: a neighbour keeps the rest.
SHARE: Final = 1 / 20
# CPU seconds that are free after a while without any charge.
FREE_S: Final = 0.25


class ConstraintPace:
    """Accounts of sequences that pay for their masks."""

    def __init__(self) -> None:
        # When everything is paid, and by sequence.
        self._paid_at = -math.inf
        self._held: dict[int, float] = {}
        self._charged: set[int] = set()

    def charge(self, spent: Mapping[int, float], step_s: float, now: float) -> None:
        """Charges sequences for a step, unless the masks of all are a share of it anyway.

        Args:
            spent: CPU seconds of their masks, of those that took long.
            step_s: that the step took.
            now: monotonic seconds.
        """
        if sum(spent.values()) <= SHARE * step_s:
            return
        for seq_id, cpu_s in spent.items():
            self._paid_at = self._held[seq_id] = max(self._paid_at, now - FREE_S / SHARE) + cpu_s / SHARE
        self._charged.update(spent)

    def held(self, now: float, running: Iterable[int]) -> frozenset[int]:
        """Sequences that have not paid yet; none where no running one would wait for them that never had to."""
        if not self._charged:
            return frozenset()
        ids = set(running)
        self._charged &= ids
        self._held = {seq_id: paid_at for seq_id, paid_at in self._held.items() if paid_at > now and seq_id in ids}
        return frozenset(self._held) if ids - self._charged else frozenset()
