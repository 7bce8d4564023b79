"""Paces sequences with slow masks, so that other sequences do not wait for these masks in every step. Pure.

A step waits for the masks of all its rows, and one mask may take tens of milliseconds. So each sequence pays for the
CPU time of its masks. It is not decoded until that time is a `SHARE` of the time that has passed, as long as a running
sequence exists that was never charged. All sequences pay into one account, so many of them have no larger share than
one. The first masks of a new grammar are slow, so `FREE_S` seconds are free if little was charged before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

# Share of the engine's time for slow masks; other sequences keep the rest.
SHARE: Final = 1 / 20
# CPU seconds that are free after a while without any charge.
FREE_S: Final = 0.25


class ConstraintPace:
    """Accounts of sequences that pay for their masks."""

    def __init__(self) -> None:
        # Times at which the account is balanced: the whole, and each sequence's part.
        self._paid_at = -math.inf
        self._held: dict[int, float] = {}
        self._charged: set[int] = set()

    def charge(self, spent: Mapping[int, float], step_s: float, now: float) -> None:
        """Charges sequences for their masks in one step, unless all masks together took at most `SHARE` of it.

        Args:
            spent: CPU seconds of slow masks, by sequence.
            step_s: seconds that the step took.
            now: monotonic seconds.
        """
        if sum(spent.values()) <= SHARE * step_s:
            return
        for seq_id, cpu_s in spent.items():
            self._paid_at = self._held[seq_id] = max(self._paid_at, now - FREE_S / SHARE) + cpu_s / SHARE
        self._charged.update(spent)

    def held(self, now: float, running: Iterable[int]) -> frozenset[int]:
        """Sequences whose masks are not paid for yet; empty if every running sequence has been charged."""
        if not self._charged:
            return frozenset()
        ids = set(running)
        self._charged &= ids
        self._held = {seq_id: paid_at for seq_id, paid_at in self._held.items() if paid_at > now and seq_id in ids}
        return frozenset(self._held) if ids - self._charged else frozenset()
