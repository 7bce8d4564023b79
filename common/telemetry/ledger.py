"""Ledger of one request: divides its time among stages, without gaps and without overlaps. Pure.

Invariants:
  * One stage runs at a time. The parts of all stages add up to the time since the ledger began.
  * No part is negative, even if times come from clocks that do not agree: a time before the running stage began counts
    as its beginning, and shares that exceed an interval are scaled down to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from common.telemetry.names import Stage

_STAGES: Final = tuple(Stage)


@dataclass(frozen=True, slots=True)
class Blame:
    """The request that cost another one most in one stage.

    Attributes:
        request_id: its id, "" if unknown.
        tenant: its tenant.
        seconds: time that it cost.
    """

    request_id: str
    tenant: str
    seconds: float


class Ledger:
    """Stage clock of one request.

    Args:
        stage: the first stage.
        now: monotonic seconds at which it begins.

    Attributes:
        stage: the running stage.
        since: time at which the running stage began, or was last accounted for.
        blames: the request that cost most, by stage.
        ended: end of the newest time that counts for a stage, by stage.
    """

    __slots__ = ("_spent", "blames", "ended", "since", "stage")

    def __init__(self, stage: Stage, now: float) -> None:
        self.stage = stage
        self.since = now
        self.blames: dict[Stage, Blame] = {}
        self.ended: dict[Stage, float] = {}
        self._spent: dict[Stage, float] = {}

    def enter(self, stage: Stage, now: float, shares: Mapping[Stage, float] | None = None) -> None:
        """Ends the running stage at `now` and starts `stage`.

        Args:
            stage: the next stage, perhaps the same one.
            now: monotonic seconds; may lie in the past, but not before the running stage began.
            shares: seconds of the ended interval that belong to other stages; the running stage gets the rest.
        """
        rest = max(0.0, now - self.since)
        if shares:
            claimed = sum(max(0.0, seconds) for seconds in shares.values())
            scale = 1.0 if claimed <= rest else rest / claimed
            for each, seconds in shares.items():
                if seconds > 0:
                    self._spent[each] = self._spent.get(each, 0.0) + scale * seconds
                    self.ended[each] = now
            rest = max(0.0, rest - scale * claimed)
        self._spent[self.stage] = self._spent.get(self.stage, 0.0) + rest
        self.ended[self.stage] = now
        self.stage, self.since = stage, max(now, self.since)

    def blame(self, stage: Stage, blame: Blame) -> None:
        """Blames a request for a stage, unless another one cost more."""
        if stage not in self.blames or self.blames[stage].seconds < blame.seconds:
            self.blames[stage] = blame

    def fork(self) -> Ledger:
        """A ledger with the same history."""
        other = Ledger(self.stage, self.since)
        other.blames, other.ended, other._spent = dict(self.blames), dict(self.ended), dict(self._spent)
        return other

    def parts(self, now: float) -> dict[Stage, float]:
        """Seconds of each stage until `now`, in the order of Stage, without empty ones."""
        running = self._spent.get(self.stage, 0.0) + max(0.0, now - self.since)
        spent = {**self._spent, self.stage: running}
        return {stage: spent[stage] for stage in _STAGES if spent.get(stage)}
