"""The workers and the requests on their way: Dispatcher, Sessions and streams wired together on one event loop.

A stream that breaks ends nothing: its sequences are held until the next stream to the same instance takes them up again
(rules S4, S7), or go on elsewhere from the tokens that have come. Everything a request leaves behind is removed by
`close`, on every path. Invariants:
  * `_streams` holds exactly the requests whose handler has not closed them.
  * A stream is queued in the dispatcher, or runs under one rid on one session, or its assembly is closed.
  * `_held` has the session, at most one per address, whose sequences wait for the next stream.
  * A worker is dialled while it is wanted or something of it is left here; `_tasks` has those, `_parting` those of them
    that are not wanted any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import itertools
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.errors import DeadlineError, PoisonRequestError, RouterFailedError
from common.limits import (
    ALONE_S,
    LEASE_S,
    MAX_QUEUED_REQUESTS,
    PROBATION_SEQS,
    RECONNECT_S,
    SESSION_GOODBYE_S,
    SLOW_CLIENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    TASK_RESTART_S,
    VIOLATION_MEMORY_S,
    WORKER_WAIT_S,
)
from common.process.tasks import failed, keep_running
from common.protocol import KV_EPOCH_MINOR
from common.rpc.tls import Dialer, is_loopback
from router.model_registry import ModelRegistry, WorkerRefusedError
from router.requests.output_charges import OutputCharges
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest
from router.requests.write_pacer import WritePacer
from router.scheduling.admission import QueuedRequest
from router.scheduling.dispatcher import ClassLoad, Dispatcher, LaneCounts, Release
from router.scheduling.failover import FailoverPolicy, Loss, Verdict, stall_bound_s
from router.scheduling.placement import CacheChange, Placement
from router.scheduling.worker_queue import LaneLoad, LaneRecord, LoadReport
from router.text.stream_assembly import StreamAssembly
from router.text.tokenizer_store import TokenizerStore
from router.workers.conduct import Conduct
from router.workers.kv_cursor import Continuity, KvEventCursor
from router.workers.session import CordonState, Fault, Session, SessionLostError, keep_connected
from router.workers.session_state import Submission

# A rid is the router's incarnation above a counter: unique over the life of the worker too (rule S1).
_COUNTER_BITS = 40
# How often a write is looked at before it counts as stuck: that is found so much later than it could be.
_LOOKS_PER_TIMEOUT = 8
# Requests without a worker that one pump looks at.
_REVIEWED_PER_PUMP = 64
# Of the supervisor.
_DISPATCHING = "dispatching"
_NOTHING_WAITS = LaneRecord(None, 0, 0)
# Faults after which the worker may still have the sequences, so that the next stream takes them up.
_RESUMABLE = frozenset({Fault.BROKEN, Fault.VIOLATION})
_INTAKES = {wpb.INTAKE_CORDONED: CordonState.CORDONED, wpb.INTAKE_EVICTING: CordonState.EVICTING}
_LOSSES = {
    Fault.REFUSED: Loss.DIED,
    Fault.SILENT: Loss.SILENT,
    Fault.STALLED: Loss.STALLED,
    Fault.VIOLATION: Loss.VIOLATED,
    Fault.UNREADY: Loss.UNREADY,
}

Weights: TypeAlias = Mapping[str, float]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """Policy for requests whose worker is lost; times in seconds.

    Attributes:
        policy: where a request that has tokens may go on.
        worker_wait_s: how long a request waits while there is no worker for it.
        stall_timeout_s: an engine step that runs longer counts as stalled.
        lease_s: how long workers keep the sequences of a stream that broke.
    """

    policy: FailoverPolicy = FailoverPolicy.EXACT
    worker_wait_s: float = WORKER_WAIT_S
    stall_timeout_s: float = STALL_TIMEOUT_S
    lease_s: float = LEASE_S


class WorkerState(enum.Enum):
    """State of a worker toward new requests of this router: it takes them, or why not."""

    SERVING = enum.auto()
    CORDONED = enum.auto()
    """An operator wants it so."""
    DRAINING = enum.auto()
    """It is about to end."""
    LEAVING = enum.auto()
    """It has left the list of this router's workers."""
    UNCONNECTED = enum.auto()
    """There is no connection."""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as operators see it.

    `running` counts the requests of this router there. Of a worker without a connection the address is known, what it
    was called when it last had one, and `last_error`, which says why there is none.
    """

    address: str
    state: WorkerState = WorkerState.UNCONNECTED
    worker_id: str = ""
    instance_id: str = ""
    model: str = ""
    numerics: str = ""
    running: int = 0
    load: LaneLoad | None = None
    last_error: str = ""


class Fleet:
    """All workers and all requests of this router.

    Attributes:
        dialer: opens the channels to workers.
        lost: attempts that ended before their request, by `Loss`.
        num_releases: groups of requests that have gone to a worker.
        num_released: requests in them.

    Args:
        dispatcher: decides what goes where and when.
        registry: learns the models from the workers.
        store: fetches their tokenizers.
        serving_changed: called when a first worker serves, and when the last one is gone.
        clock: monotonic seconds.
        failover: what happens to requests whose worker is lost.
        worker_lost: called when a stream with a worker has broken.
        dialer: opens the channels to workers; None in plain text.
        slow_client_timeout_s: a client that lets a message wait for so long is dropped; 0 is never.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: ModelRegistry,
        store: TokenizerStore,
        serving_changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        failover: FailoverOptions = FailoverOptions(),
        worker_lost: Callable[[], None] = lambda: None,
        dialer: Dialer | None = None,
        slow_client_timeout_s: float = SLOW_CLIENT_TIMEOUT_S,
    ) -> None:
        self._dispatcher = dispatcher
        self._output = OutputCharges(dispatcher.charge_output)
        self._registry = registry
        self._store = store
        self._serving_changed = serving_changed
        self._clock = clock
        self._failover = failover
        self._worker_lost = worker_lost
        self.dialer = Dialer() if dialer is None else dialer
        self._slow_client_timeout_s = slow_client_timeout_s
        self._clients_look: asyncio.TimerHandle | None = None
        self._warned = False
        self._router_id = secrets.token_hex(8)
        self._incarnation = secrets.randbits(64 - _COUNTER_BITS) << _COUNTER_BITS
        self._counter = itertools.count(1)
        self._sessions: dict[str, Session] = {}
        # Who holds which instance, from before the Hello to the end.
        self._instances: dict[str, Session] = {}
        self._held: dict[str, Session] = {}
        self._give_up_timers: dict[str, asyncio.TimerHandle] = {}
        self._violated: dict[str, float] = {}
        # How far the cache of each worker is known that is up or may come back to a stream that broke.
        self._feeds: dict[str, KvEventCursor] = {}
        self._draining: set[Session] = set()
        self._announced: dict[str, LaneRecord] = {}
        self._streams: dict[int, RequestStream] = {}
        self._running: dict[int, RequestStream] = {}
        # Those of them that have their worker for themselves.
        self._alone: dict[int, RequestStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Of the same workers: how they have behaved, and what ends the pause before the next dial.
        self._conducts: dict[str, Conduct] = {}
        self._dial_now: dict[str, asyncio.Event] = {}
        self._parting: set[str] = set()
        # Requests that no worker could serve when it was looked at last, and that others may serve now.
        self._to_review: deque[int] = deque()
        # Until when a worker that has never been up is expected to be; and told when one is.
        self._unheard: dict[str, float] = {}
        self._came_up = asyncio.Event()
        # Requests that wait for a first worker.
        self._num_early = 0
        # Why a worker that is wanted can not be used now.
        self._troubles: dict[str, str] = {}
        # Id and model of each worker that has been up.
        self._names: dict[str, tuple[str, str]] = {}
        self.lost: Counter[str] = Counter()
        self.num_releases = self.num_released = 0
        self._turns = WritePacer()
        self._none_up = asyncio.Event()
        self._pump_due: asyncio.Handle | None = None
        # What a decision logs is about no request of whoever has asked for it.
        self._context = contextvars.Context()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Number of requests that have not been closed."""
        return len(self._streams)

    def set_workers(self, addresses: Sequence[str]) -> None:
        """Dials these workers from now on and takes leave of all others: they finish what runs, and get no more."""
        wanted = set(addresses)
        for address in addresses:
            self._join(address)
        for address in self._tasks.keys() - self._parting - wanted:
            self._part(address)

    def end_streams(self) -> None:
        """Ends all requests, because this router ends."""
        for stream in self._streams.values():
            stream.assembly.end_with_router()
            stream.wake()

    async def stop(self) -> None:
        """Ends all sessions; the workers drop what still runs there."""
        for session in self._sessions.values():
            session.leave()
        if self._sessions:
            self._none_up.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_up.wait(), SESSION_GOODBYE_S)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handle in (self._pump_due, self._timer, self._clients_look, *self._give_up_timers.values()):
            if handle is not None:
                handle.cancel()

    def open(
        self,
        request: RoutedRequest,
        assembly: StreamAssembly,
        on_submit: Callable[[str], None],
        earlier: RequestStream | None = None,
    ) -> RequestStream:
        """Sends a request on its way. The caller closes the stream on every path.

        Args:
            request: the request.
            assembly: takes its answer.
            on_submit: told the worker's id at every submission.
            earlier: a closed stream of the same request that failed with ReplacedError, whose place this one takes.

        Raises:
            QueueFullError: too many requests wait, and no other tenant has more of them for its weight.
            HopelessDeadlineError: its deadline would pass while it waits.
        """
        key = next(self._counter) if earlier is None else earlier.queued.key
        queued = QueuedRequest(
            key,
            request.identity,
            len(request.token_ids),
            request.arrival,
            request.deadline,
            tenant=request.tenant,
            priority=request.priority,
            session=request.session_id,
            granules=request.granules,
            granule_tokens=request.granule_tokens,
            most_tokens=len(request.token_ids) + request.params.max_tokens,
        )
        if earlier is None:
            self._arrive(queued)
        else:
            self._dispatcher.rejoin(queued, self._clock())
        assembly.most_tokens = queued.most_tokens
        stream = self._streams[key] = RequestStream(queued, request, assembly, on_submit, self._turns)
        if earlier is not None:
            stream.follow(earlier)
        self._pump_soon()
        self._look_at_clients_later()
        return stream

    def _arrive(self, queued: QueuedRequest) -> None:
        if self._pump_due is not None and self._dispatcher.is_full(queued.priority):
            # What is about to be released does not count: the queue is full only if it is full after that.
            self._pump_due.cancel()
            self._pump()
        dropped = self._dispatcher.arrive(queued, self._clock())
        if dropped is not None:
            self._streams[dropped.request.key].fail(dropped.error)

    async def wait_for_model(self, name: str) -> None:
        """Returns when a model called `name` (any for an empty name) is known, or nothing speaks for it any more.

        What has never been up may serve it: all workers together for `worker_wait_s` from now while none has been up,
        and then each address for as long after it was named. So that a router that has just been started does not
        refuse what it will serve in a moment. At once when too many wait for it already.
        """
        if self._registry.knows(name) or self._num_early >= MAX_QUEUED_REQUESTS:
            return
        now = self._clock()
        end = now + self._failover.worker_wait_s
        if self._registry.knows(""):
            end = min(end, max(self._unheard.values(), default=now))
        self._num_early += 1
        try:
            while not self._registry.knows(name) and (left_s := end - self._clock()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._came_up.wait(), left_s)
        finally:
            self._num_early -= 1

    def close(self, stream: RequestStream) -> None:
        """Forgets a request; cancels it where it waits or runs."""
        del self._streams[stream.queued.key]
        if self._dispatcher.cancel(stream.queued.key):
            self._pump_soon()
        self._detach(stream)

    def _look_at_clients_later(self) -> None:
        if self._clients_look is None and self._slow_client_timeout_s:
            wait_s = self._slow_client_timeout_s / _LOOKS_PER_TIMEOUT
            self._clients_look = asyncio.get_running_loop().call_later(wait_s, self._look_at_clients)

    def _look_at_clients(self) -> None:
        """Drops the clients that do not read. Looking now and then costs the messages of the others nothing."""
        self._clients_look = None
        if self._streams:
            self._look_at_clients_later()
        now = self._clock()
        for stream in self._streams.values():
            stream.drop_if_stuck(now, self._slow_client_timeout_s)

    def _join(self, address: str) -> None:
        """Dials a worker, or takes it back that was about to be left."""
        if address not in self._tasks:
            self._unheard[address] = self._clock() + self._failover.worker_wait_s
            self._tasks[address] = asyncio.create_task(self._connect(address), name=f"worker {address}")
        elif address in self._parting:
            self._parting.discard(address)
            if (dial_now := self._dial_now.get(address)) is not None:
                dial_now.set()
            log.info("worker joined", worker=address)
            if (session := self._sessions.get(address)) is not None:
                self._follow_intake(session)

    def _part(self, address: str) -> None:
        """Gives a worker nothing new; the connection ends with the last of what runs there."""
        self._parting.add(address)
        self._unheard.pop(address, None)
        self._troubles.pop(address, None)
        session = self._sessions.get(address)
        log.info("worker left", worker=address, running=0 if session is None else len(session.state.live))
        if session is not None:
            self._follow_intake(session)
            self._leave_if_idle(session)

    def _leave_if_idle(self, session: Session) -> None:
        if session.address in self._parting and not session.state.live:
            session.leave()

    def configure(self, gate: DelayGate, placement: Placement | None, queue_size: int, weights: Weights) -> None:
        """Other rules for what waits, as `Dispatcher.configure`."""
        self._dispatcher.configure(gate, placement, queue_size, weights, self._clock())
        if placement is not None:
            self._learn_caches_anew()
        self._pump_soon()

    def _learn_caches_anew(self) -> None:
        """For a placement that knows none. Workers without a stream say all of their caches on the next one."""
        for feed in self._feeds.values():
            feed.reset()
        for session in self._sessions.values():
            self._ask_for_cache(session)

    def _ask_for_cache(self, session: Session) -> None:
        """Has a worker say all of its cache on the stream there is.

        One that is too old for that does so on a new stream, which the gap at its next event brings about.
        """
        if session.proto_minor >= KV_EPOCH_MINOR:
            session.state.ask_for_cache(self._feeds[session.address].ask())
            self.renew_lease(session)

    def workers(self) -> list[KnownWorker]:
        """The workers of this router, connected or not, in order of their addresses."""
        return [self._known_worker(address) for address in sorted(self._tasks.keys() | self._sessions.keys())]

    def waiting(self) -> list[ClassLoad]:
        """Waiting requests by priority class."""
        return self._dispatcher.waiting(self._clock())

    def lanes(self) -> LaneCounts:
        """Number of lanes that have something to do."""
        return self._dispatcher.lane_counts(self._clock())

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests, tenants, sessions or workers."""
        return {
            "streams": len(self._streams),
            "early": self._num_early,
            "sequences": len(self._running),
            "sessions_held": len(self._held),
            "workers": len(self._tasks),
            **self._dispatcher.tables(),
        }

    def _known_worker(self, address: str) -> KnownWorker:
        session = self._sessions.get(address)
        if session is None or session.model is None:
            worker_id, model = self._names.get(address, ("", ""))
            return KnownWorker(address, worker_id=worker_id, model=model, last_error=self._troubles.get(address, ""))
        return KnownWorker(
            address,
            self._service(session),
            worker_id=session.worker_id,
            instance_id=session.instance_id,
            model=session.model.name,
            numerics=session.model.numerics,
            running=len(session.state.live),
            load=self._dispatcher.lane_load(address, self._clock()),
        )

    def _service(self, session: Session) -> WorkerState:
        if session in self._draining:
            return WorkerState.DRAINING
        if session.address in self._parting or session.is_leaving:
            return WorkerState.LEAVING
        return WorkerState.SERVING if session.cordon is CordonState.OPEN else WorkerState.CORDONED

    # Sessions (`SessionEvents`).

    def session_opening(self, session: Session) -> None:
        """Refuses a second session with one worker; hands over what an earlier stream has left."""
        if not self._is_wanted(session.address):
            raise WorkerRefusedError("is no worker of this router any more")
        holder = self._instances.setdefault(session.instance_id, session)
        if holder is not session:
            raise WorkerRefusedError(f"is the worker at {holder.address} by another address")
        feed = self._feeds.get(session.address)
        if feed is None or not feed.goes_on_with(session.instance_id):
            self._dispatcher.cache_gone(session.address)
            feed = self._feeds[session.address] = KvEventCursor(session.instance_id)
        feed.open()
        session.state.know_cache(feed.seq)
        held = self._held.get(session.address)
        if held is None:
            return
        if held.instance_id != session.instance_id:
            self._give_up(session.address, "it was restarted", Loss.DIED)
            return
        session.state.resume(held.state)
        for rid in held.state.live:
            self._running[rid].session = session
            self._acquit(rid)
        self._held[session.address] = session

    def session_closed(self, session: Session, fault: Fault) -> None:
        """Lets another session have the worker."""
        if self._instances.get(session.instance_id) is session:
            del self._instances[session.instance_id]
        # It can not be there any more, or does not want to be; otherwise the next dial may succeed.
        if fault not in _RESUMABLE:
            self._feeds.pop(session.address, None)
            self._dispatcher.cache_gone(session.address)
            self._give_up(session.address, f"it is {fault.name.lower()}", self._loss_by(session, fault))

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """Counts the worker in."""
        if session.model is None:
            raise WorkerRefusedError("it serves no model")
        limits = welcome.limits or wpb.Limits()
        session.model = replace(session.model, max_model_len=limits.max_model_len or session.model.max_model_len)
        session.proto_minor = welcome.proto_minor
        session.step_tokens = limits.max_num_batched_tokens
        self._check_stall(session, welcome.busy_ms, welcome.load.prefill_rate)
        was_serving = self._registry.serving
        self._admit(session)
        try:
            self._count_in(session, welcome, was_serving)
        except Exception as error:
            # All or nothing: a lane of which nobody knows that its stream has ended would keep its requests for ever.
            self._count_out(session, error)
            raise

    def _count_in(self, session: Session, welcome: wpb.Welcome, was_serving: bool) -> None:
        assert session.model is not None
        self._sessions[session.address] = session
        self._names[session.address] = session.worker_id, session.model.name
        self._announced[session.address] = _NOTHING_WAITS
        resumed = len(session.state.live)
        now, load = self._clock(), self._load_report(welcome.load, 0)
        self._dispatcher.lane_up(
            session.address,
            session.model.identity,
            load,
            now,
            _numerics(session),
            max_model_len=session.model.max_model_len,
            caches_prefixes=welcome.kv_events,
        )
        self._begin_probation(session, now)
        if self._feeds[session.address].seq != session.state.kv_seq:
            # The placement has changed since the Hello.
            self._ask_for_cache(session)
        self._forget(session, welcome.unknown)
        session.accepting = True
        session.cordon = _INTAKES.get(welcome.load.intake, CordonState.OPEN)
        self._troubles.pop(session.address, None)
        self._follow_intake(session)
        log.info(
            "worker up",
            worker=session.address,
            worker_id=session.worker_id,
            model=session.model.name,
            resumed=resumed,
            unknown=len(welcome.unknown),
        )
        for draining in self._draining:
            self._hand_over(draining)
        for other in self._sessions.values():
            if other.cordon is CordonState.EVICTING:
                self._hand_over(other)
        if not was_serving:
            self._serving_changed()
        self._leave_if_idle(session)
        self._pump_soon()

    def _count_out(self, session: Session, error: Exception) -> None:
        """Undoes what there is of `_count_in`; what the worker has of an earlier stream goes on as after any break."""
        fault = error.fault if isinstance(error, SessionLostError) else Fault.VIOLATION
        self._announced.setdefault(session.address, _NOTHING_WAITS)
        self._release_held(session.address)
        self.session_down(session, fault, str(error))

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Hands tokens to their streams."""
        effects = session.state.apply(step, self._clock())
        if any(loss is Loss.ENGINE_FAILED for _, loss in effects.lost):
            # It comes back as another instance. Until then nothing goes there, least of all what it has just lost.
            self._dispatcher.lane_draining(session.address, self._clock())
            self._leave(session)
        running = self._running
        for rid in effects.touched:
            running[rid].wake()
        for rid in effects.ended:
            self._detach(running[rid])
        if self._alone:
            self._end_first_steps()
        session.notify()
        for rid in reversed(effects.returned):
            self._take_back(self._running[rid], session.address)
        self._move([(self._running[rid], loss) for rid, loss in effects.lost], "ended the request")
        for rid, end in effects.refused:
            self._refuse(self._running[rid], session.address, end)
        self._leave_if_idle(session)
        if step.HasField("load"):
            self._dispatcher.report(session.address, self._load_report(step.load, step.submit_seen))
            self._take_intake(session, step.load.intake)
            self._pump_soon()

    def heartbeat(self, session: Session, heartbeat: wpb.Heartbeat) -> None:
        """Takes the load."""
        self._check_stall(session, heartbeat.busy_ms, heartbeat.load.prefill_rate)
        self._dispatcher.report(session.address, self._load_report(heartbeat.load, heartbeat.submit_seen))
        self._take_intake(session, heartbeat.load.intake)
        self._pump_soon()

    def kv_events(self, session: Session, events: wpb.KvEvents) -> None:
        """Hands them to the placement, unless it is about to get all of the cache."""
        continuity = self._feeds[session.address].accept(events)
        if continuity is Continuity.GAP:
            raise SessionLostError(Fault.BROKEN, "KV events are missing")
        if continuity is Continuity.OUTDATED:
            return
        self._dispatcher.cache_changed(session.address, CacheChange(events.stored, events.evicted, events.snapshot))

    def renew_lease(self, session: Session) -> None:
        """Sends a Lane frame."""
        session.state.announce(self._dispatcher.lane_record(session.address))
        session.notify()

    def draining(self, session: Session) -> None:
        """Sends the worker nothing more, and hands over what others can take."""
        log.info("worker draining", worker=session.address, worker_id=session.worker_id)
        self._draining.add(session)
        self._follow_intake(session)
        self._hand_over(session)

    def session_down(self, session: Session, fault: Fault, why: str) -> None:
        """Holds what ran on the worker if it may still be there, moves it if not."""
        now = self._clock()
        del self._sessions[session.address]
        del self._announced[session.address]
        if not self._sessions:
            self._none_up.set()
        if (conduct := self._conducts.get(session.address)) is not None:
            in_good_order = session in self._draining or session.is_leaving or fault is Fault.SHUTDOWN
            conduct.went_down(now, in_good_order=in_good_order)
        self._draining.discard(session)
        self._dispatcher.lane_down(session.address, now)
        self._leave(session)
        if fault is Fault.SHUTDOWN:
            return
        self._worker_lost()
        # They can not be there, so nobody has to come back for them.
        for rid in reversed(session.state.unwritten()):
            self._take_back(self._running[rid])
        if not session.state.live:
            return
        self._held[session.address] = session
        if fault not in _RESUMABLE or self._violates_again(session, fault, now):
            self._give_up(session.address, why, self._loss_by(session, fault))
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(RECONNECT_S, self._give_up, session.address, why, Loss.UNREACHABLE)
        self._give_up_timers[session.address] = timer

    def _begin_probation(self, session: Session, now: float) -> None:
        """Gives a worker that has died young again and again few requests at a time, until it has lived for a while."""
        if (conduct := self._conducts.get(session.address)) is None:
            return
        conduct.came_up(session.instance_id, now)
        if not (seconds := conduct.probation_s(now)):
            return
        log.warning(
            "worker on probation",
            worker=session.address,
            worker_id=session.worker_id,
            seconds=round(seconds),
            why="it has died young each time lately",
        )
        self._dispatcher.limit(session.address, PROBATION_SEQS)
        asyncio.get_running_loop().call_later(seconds, self._end_probation, session)

    def _end_probation(self, session: Session) -> None:
        if self._sessions.get(session.address) is session:
            self._dispatcher.limit(session.address, None)
            self._pump_soon()

    def unusable(self, session: Session, why: str) -> None:
        """Remembers the reason for those who ask."""
        if session.address not in self._parting:
            self._troubles[session.address] = why

    async def _connect(self, address: str) -> None:
        if self.dialer.tls is None and not is_loopback(address) and not self._warned:
            self._warned = True
            log.warning("PLAIN TEXT to workers outside loopback: everybody on the way reads it; use --worker-ca")

        def open_session() -> Session:
            return Session(address, self._router_id, self._clock, self._failover.lease_s, self.dialer)

        async def pause(fault: Fault) -> None:
            wait_s = conduct.redial_after_s(self._clock(), answers=fault is Fault.UNREADY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dial_now.wait(), wait_s)
            dial_now.clear()

        def connected() -> Awaitable[None]:
            return keep_connected(open_session, self._store, self, lambda: self._is_wanted(address), pause)

        conduct = self._conducts[address] = Conduct(random.random)
        dial_now = self._dial_now[address] = asyncio.Event()
        try:
            await keep_running("worker connection", connected, worker=address)
        finally:
            del self._tasks[address], self._conducts[address], self._dial_now[address]
            self._violated.pop(address, None)
            if address in self._parting:
                self._registry.forget(address)
            self._parting.discard(address)
            self._troubles.pop(address, None)
            self._names.pop(address, None)

    def _is_wanted(self, address: str) -> bool:
        """True if a worker must stay connected: it is one of this router's, or sequences of this router are there."""
        return address not in self._parting or address in self._held

    def _take_intake(self, session: Session, said: wpb.Intake.ValueType) -> None:
        """Takes over what the worker reports about accepting new work."""
        intake = _INTAKES.get(said, CordonState.OPEN)
        if intake is session.cordon:
            return
        session.cordon = intake
        log.info("worker intake", worker=session.address, worker_id=session.worker_id, intake=intake.name.lower())
        self._follow_intake(session)
        if intake is CordonState.EVICTING:
            self._hand_over(session)

    def _follow_intake(self, session: Session) -> None:
        """Lets the worker get new work, or no more, when either side has changed its mind about that."""
        opens = self._service(session) is WorkerState.SERVING
        if opens == session.accepting:
            return
        session.accepting = opens
        now = self._clock()
        if not opens:
            self._dispatcher.lane_draining(session.address, now)
            self._leave(session)
            return
        was_serving = self._registry.serving
        self._admit(session)
        self._dispatcher.lane_ready(session.address, now)
        if not was_serving:
            self._serving_changed()
        self._pump_soon()

    def _admit(self, session: Session) -> None:
        """Counts a worker among those of its model, and says so where it differs from the others."""
        assert session.model is not None
        difference = self._registry.admit(session.address, session.model)
        if difference:
            log.info(
                "worker differs from the others of its model: new requests are shared among both",
                worker=session.address,
                worker_id=session.worker_id,
                model=session.model.name,
                difference=difference,
            )
        self._to_review = deque(self._dispatcher.parked())
        self._unheard.pop(session.address, None)
        self._came_up.set()
        self._came_up = asyncio.Event()

    # Failover.

    def _check_stall(self, session: Session, busy_ms: int, prefill_rate: float) -> None:
        bound_s = stall_bound_s(self._failover.stall_timeout_s, session.step_tokens, prefill_rate)
        if busy_ms / 1000 > bound_s:
            raise SessionLostError(Fault.STALLED, f"its engine step takes longer than {bound_s:g} s")

    def _violates_again(self, session: Session, fault: Fault, now: float) -> bool:
        """True if an instance breaks the protocol a second time: resuming does not mend it."""
        if fault is not Fault.VIOLATION:
            return False
        before = self._violated.get(session.address)
        self._violated[session.address] = now
        return before is not None and now - before < VIOLATION_MEMORY_S

    def _release_held(self, address: str) -> Session | None:
        """The session whose sequences wait for the next stream; they wait no more."""
        if (timer := self._give_up_timers.pop(address, None)) is not None:
            timer.cancel()
        return self._held.pop(address, None)

    def _loss_by(self, session: Session, fault: Fault) -> Loss:
        """Kind of loss of the sequences that an earlier stream to this address has left, when `session` has ended."""
        held = self._held.get(session.address)
        if held is not None and session.instance_id not in ("", held.instance_id):
            return Loss.DIED
        return _LOSSES.get(fault, Loss.UNREACHABLE)

    def _give_up(self, address: str, why: str, loss: Loss) -> None:
        """Nobody takes up the sequences of a broken stream: they go on elsewhere (rule S7)."""
        held = self._release_held(address)
        if held is not None:
            self._move([(self._running[rid], loss) for rid in held.state.live], why)

    def _forget(self, session: Session, unknown: Iterable[int]) -> None:
        """The stream is taken up again; the worker has let these sequences go."""
        self._release_held(session.address)
        lost = [self._running[rid] for rid in unknown if rid in session.state.live]
        for stream in lost:
            session.state.forget(stream.rid)
        self._move([(stream, Loss.FORGOTTEN) for stream in lost], "the worker has let it go")

    def _hand_over(self, session: Session) -> None:
        """Moves what runs on a draining worker to those who can go on with it."""
        begun: list[tuple[RequestStream, Loss]] = []
        for rid in reversed(list(session.state.live)):
            stream = self._running[rid]
            wanted = stream.attempts.numerics_wanted(self._failover.policy, stream.assembly.num_tokens)
            if not self._dispatcher.can_serve(stream.queued.model, wanted, stream.queued.most_tokens):
                continue
            if stream.attempts.has_begun(stream.assembly.num_tokens):
                begun.append((stream, Loss.DRAINED))
            else:
                self._take_back(stream, session.address)
        self._move(begun, "it drains")

    def _move(self, lost: list[tuple[RequestStream, Loss]], why: str) -> None:
        """Sends streams whose attempt is over on another one, ahead of what waits and in their order, or ends them."""
        self.lost.update(loss.value for _, loss in lost)
        culprits = {stream.session for stream, _ in lost if stream.attempts.is_alone}
        for stream, loss in sorted(lost, key=lambda pair: pair[0].queued.key, reverse=True):
            excused = stream.session in culprits and not stream.attempts.is_alone
            stream.attempts.end(stream.assembly.num_tokens, self._clock(), loss, excused=excused)
            self._detach(stream)
            log.info(
                "attempt lost",
                **stream.request.ids,
                rid=f"{stream.rid:x}",
                worker_id=stream.assembly.worker_id,
                loss=loss.value,
                attempt=len(stream.attempts),
                tokens=stream.assembly.delivered,
            )
            self._go_on(stream, why)
            stream.wake()
        if lost:
            self._pump_soon()

    def _go_on(self, stream: RequestStream, why: str) -> None:
        """Queues a stream for its next attempt, unless there must be none."""
        now, verdict = self._clock(), stream.attempts.verdict()
        if stream.assembly.is_closed:
            return
        if stream.queued.deadline is not None and stream.queued.deadline <= now:
            stream.fail(DeadlineError("when its worker was lost"))
        elif verdict is Verdict.POISON:
            stream.fail(PoisonRequestError(stream.attempts.deaths))
        elif verdict is Verdict.GIVE_UP:
            stream.assembly.lose_worker(f"{len(stream.attempts)} workers were lost; the last one: {why}")
        else:
            stream.queued.tokens = stream.assembly.num_tokens
            wanted = stream.attempts.numerics_wanted(self._failover.policy, stream.assembly.num_tokens)
            stream.queued.numerics = wanted
            stream.queued.alone = verdict is Verdict.ALONE
            self._dispatcher.requeue(stream.queued, now, excluded_worker=stream.refused_by)

    def _refuse(self, stream: RequestStream, worker: str, end: wpb.SequenceEnd) -> None:
        """Tries a request that a worker refuses on another one.

        It fails as the worker says when nobody else could take it, or a second worker refuses it from the start: this
        router found it valid, so it is the router that is wrong.
        """
        is_first = len(stream.attempts) == 1 and not self._can_go_elsewhere(stream.queued, worker)
        if is_first or (stream.attempts.refused and not stream.assembly.delivered):
            stream.assembly.finish(end)
            self._detach(stream)
            stream.wake()
        else:
            stream.refused_by = worker
            self._move([(stream, Loss.REFUSED)], f"refused the request: {end.message}")

    def _can_go_elsewhere(self, queued: QueuedRequest, worker: str) -> bool:
        """True if another worker than `worker` could take a request."""
        return self._dispatcher.can_serve(queued.model, queued.numerics, queued.most_tokens, but=worker)

    def _take_back(self, stream: RequestStream, worker: str = "") -> None:
        """Routes a request again that did not count as an attempt (rule S9): `worker` gave it back, or never had it."""
        self._detach(stream)
        stream.attempts.return_unstarted()
        stream.was_returned = stream.was_returned or bool(worker)
        self._dispatcher.requeue(stream.queued, self._clock(), excluded_worker=worker or stream.refused_by)

    def _share(self, stream: RequestStream, worker: str) -> None:
        """Lets a worker have other requests that a suspect has had for itself; a no-op for other streams."""
        if self._alone.pop(stream.rid, None) is not None:
            self._dispatcher.share(worker, stream.queued.key)
            self._pump_soon()

    def _acquit(self, rid: int) -> None:
        """A suspect has done what was suspected to kill its worker, or has had that for itself for long enough."""
        stream = self._alone.get(rid)
        if stream is not None and stream.session is not None:
            stream.attempts.share()
            self._share(stream, stream.session.address)

    def _end_first_steps(self) -> None:
        for rid, stream in list(self._alone.items()):
            if stream.attempts.has_passed_first_steps(stream.assembly.num_tokens):
                self._acquit(rid)

    def _leave(self, session: Session) -> None:
        """The worker takes no more work."""
        was_serving = self._registry.serving
        self._registry.release(session.address)
        self._to_review = deque(self._dispatcher.parked())
        if was_serving and not self._registry.serving:
            self._serving_changed()
        self._pump_soon()

    def _detach(self, stream: RequestStream) -> None:
        """Takes a stream off its session; a no-op when it is on none."""
        session, stream.session = stream.session, None
        if session is None:
            return
        stream.attempts.end(stream.assembly.num_tokens, self._clock())
        self._share(stream, session.address)
        self._output.settle(stream)
        del self._running[stream.rid]
        session.state.cancel(stream.rid)
        session.notify()
        self._leave_if_idle(session)

    # Dispatching.

    def _pump_soon(self) -> None:
        """Decides once for all events of this turn of the loop."""
        if self._pump_due is None:
            self._pump_due = asyncio.get_running_loop().call_soon(self._pump, context=self._context)

    def _pump(self) -> None:
        self._pump_due = None
        try:
            self._decide(self._clock())
        except Exception:
            failed(_DISPATCHING, "dispatching failed; it begins anew", after_s=TASK_RESTART_S)
            # Even if nothing else happens, and not in every turn of the loop.
            self._pump_due = asyncio.get_running_loop().call_later(TASK_RESTART_S, self._pump, context=self._context)

    def _decide(self, now: float) -> None:
        for key in self._dispatcher.expire(now):
            self._streams[key].fail(DeadlineError("in the router's queue"))
        for key in self._dispatcher.abandon(now):
            self._lose(self._streams[key])
        self._output.turn(self._running.values(), now)
        for release in self._dispatcher.decide(now):
            self._submit(release, now)
        self._review_parked()
        for address in self._dispatcher.take_changed_records():
            if address in self._sessions:
                self._announce(address)
        self._set_timer(now)

    def _review_parked(self) -> None:
        """Has requests prepared anew that wait for weights which no ready worker has, while others of their model do.

        Only those that have not begun: a begun one waits for a worker with its weights.
        """
        self._to_review.extend(self._dispatcher.take_newly_parked())
        for _ in range(min(len(self._to_review), _REVIEWED_PER_PUMP)):
            key = self._to_review.popleft()
            if not self._dispatcher.is_parked(key):
                continue
            stream = self._streams[key]
            request = stream.request
            if not stream.assembly.delivered and self._registry.is_replaced(request.model, request.identity):
                self._dispatcher.cancel(key)
                stream.fail(ReplacedError(request.model))
        if self._to_review:
            self._pump_soon()

    def _lose(self, stream: RequestStream) -> None:
        """Ends a request for which there has been no worker for too long."""
        wait_s, numerics = self._failover.worker_wait_s, stream.queued.numerics
        wanted = "" if numerics is None else f" of numerics class {numerics}"
        if self._dispatcher.can_serve(stream.queued.model, numerics):
            wanted += f" with room for the request's {stream.queued.most_tokens} tokens"
        stream.assembly.lose_worker(f"no worker{wanted} serves model {stream.request.model!r}, for {wait_s:g} s now")
        stream.wake()

    def _submit(self, release: Release, now: float) -> None:
        session = self._sessions[release.worker]
        numerics = _numerics(session)
        group: list[Submission] = []
        for queued in release.requests:
            stream = self._streams[queued.key]
            try:
                group.append(self._begin(stream, session, numerics, now))
            except Exception:
                # Nobody else has it any more: it would wait for ever.
                failed(_DISPATCHING, "request not sent", worker=session.address, **stream.request.ids)
                self._detach(stream)
                stream.fail(RouterFailedError())
        self.num_releases += 1
        self.num_released += len(group)
        session.state.submit(release.serial, group)
        session.notify()

    def _begin(self, stream: RequestStream, session: Session, numerics: str, now: float) -> Submission:
        queued = stream.queued
        # A request goes back once at most: a fleet that is full everywhere would pass it around for ever.
        others = self._can_go_elsewhere(queued, session.address)
        rid = self._incarnation | next(self._counter)
        self._running[rid] = stream
        if queued.alone:
            self._alone[rid] = stream
            asyncio.get_running_loop().call_later(ALONE_S, self._acquit, rid)
        return stream.begin(session, numerics, rid, now, must_keep=stream.was_returned or not others)

    def _announce(self, address: str) -> None:
        record = self._dispatcher.lane_record(address)
        if record != self._announced[address]:
            self._announced[address] = record
            self._sessions[address].state.announce(record)
            self._sessions[address].notify()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._dispatcher.next_timer(now)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._pump_soon)

    def _load_report(self, load: wpb.Load, submit_seen: int) -> LoadReport:
        return LoadReport(
            time=self._clock(),
            decoding_seqs=load.decoding_seqs,
            waiting_seqs=load.waiting_seqs,
            waiting_tokens=load.waiting_tokens,
            room_tokens=load.room_tokens,
            room_seqs=load.room_seqs,
            last_prompt_latency_s=load.last_prompt_latency_us / 1e6,
            prefill_rate=load.prefill_rate,
            prefill_samples=load.prefill_samples,
            fleet_oldest_age_s=load.fleet_oldest_age_ms / 1e3,
            fleet_tokens=load.fleet_tokens,
            submit_seen=submit_seen,
            total_blocks=load.total_blocks,
        )


def _numerics(session: Session) -> str:
    """The numerics class of a worker; one of its own if it names none, so that no answer is called exact by mistake."""
    assert session.model is not None
    return session.model.numerics or f"unknown, of instance {session.instance_id}"
