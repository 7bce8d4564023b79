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
import enum
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.errors import DeadlineError, PoisonRequestError, QueueFullError
from common.limits import (
    LEASE_S,
    RECONNECT_S,
    SESSION_GOODBYE_S,
    STALL_TIMEOUT_S,
    VIOLATION_MEMORY_S,
    WORKER_WAIT_S,
)
from common.rpc.tls import Dialer, is_loopback
from router.assembly import StreamAssembly
from router.dispatcher import ClassLoad, Dispatcher, LaneCounts, Release
from router.failover import FailoverPolicy, Loss, Verdict, stall_bound_s
from router.lane import LaneLoad, LaneRecord, LoadReport
from router.link import Submission
from router.model_registry import ModelRegistry, WorkerRefusedError
from router.placement import Placement
from router.queue import QueuedRequest
from router.request_stream import RequestStream, RoutedRequest
from router.session import Fault, Intake, Session, SessionLostError, keep_connected
from router.tokenizer_store import TokenizerStore
from router.turns import Turns

# A rid is the router's incarnation above a counter: unique over the life of the worker too (rule S1).
_COUNTER_BITS = 40
_NOTHING_WAITS = LaneRecord(None, 0, 0)
# Faults after which the worker may still have the sequences, so that the next stream takes them up.
_RESUMABLE = frozenset({Fault.BROKEN, Fault.VIOLATION})
_INTAKES = {wpb.INTAKE_CORDONED: Intake.CORDONED, wpb.INTAKE_EVICTING: Intake.EVICTING}
_LOSSES = {Fault.SILENT: Loss.SILENT, Fault.STALLED: Loss.STALLED, Fault.VIOLATION: Loss.VIOLATED}

