"""Why the requests of a lane wait: sums of the lane, which each request compares at both ends of its wait. Pure.

So the cost of a decision does not depend on the number of waiting requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from common.telemetry.ledger import Blame
from common.telemetry.names import Stage

# Requests at a worker that may be blamed: those that were released last.
_MOST_BLAMED: Final = 16
# A shorter wait has no cause worth looking for.
_LEAST_WAIT_S: Final = 1e-3


@dataclass(slots=True, eq=False)
class QueueWait:
    """Why one request waits at its router, over all lanes that it was bound to. Times in monotonic seconds.

    Attributes:
        request_id: id of the request.
        tenant: its tenant.
        tokens: length of its prompt.
        bound: time at which it was last bound to a lane.
        held_before: `LaneWaits.held` of the lane by then.
        held: seconds behind closed delay gates, by the reason.
        parked_s: seconds without a worker that can serve it.
        own_s: its tenant's share of the time for which it waited for requests at the worker.
        blame: the request at the worker with the largest share of that time, and the stage that it made longer.
        released: time of its release to a worker, None before.
        ended: time at which it left the worker, None before.
    """

    request_id: str = ""
    tenant: str = ""
    tokens: int = 0
    bound: float = 0.0
    held_before: dict[Stage, float] = field(default_factory=dict)
    held: dict[Stage, float] = field(default_factory=dict)
    parked_s: float = 0.0
    own_s: float = 0.0
    blame: tuple[Stage, Blame] | None = None
    released: float | None = None
    ended: float | None = None

    def shares(self) -> dict[Stage, float]:
        """Seconds of the wait by their causes; the rest of the wait is the queue for other tenants' work."""
        return {**self.held, Stage.PLACEMENT_WAIT: self.parked_s, Stage.OWN_QUEUE: self.own_s}

    def weight_within(self, begin: float, end: float) -> float:
        """Share of its worker between `begin` and `end`: seconds there times the length of its prompt."""
        if self.released is None:
            return 0.0
        return max(0.0, min(end, end if self.ended is None else self.ended) - max(begin, self.released)) * self.tokens


class LaneWaits:
    """Sums of one lane.

    Attributes:
        held: seconds for which its gate held requests until the last look: GATE_HOLD while the worker only decodes, so
            that more prompts share a prefill, GATE_BACKLOG while prompts wait at the worker.
    """

    def __init__(self) -> None:
        self.held = {Stage.GATE_HOLD: 0.0, Stage.GATE_BACKLOG: 0.0}
        self._reason: Stage | None = None
        self._looked = 0.0
        self._released: deque[QueueWait] = deque(maxlen=_MOST_BLAMED)

    def look(self, now: float) -> None:
        """Adds the time since the last look."""
        if self._reason is not None:
            self.held[self._reason] += max(0.0, now - self._looked)
        self._looked = now

    def hold(self, now: float, reason: Stage | None) -> None:
        """Notes why the gate holds requests from now on; None if it does not."""
        self.look(now)
        self._reason = reason

    def enter(self, wait: QueueWait, now: float) -> None:
        """Notes that a request is bound to the lane."""
        self.look(now)
        wait.bound, wait.held_before = now, dict(self.held)

    def leave(self, wait: QueueWait, now: float) -> None:
        """Adds the causes of a request's wait in this lane, when it leaves it."""
        self.look(now)
        held = {stage: seconds - wait.held_before.get(stage, 0.0) for stage, seconds in self.held.items()}
        for stage, seconds in held.items():
            wait.held[stage] = wait.held.get(stage, 0.0) + seconds
        queued_s = now - wait.bound - sum(held.values())
        if queued_s < _LEAST_WAIT_S:
            return
        at_worker = [(each.weight_within(wait.bound, now), each) for each in self._released]
        total = sum(weight for weight, _ in at_worker)
        if total <= 0:
            return
        wait.own_s += queued_s * sum(weight for weight, each in at_worker if each.tenant == wait.tenant) / total
        weight, most = max(at_worker, key=lambda pair: pair[0])
        stage = Stage.OWN_QUEUE if most.tenant == wait.tenant else Stage.QUEUE
        wait.blame = stage, Blame(most.request_id, most.tenant, queued_s * weight / total)

    def release(self, waits: list[QueueWait], now: float) -> None:
        """Notes that requests are sent to the worker together."""
        for wait in waits:
            self.leave(wait, now)
        for wait in waits:
            wait.released, wait.ended = now, None
            self._released.append(wait)
