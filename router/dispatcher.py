"""Which request goes to which worker, and when: queue, lanes, gate and placement put together.

Pure: events and `now` (monotonic seconds) come in, decisions go out. `decide` implements design-details section 5 with
the placement as a policy object. Invariants, checked by the property test:
  * A request is waiting, or released, or gone; it is released at most once per arrival or return.
  * Every waiting request is bound to exactly one ready lane of its model.
  * Nothing waits while its lane is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.errors import NoWorkerError
from common.limits import MAX_QUEUED_REQUESTS
from router.lane import Lane, LaneRecord, LoadReport
from router.placement import Placement
from router.queue import QueuedRequest, RequestQueue


@dataclass(frozen=True, slots=True)
class Release:
    """A group of requests that goes to one worker as one prefill batch.

    `serial` numbers the groups of a lane from 1; the worker echoes it as `submit_seen`.
    """

    worker: str
    serial: int
    requests: tuple[QueuedRequest, ...]


class Dispatcher:
    """The requests that wait at this router, and the lanes of the workers."""

    def __init__(self, gate: DelayGate, placement: Placement, capacity: int = MAX_QUEUED_REQUESTS) -> None:
        self._gate = gate
        self._placement = placement
        self._queue = RequestQueue(capacity)
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, list[Lane]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def arrive(self, request: QueuedRequest) -> None:
        """Takes a request in.

        Raises:
            NoWorkerError: no worker that takes work serves its model.
            QueueFullError: too many requests wait.
        """
        lanes = self._require_lanes(request.model)
        self._queue.push(request)
        self._placement.choose(request, lanes).bind(request)

    def requeue(self, request: QueuedRequest) -> None:
        """Takes back, at the head, a request that a worker returned without having computed anything (rule S9).

        Raises:
            NoWorkerError: no worker that takes work serves its model.
        """
        lanes = self._require_lanes(request.model)
        self._queue.push_front(request)
        self._placement.choose(request, lanes).bind(request, first=True)

    def cancel(self, key: int) -> bool:
        """Drops a waiting request; False when it does not wait."""
        request = self._queue.remove(key)
        if request is None:
            return False
        self._lane_of(request).unbind(request)
        return True

    def expire(self, now: float) -> list[int]:
        """Drops the waiting requests whose deadline has passed and returns their keys."""
        expired = self._queue.pop_expired(now)
        for request in expired:
            self._lane_of(request).unbind(request)
        return [request.key for request in expired]

    def lane_up(self, worker: str, model: str, report: LoadReport) -> None:
        """A worker takes work: a clean lane, and what waits for its model is spread anew."""
        self._lanes[worker] = Lane(worker, model, report)
        self._spread(model)

    def lane_draining(self, worker: str) -> list[int]:
        """A worker takes no more work. Returns the keys of the requests that no other worker can serve, now dropped."""
        lane = self._lanes[worker]
        lane.ready = False
        return self._spread(lane.model)

    def lane_down(self, worker: str) -> list[int]:
        """A worker is gone. Returns the keys of the requests that no other worker can serve, now dropped."""
        dropped = self.lane_draining(worker)
        del self._lanes[worker]
        return dropped

    def report(self, worker: str, load: LoadReport) -> None:
        """A worker's load after a step, or its heartbeat."""
        self._lanes[worker].take_report(load)

    def decide(self, now: float) -> list[Release]:
        """Releases what may go now, lane by lane, in order of arrival."""
        releases: list[Release] = []
        for lane in self._lanes.values():
            if not len(lane) or not lane.is_open(now, self._gate):
                continue
            group, serial = lane.release()
            for request in group:
                self._queue.remove(request.key)
            if group:
                releases.append(Release(lane.worker, serial, tuple(group)))
        return releases

    def next_timer(self, now: float) -> float | None:
        """When `expire` and `decide` must run again if no event comes before; None when only events matter."""
        opens = [now + wait for lane in self._lanes.values() if len(lane) and (wait := lane.opens_in(now, self._gate))]
        deadline = self._queue.next_deadline()
        return min([*opens, *([] if deadline is None else [deadline])], default=None)

    def lane_record(self, worker: str) -> LaneRecord:
        """What waits for a worker."""
        return self._lanes[worker].record()

    def ready_lanes(self, model: str) -> int:
        """Number of workers that take work for a model."""
        return len(self._ready.get(model, ()))

    def _require_lanes(self, model: str) -> list[Lane]:
        lanes = self._ready.get(model)
        if not lanes:
            raise NoWorkerError(f"no worker serves model {model!r} now")
        return lanes

    def _lane_of(self, request: QueuedRequest) -> Lane:
        if request.lane is None:
            raise ValueError(f"request {request.key} waits for no lane")
        return self._lanes[request.lane]

    def _spread(self, model: str) -> list[int]:
        """Binds what waits for `model` anew after its lanes changed; returns the keys that had to be dropped."""
        waiting = [request for request in self._queue if request.model == model]
        for request in waiting:
            self._lane_of(request).unbind(request)
        lanes = [lane for lane in self._lanes.values() if lane.model == model and lane.ready]
        if lanes:
            self._ready[model] = lanes
            for request in waiting:
                self._placement.choose(request, lanes).bind(request)
            return []
        self._ready.pop(model, None)
        for request in waiting:
            self._queue.remove(request.key)
        return [request.key for request in waiting]