Weights: TypeAlias = Mapping[str, float]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """What happens to requests whose worker is lost; times in seconds.

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


class Service(enum.Enum):
    """Whether a worker gets new requests of this router, and if not, why."""

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

    `running` counts the requests of this router there. Of a worker without a connection the address is known, and
    `last_error` says why there is none.
    """

    address: str
    service: Service = Service.UNCONNECTED
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
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._store = store
        self._serving_changed = serving_changed
        self._clock = clock
        self._failover = failover
        self._worker_lost = worker_lost
        self.dialer = Dialer() if dialer is None else dialer
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
        self._draining: set[Session] = set()
        self._announced: dict[str, LaneRecord] = {}
        self._streams: dict[int, RequestStream] = {}
        self._running: dict[int, RequestStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._parting: set[str] = set()
        # Why a worker that is wanted can not be used now.
        self._troubles: dict[str, str] = {}
        self.lost: Counter[str] = Counter()
        self.num_releases = self.num_released = 0
        self._turns = Turns()
        self._none_up = asyncio.Event()
        self._pump_due: asyncio.Handle | None = None
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
        for handle in (self._pump_due, self._timer, *self._give_up_timers.values()):
            if handle is not None:
                handle.cancel()

    def open(self, request: RoutedRequest, assembly: StreamAssembly, on_submit: Callable[[str], None]) -> RequestStream:
        """Sends a request on its way. The caller closes the stream on every path.

        Raises:
            QueueFullError: too many requests wait.
            HopelessDeadlineError: its deadline would pass while it waits.
        """
        key = next(self._counter)
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
        )
        try:
            self._dispatcher.arrive(queued, self._clock())
        except QueueFullError:
            # What is about to be released does not count: the queue is full only if it is full after that.
            if self._pump_due is None:
                raise
            self._pump_due.cancel()
            self._pump()
            self._dispatcher.arrive(queued, self._clock())
        stream = self._streams[key] = RequestStream(queued, request, assembly, on_submit, self._turns)
        self._pump_soon()
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forgets a request; cancels it where it waits or runs."""
        del self._streams[stream.queued.key]
        if self._dispatcher.cancel(stream.queued.key):
            self._pump_soon()
        self._detach(stream)

    def _join(self, address: str) -> None:
        """Dials a worker, or takes it back that was about to be left."""
        if address not in self._tasks:
            self._tasks[address] = asyncio.create_task(self._connect(address), name=f"worker {address}")
        elif address in self._parting:
            self._parting.discard(address)
            log.info("worker joined", worker=address)
            if (session := self._sessions.get(address)) is not None:
                self._follow_intake(session)

    def _part(self, address: str) -> None:
        """Gives a worker nothing new; the connection ends with the last of what runs there."""
        self._parting.add(address)
        self._troubles.pop(address, None)
        session = self._sessions.get(address)
        log.info("worker left", worker=address, running=0 if session is None else len(session.link.live))
        if session is not None:
            self._follow_intake(session)
            self._leave_if_idle(session)

    def _leave_if_idle(self, session: Session) -> None:
        if session.address in self._parting and not session.link.live:
            session.leave()

    def configure(self, gate: DelayGate, placement: Placement | None, queue_size: int, weights: Weights) -> None:
        """Other rules for what waits, as `Dispatcher.configure`."""
        self._dispatcher.configure(gate, placement, queue_size, weights, self._clock())
        self._pump_soon()

    def workers(self) -> list[KnownWorker]:
        """The workers of this router, connected or not, in order of their addresses."""
        return [self._known_worker(address) for address in sorted(self._tasks.keys() | self._sessions.keys())]

    def waiting(self) -> list[ClassLoad]:
        """What waits, by priority class."""
        return self._dispatcher.waiting(self._clock())

    def lanes(self) -> LaneCounts:
        """How many lanes have something to do."""
        return self._dispatcher.lane_counts(self._clock())

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests, tenants, sessions or workers."""
        return {
            "streams": len(self._streams),
            "sequences": len(self._running),
            "sessions_held": len(self._held),
            "workers": len(self._tasks),
            **self._dispatcher.tables(),
        }

    def _known_worker(self, address: str) -> KnownWorker:
        session = self._sessions.get(address)
        if session is None or session.model is None:
            return KnownWorker(address, last_error=self._troubles.get(address, ""))
        return KnownWorker(
            address,
            self._service(session),
            worker_id=session.worker_id,
            instance_id=session.instance_id,
            model=session.model.name,
            numerics=session.model.numerics,
            running=len(session.link.live),
            load=self._dispatcher.lane_load(address, self._clock()),
        )

    def _service(self, session: Session) -> Service:
        if session in self._draining:
            return Service.DRAINING
        if session.address in self._parting or session.is_leaving:
            return Service.LEAVING
        return Service.SERVING if session.intake is Intake.OPEN else Service.CORDONED

    # Sessions (`SessionEvents`).

    def session_opening(self, session: Session) -> None:
        """Refuses a second session with one worker; hands over what an earlier stream has left."""
        if not self._is_wanted(session.address):
            raise WorkerRefusedError("is no worker of this router any more")
        holder = self._instances.setdefault(session.instance_id, session)
        if holder is not session:
            raise WorkerRefusedError(f"is the worker at {holder.address} by another address")
        held = self._held.get(session.address)
        if held is None:
            return
        if held.instance_id != session.instance_id:
            self._give_up(session.address, "it was restarted")
            return
        session.link.resume(held.link)
        for rid in held.link.live:
            self._running[rid].session = session
        self._held[session.address] = session

    def session_closed(self, session: Session, fault: Fault) -> None:
        """Lets another session have the worker."""
        if self._instances.get(session.instance_id) is session:
            del self._instances[session.instance_id]
        # It can not be there any more, or does not want to be; otherwise the next dial may succeed.
        if fault not in _RESUMABLE:
            self._give_up(session.address, f"it is {fault.name.lower()}", _LOSSES.get(fault, Loss.DIED))

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """Counts the worker in."""
        if session.model is None:
            raise WorkerRefusedError("it serves no model")
        limits = welcome.limits or wpb.Limits()
        session.model = replace(session.model, max_model_len=limits.max_model_len or session.model.max_model_len)
        session.step_tokens = limits.max_num_batched_tokens
        self._check_stall(session, welcome.busy_ms, welcome.load.prefill_rate)
        was_serving = self._registry.serving
        self._registry.admit(session.address, session.model)
        self._sessions[session.address] = session
        self._announced[session.address] = _NOTHING_WAITS
        resumed = len(session.link.live)
        now, load = self._clock(), self._load_report(welcome.load, 0)
        self._dispatcher.lane_up(session.address, session.model.identity, load, now, session.model.numerics)
        self._forget(session, welcome.unknown)
        session.open = True
        session.intake = _INTAKES.get(welcome.load.intake, Intake.OPEN)
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
            if other.intake is Intake.EVICTING:
                self._hand_over(other)
        if not was_serving:
            self._serving_changed()
        self._leave_if_idle(session)
        self._pump_soon()

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Hands tokens to their streams."""
        effects = session.link.apply(step, self._clock())
        if any(loss is Loss.ENGINE_FAILED for _, loss in effects.lost):
            # It comes back as another instance. Until then nothing goes there, least of all what it has just lost.
            self._dispatcher.lane_draining(session.address, self._clock())
            self._leave(session)
        running = self._running
        for rid in effects.touched:
            running[rid].wake()
        for rid in effects.ended:
            self._detach(running[rid])
        session.notify()
        for rid in reversed(effects.returned):
            self._take_back(self._running[rid], session.address)
        self._move([(self._running[rid], loss) for rid, loss in effects.lost], "ended the request")
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

    def renew_lease(self, session: Session) -> None:
        """Sends a Lane frame."""
        session.link.announce(self._dispatcher.lane_record(session.address))
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
        self._draining.discard(session)
        self._dispatcher.lane_down(session.address, now)
        self._leave(session)
        if fault is Fault.SHUTDOWN:
            return
        self._worker_lost()
        if not session.link.live:
            return
        self._held[session.address] = session
        if fault not in _RESUMABLE or self._violates_again(session, fault, now):
            self._give_up(session.address, why, _LOSSES.get(fault, Loss.DIED))
            return
        loop = asyncio.get_running_loop()
        self._give_up_timers[session.address] = loop.call_later(RECONNECT_S, self._give_up, session.address, why)

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

        try:
            await keep_connected(open_session, self._store, self, lambda: self._is_wanted(address))
        finally:
            del self._tasks[address]
            self._violated.pop(address, None)
            if address in self._parting:
                self._registry.forget(address)
            self._parting.discard(address)
            self._troubles.pop(address, None)

    def _is_wanted(self, address: str) -> bool:
        """Whether a worker must be connected to: it is one of this router's, or sequences of this router are there."""
        return address not in self._parting or address in self._held

    def _take_intake(self, session: Session, said: wpb.Intake.ValueType) -> None:
        """What the worker says in every report about new work."""
        intake = _INTAKES.get(said, Intake.OPEN)
        if intake is session.intake:
            return
        session.intake = intake
        log.info("worker intake", worker=session.address, worker_id=session.worker_id, intake=intake.name.lower())
        self._follow_intake(session)
        if intake is Intake.EVICTING:
            self._hand_over(session)

    def _follow_intake(self, session: Session) -> None:
        """Lets the worker get new work, or no more, when either side has changed its mind about that."""
        opens = self._service(session) is Service.SERVING
        if opens == session.open:
            return
        session.open = opens
        now = self._clock()
        if not opens:
            self._dispatcher.lane_draining(session.address, now)
            self._leave(session)
            return
        assert session.model is not None
        was_serving = self._registry.serving
        try:
            self._registry.admit(session.address, session.model)
        except WorkerRefusedError as error:
            raise SessionLostError(Fault.UNREADY, str(error)) from None
        self._dispatcher.lane_ready(session.address, now)
        if not was_serving:
            self._serving_changed()
        self._pump_soon()

    # Failover.

    def _check_stall(self, session: Session, busy_ms: int, prefill_rate: float) -> None:
        bound_s = stall_bound_s(self._failover.stall_timeout_s, session.step_tokens, prefill_rate)
        if busy_ms / 1000 > bound_s:
            raise SessionLostError(Fault.STALLED, f"its engine step takes longer than {bound_s:g} s")

    def _violates_again(self, session: Session, fault: Fault, now: float) -> bool:
        """Whether an instance breaks the protocol a second time: resuming does not mend it."""
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

    def _give_up(self, address: str, why: str, loss: Loss = Loss.DIED) -> None:
        """Nobody takes up the sequences of a broken stream: they go on elsewhere (rule S7)."""
        held = self._release_held(address)
        if held is not None:
            self._move([(self._running[rid], loss) for rid in held.link.live], why)

    def _forget(self, session: Session, unknown: Iterable[int]) -> None:
        """The stream is taken up again; the worker has let these sequences go."""
        self._release_held(session.address)
        lost = [self._running[rid] for rid in unknown if rid in session.link.live]
        for stream in lost:
            session.link.forget(stream.rid)
        self._move([(stream, Loss.FORGOTTEN) for stream in lost], "the worker has let it go")

    def _hand_over(self, session: Session) -> None:
        """Moves what runs on a draining worker to those who can go on with it."""
        begun: list[tuple[RequestStream, Loss]] = []
        for rid in reversed(list(session.link.live)):
            stream = self._running[rid]
            wanted = stream.attempts.numerics_wanted(self._failover.policy, stream.assembly.have)
            if not self._dispatcher.can_serve(stream.queued.model, wanted):
                continue
            if stream.attempts.has_begun(stream.assembly.have):
                begun.append((stream, Loss.DRAINED))
            else:
                self._take_back(stream, session.address)
        self._move(begun, "it drains")

    def _move(self, lost: list[tuple[RequestStream, Loss]], why: str) -> None:
        """Sends streams whose attempt is over on another one, ahead of what waits and in their order, or ends them."""
        self.lost.update(loss.value for _, loss in lost)
        for stream, loss in sorted(lost, key=lambda pair: pair[0].queued.key, reverse=True):
            stream.attempts.end(stream.assembly.have, self._clock(), loss)
            self._detach(stream)
            log.info(
                "attempt lost",
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
            stream.fail(PoisonRequestError(len(stream.attempts)))
        elif verdict is Verdict.GIVE_UP:
            stream.assembly.lose_worker(f"{len(stream.attempts)} workers were lost; the last one: {why}")
        else:
            stream.queued.tokens = stream.assembly.have
            wanted = stream.attempts.numerics_wanted(self._failover.policy, stream.assembly.have)
            stream.queued.numerics = wanted
            self._dispatcher.requeue(stream.queued, now)

    def _take_back(self, stream: RequestStream, worker: str) -> None:
        """Routes a request again that its worker gave back; that does not count as an attempt (rule S9)."""
        self._detach(stream)
        stream.attempts.give_back()
        stream.returned = True
        self._dispatcher.requeue(stream.queued, self._clock(), avoid=worker)

    def _leave(self, session: Session) -> None:
        """The worker takes no more work."""
        was_serving = self._registry.serving
        self._registry.release(session.address)
        if was_serving and not self._registry.serving:
            self._serving_changed()
        self._pump_soon()

    def _detach(self, stream: RequestStream) -> None:
        """Takes a stream off its session; a no-op when it is on none."""
        session, stream.session = stream.session, None
        if session is None:
            return
        stream.attempts.end(stream.assembly.have, self._clock())
        del self._running[stream.rid]
        session.link.cancel(stream.rid)
        session.notify()
        self._leave_if_idle(session)

    # Dispatching.

    def _pump_soon(self) -> None:
        """Decides once for all events of this turn of the loop."""
        if self._pump_due is None:
            self._pump_due = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = None
        now = self._clock()
        for key in self._dispatcher.expire(now):
            self._streams[key].fail(DeadlineError("in the router's queue"))
        for key in self._dispatcher.abandon(now):
            self._lose(self._streams[key])
        for release in self._dispatcher.decide(now):
            self._submit(release, now)
        for address in self._sessions:
            self._announce(address)
        self._set_timer(now)

    def _lose(self, stream: RequestStream) -> None:
        """Ends a request for which there has been no worker for too long."""
        wait_s, numerics = self._failover.worker_wait_s, stream.queued.numerics
        wanted = "" if numerics is None else f" of numerics class {numerics or 'unknown'}"
        stream.assembly.lose_worker(f"no worker{wanted} serves model {stream.request.model!r}, for {wait_s:g} s now")
        stream.wake()

    def _submit(self, release: Release, now: float) -> None:
        session = self._sessions[release.worker]
        assert session.model is not None
        numerics = session.model.numerics
        group: list[Submission] = []
        for queued in release.requests:
            stream = self._streams[queued.key]
            # A request goes back once at most: a fleet that is full everywhere would pass it around for ever.
            others = self._dispatcher.can_serve(queued.model, queued.numerics, but=release.worker)
            rid = self._incarnation | next(self._counter)
            self._running[rid] = stream
            group.append(stream.begin(session, numerics, rid, now, keep=stream.returned or not others))
        self.num_releases += 1
        self.num_released += len(group)
        session.link.submit(release.serial, group)
        session.notify()

    def _announce(self, address: str) -> None:
        record = self._dispatcher.lane_record(address)
        if record != self._announced[address]:
            self._announced[address] = record
            self._sessions[address].link.announce(record)
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
            fleet_oldest_age_s=load.fleet_oldest_age_ms / 1e3,
            fleet_tokens=load.fleet_tokens,
            submit_seen=submit_seen,
            total_blocks=load.total_blocks,
        )
