"""All requests of a router, from their arrival until their handler closes them.

On every path `close` removes all state of a request. Invariants:
  * `_streams` holds exactly the requests whose handler has not closed them.
  * A stream is queued in the dispatcher, or `running` has it, or its assembly is closed.
  * After any event that a decision depends on, a decision is made in the same turn of the loop or the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from common.delay_gate import DelayGate
from common.errors import DeadlineError, NoWorkerError
from common.limits import ORPHAN_WAIT_S, SLOW_CLIENT_TIMEOUT_S, TASK_RESTART_S
from common.process.tasks import failed
from common.telemetry.names import Stage
from router.answers.stream_assembly import StreamAssembly
from router.model_registry import ModelRegistry
from router.requests.running import DISPATCHING, RunningRequests
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest, SubmitListener, WritePacer
from router.scheduling.dispatcher import ClassLoad, Dispatcher
from router.scheduling.failover import DEFAULT_FAILOVER, FailoverOptions
from router.scheduling.lanes import LaneCounts
from router.scheduling.placement import Placement
from router.scheduling.queued_request import QueuedRequest
from router.workers.orphans import OrphanTable

# Checks of a waiting write per timeout; a stuck client is dropped later by up to one check.
_LOOKS_PER_TIMEOUT = 8
# Parked requests that one decision looks at.
_REVIEWED_PER_DECISION = 64

Weights: TypeAlias = Mapping[str, float]


class RequestRouter:
    """The requests of one router; makes and carries out the dispatch decisions.

    Attributes:
        running: the requests that run on workers.

    Args:
        dispatcher: decides which request goes to which worker, and when.
        registry: knows which weights are no longer served.
        orphans: sequences of routers that are gone.
        clock: monotonic seconds.
        failover: policy for requests whose worker is lost.
        slow_client_timeout_s: a client that blocks a write for this time is dropped; 0 disables it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: ModelRegistry,
        orphans: OrphanTable,
        clock: Callable[[], float] = time.monotonic,
        failover: FailoverOptions = DEFAULT_FAILOVER,
        slow_client_timeout_s: float = SLOW_CLIENT_TIMEOUT_S,
    ) -> None:
        self.running = RunningRequests(dispatcher, failover.policy, clock, self.dispatch_soon)
        self._dispatcher = dispatcher
        self._registry = registry
        self._clock = clock
        self._worker_wait_s = failover.worker_wait_s
        self._slow_client_timeout_s = slow_client_timeout_s
        self._orphans = orphans
        self._keys = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._pacer = WritePacer()
        self._clients_look: asyncio.TimerHandle | None = None
        self._decision_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        # An empty context: log lines of a decision must not name the request that caused it.
        self._context = contextvars.Context()

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return len(self._streams)

    def open(
        self,
        request: RoutedRequest,
        assembly: StreamAssembly,
        on_submit: SubmitListener,
        earlier: RequestStream | None = None,
        lead: RequestStream | None = None,
    ) -> RequestStream:
        """Queues a request, or adopts its sequence. The caller must close the stream on every path.

        Args:
            request: the request.
            assembly: collects its answer.
            on_submit: called with the worker's id, and why it was chosen, at every submission.
            earlier: a closed stream of the same request that failed with ReplacedError; the new one takes its place.
            lead: for a further answer to a prompt, the stream of the first answer.

        Raises:
            QueueFullError: its class is full, and no other tenant has a larger share of it.
            HopelessDeadlineError: its deadline would pass while it waits.
        """
        queued = request.queued(next(self._keys) if earlier is None else earlier.queued.key)
        queued.tokens = assembly.num_tokens
        queued.lead = None if lead is None else lead.queued
        # Tokens that the client resends of a broken stream have been charged before.
        queued.output = assembly.delivered
        adopt_from = self._orphans.take(request.adoption_key) if earlier is None else ""
        is_adopted = self.running.can_adopt(queued, adopt_from)
        if earlier is not None:
            self._dispatcher.rejoin(queued, self._clock())
        elif not is_adopted:
            self._arrive(queued)
        assembly.most_tokens = queued.most_tokens
        stream = self._streams[queued.key] = RequestStream(queued, request, assembly, on_submit, self._pacer)
        # If the earlier stream has delivered tokens, its attempts used other weights.
        if earlier is not None and not earlier.assembly.delivered:
            stream.follow(earlier)
        if is_adopted:
            self.running.adopt(stream, adopt_from)
        else:
            stream.ledger.enter(Stage.QUEUE, self._clock())
        self.dispatch_soon()
        self._look_at_clients_later()
        return stream

    async def wait_for_orphans(self, keys: Iterable[bytes]) -> None:
        """Waits briefly for workers to name the sequences with these keys: a client may reconnect sooner."""
        if self.running.may_adopt:
            await self._orphans.wait_for(keys, ORPHAN_WAIT_S)

    def may_adopt(self, key: bytes) -> bool:
        """True if a worker has named a sequence with this key."""
        return self._orphans.knows(key)

    def close(self, stream: RequestStream) -> None:
        """Forgets a request, and cancels it if it waits or runs."""
        del self._streams[stream.queued.key]
        if self._dispatcher.cancel(stream.queued.key, self._clock()):
            self.dispatch_soon()
        self.running.unbind(stream)

    def configure(self, gate: DelayGate, placement: Placement | None, queue_size: int, weights: Weights) -> None:
        """Replaces the dispatcher's settings; see `Dispatcher.configure`."""
        self._dispatcher.configure(gate, placement, queue_size, weights)
        self.dispatch_soon()

    def end_streams(self) -> None:
        """Ends all requests, because the router stops."""
        for stream in self._streams.values():
            stream.assembly.end_with_router()
            stream.wake()

    def stop(self) -> None:
        """Cancels all timers; no decision is made afterwards."""
        for handle in (self._decision_due, self._timer, self._clients_look):
            if handle is not None:
                handle.cancel()

    def waiting(self) -> list[ClassLoad]:
        """Load of each priority class."""
        return self._dispatcher.waiting(self._clock())

    def waiting_of_models(self) -> dict[str, int]:
        """Number of waiting requests of each model that has any."""
        return Counter(self._streams[queued.key].request.model for queued in self._dispatcher.queued())

    def lanes(self) -> LaneCounts:
        """Number of idle, open and held lanes."""
        return self._dispatcher.lane_counts(self._clock())

    def tables(self) -> dict[str, int]:
        """Sizes of the tables that grow with requests, tenants or sessions, by name."""
        sequences = sum(stream.session is not None for stream in self._streams.values())
        return {"streams": len(self._streams), "sequences": sequences, **self._dispatcher.tables()}

    def _arrive(self, queued: QueuedRequest) -> None:
        if self._decision_due is not None and self._dispatcher.is_full(queued.priority):
            # Requests that are about to be released must not fill the queue.
            self._decision_due.cancel()
            self.dispatch_now()
        dropped = self._dispatcher.arrive(queued, self._clock())
        if dropped is not None:
            self._streams[dropped.request.key].fail(dropped.error)

    def _look_at_clients_later(self) -> None:
        if self._clients_look is None and self._slow_client_timeout_s:
            wait_s = self._slow_client_timeout_s / _LOOKS_PER_TIMEOUT
            self._clients_look = asyncio.get_running_loop().call_later(wait_s, self._look_at_clients)

    def _look_at_clients(self) -> None:
        """Drops clients that do not read. A periodic check adds no cost to each message."""
        self._clients_look = None
        if self._streams:
            self._look_at_clients_later()
        now = self._clock()
        for stream in self._streams.values():
            stream.drop_if_stuck(now, self._slow_client_timeout_s)

    # Decisions.

    def dispatch_soon(self) -> None:
        """Schedules one decision for all events of this turn of the loop."""
        if self._decision_due is None:
            self._decision_due = asyncio.get_running_loop().call_soon(self.dispatch_now, context=self._context)

    def dispatch_now(self) -> None:
        """Makes a decision; after a failure tries again in TASK_RESTART_S."""
        self._decision_due = None
        try:
            self._decide(self._clock())
        except Exception:
            failed(DISPATCHING, "dispatching failed; restarting it", after_s=TASK_RESTART_S)
            # A timer, because no other event may come, and an immediate retry could spin.
            loop = asyncio.get_running_loop()
            self._decision_due = loop.call_later(TASK_RESTART_S, self.dispatch_now, context=self._context)

    def _decide(self, now: float) -> None:
        for key in self._dispatcher.expire(now):
            self._streams[key].fail(DeadlineError("in the router's queue"))
        for key in self._dispatcher.abandon(now):
            self._end_unserved(self._streams[key])
        self.running.charge_output((each for each in self._streams.values() if each.session is not None), now)
        for release in self._dispatcher.decide(now):
            self.running.submit(release, [self._streams[queued.key] for queued in release.requests], now)
        self._review_parked()
        self.running.announce(self._dispatcher.assignment.take_changed_records())
        self._set_timer(now)

    def _review_parked(self) -> None:
        """Fails parked requests with ReplacedError whose weights are gone while their model is served with others.

        A request with tokens keeps waiting for a worker with its weights.
        """
        for key in self._dispatcher.assignment.parked.take_to_review(_REVIEWED_PER_DECISION):
            stream = self._streams[key]
            request = stream.request
            if not stream.assembly.delivered and self._registry.is_replaced(request.model, request.identity):
                self._dispatcher.cancel(key, self._clock())
                stream.fail(ReplacedError(request.model))
        if self._dispatcher.assignment.parked.has_to_review:
            self.dispatch_soon()

    def _end_unserved(self, stream: RequestStream) -> None:
        """Fails a request that was parked for too long."""
        queued = stream.queued
        wanted = "" if queued.numerics is None else f" of numerics class {queued.numerics}"
        if queued.grammar_engine:
            wanted += f" with {queued.grammar_engine}"
        if self._dispatcher.lanes.can_serve(queued.model, queued.numerics, grammar_engine=queued.grammar_engine):
            wanted += f" with room for the request's {queued.most_tokens} tokens"
        model, wait_s = stream.request.model, f"{self._worker_wait_s:g}"
        why = f"no worker{wanted} serves model {model!r}, for {wait_s} s now"
        stream.assembly.lose_worker(NoWorkerError(why, waited_s=wait_s))
        stream.wake()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._dispatcher.next_timer(now)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self.dispatch_soon)
