"""The workers of a router: dialled, up, cordoned, draining, parting, or lost with sequences held for them.

Receives the events of Sessions (`SessionEvents`), updates registry, lanes and placement, and passes on to the owner of
the requests what concerns them (`SequenceEvents`). The sequences of a broken stream are held until the next stream to
the same instance resumes them (rules S4, S7), or move to other workers. Invariants:
  * The dispatcher has a lane for each worker that is up; the registry counts it while it gets work (`WorkerIntake`).
  * An instance has one session at a time, from before its Hello to its end, even under several addresses.
  * `_workers` has every dialled address; an address leaves with the task that dials it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import SESSION_GOODBYE_S
from common.process.tasks import keep_running
from common.rpc.tls import Dialer, is_loopback
from common.wire.draft_counts import add_counts
from common.wire.peer_numbers import rate
from router.answers.stream_chunk import drafts_of
from router.model_registry import ModelRegistry, WorkerRefusedError
from router.prompts.tokenizer_store import TokenizerStore
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.failover import DEFAULT_FAILOVER, FailoverOptions, Loss, stall_bound_s
from router.workers.expected_workers import ExpectedWorkers
from router.workers.orphans import OrphanTable
from router.workers.session import CordonState, Fault, Session, SessionLostError, keep_connected
from router.workers.worker_caches import WorkerCaches
from router.workers.worker_intake import SequenceEvents, WorkerIntake, cordon_of, load_report
from router.workers.worker_record import RESUMABLE, KnownWorker, WorkerRecord

log = structlog.get_logger(__name__)


class WorkerPool:
    """The workers of one router.

    Attributes:
        dialer: opens the channels to workers.
        caches: known state of their prefix caches.
        expected: workers that have never been up.
        orphans: sequences of routers that are gone.
        on_kv_digests: called with the digests of KV blocks that a worker sends.

    Args:
        dispatcher: has the workers' lanes.
        registry: has the workers' models.
        store: fetches tokenizers from workers.
        requests: owns the sequences that run on workers.
        orphans: as the attribute.
        dialer: as the attribute.
        serving_changed: called when the first worker serves, and when the last one stops.
        clock: monotonic seconds.
        failover: how long a worker may be silent, stalled or away.
        worker_lost: called when a stream with a worker has broken.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: ModelRegistry,
        store: TokenizerStore,
        requests: SequenceEvents,
        orphans: OrphanTable,
        dialer: Dialer,
        serving_changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        failover: FailoverOptions = DEFAULT_FAILOVER,
        worker_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._store = store
        self._requests = requests
        self._serving_changed = serving_changed
        self._clock = clock
        self._failover = failover
        self._worker_lost = worker_lost
        self.dialer = dialer
        self.caches = WorkerCaches(dispatcher.assignment)
        self.expected = ExpectedWorkers(registry, failover.worker_wait_s, clock=clock)
        self.orphans = orphans
        self.on_kv_digests: Callable[[Session, Iterable[wpb.KvDigest]], None] = _nobody
        self.router_id = secrets.token_hex(8)
        self._workers: dict[str, WorkerRecord] = {}
        self._instances: dict[str, Session] = {}
        self._intake = WorkerIntake(dispatcher, registry, requests, self.expected, serving_changed, clock)
        self._none_up = asyncio.Event()
        self._has_warned = False

    def set_workers(self, addresses: Sequence[str]) -> None:
        """Replaces the list of workers: new ones are dialled, others get no new work and finish their requests."""
        wanted = set(addresses)
        for address in addresses:
            self._add(address)
        for address, worker in list(self._workers.items()):
            if address not in wanted and not worker.is_parting:
                self._leave(worker)

    def workers(self) -> list[KnownWorker]:
        """All workers, connected or not, in order of their addresses."""
        now = self._clock()
        loads = {session.address: self._dispatcher.lane_status(session.address, now) for session in self.sessions()}
        return [worker.known(loads.get(address)) for address, worker in sorted(self._workers.items())]

    def sessions(self) -> list[Session]:
        """The sessions with workers that are up."""
        return [worker.session for worker in self._workers.values() if worker.session is not None]

    def tables(self) -> dict[str, int]:
        """Sizes of the tables that grow with workers, by name."""
        held = sum(worker.held is not None for worker in self._workers.values())
        tables = {"workers": len(self._workers), "sessions_held": held, "early": len(self.expected)}
        return {**tables, "orphans": len(self.orphans)}

    async def stop(self) -> None:
        """Ends all sessions; the workers drop the sequences that still run."""
        for session in self.sessions():
            session.leave()
        if self.sessions():
            self._none_up.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none_up.wait(), SESSION_GOODBYE_S)
        workers = list(self._workers.values())
        tasks = [worker.task for worker in workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in workers:
            worker.release()

    # Sessions (`SessionEvents`).

    def session_opening(self, session: Session) -> None:
        """Refuses a second session with one worker; lets the session resume held sequences."""
        worker = self._workers.get(session.address)
        if worker is None:
            # The pool does not dial this worker.
            worker = self._workers[session.address] = WorkerRecord(session.address)
        if not worker.is_wanted:
            raise WorkerRefusedError("is not a worker of this router any more")
        holder = self._instances.setdefault(session.instance_id, session)
        if holder is not session:
            raise WorkerRefusedError(f"is the worker at {holder.address} by another address")
        self.caches.opening(session)
        if worker.held is None:
            return
        if worker.held.instance_id != session.instance_id:
            self._give_up(worker, "it was restarted", Loss.DIED)
            return
        session.state.resume(worker.held.state)
        worker.held = session
        self._requests.take_over(session)

    def session_closed(self, session: Session, fault: Fault) -> None:
        """Allows another session with the worker; gives up held sequences unless the fault is resumable."""
        if self._instances.get(session.instance_id) is session:
            del self._instances[session.instance_id]
        # After a fault that is not resumable, the next stream has nothing to resume.
        if fault not in RESUMABLE:
            self.caches.forget(session.address)
            worker = self._workers[session.address]
            self._give_up(worker, f"it is {fault.name.lower()}", worker.loss_by(session, fault))

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """Adds the worker to registry and dispatcher."""
        if session.model is None:
            raise WorkerRefusedError("it serves no model")
        limits = welcome.limits or wpb.Limits()
        session.model = replace(session.model, max_model_len=limits.max_model_len or session.model.max_model_len)
        session.proto_minor = welcome.proto_minor
        session.step_tokens = limits.max_num_batched_tokens
        _check_stall(session, welcome.busy_ms, welcome.load.prefill_rate, self._failover.stall_timeout_s)
        with self._registry.watched(self._serving_changed):
            self._intake.admit(session)
            try:
                self._count_in(session, welcome)
            except Exception as error:
                # All or nothing: a lane whose stream has ended unnoticed would keep its requests for ever. Sequences
                # of an earlier stream are treated as after any break.
                fault = error.fault if isinstance(error, SessionLostError) else Fault.VIOLATION
                self._workers[session.address].release()
                self.session_down(session, fault, str(error))
                raise

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Applies a step's tokens, ends and load."""
        effects = session.state.apply(step, self._clock())
        if any(loss is Loss.ENGINE_FAILED for _, loss in effects.lost):
            # It will return as another instance. Until then it gets no requests, in particular none that it just lost.
            self._intake.withdraw(session, self._dispatcher.lane_draining)
        self._requests.carry_out(session, effects)
        worker = self._workers[session.address]
        worker.answers.add(len(step.token_ids), effects)
        for end in step.ends:
            add_counts(worker.drafts, drafts_of(end))
        if step.HasField("load"):
            self._intake.take_report(session, step.load, step.submit_seen)

    def heartbeat(self, session: Session, heartbeat: wpb.Heartbeat) -> None:
        """Applies the load; raises SessionLostError if the worker is stalled."""
        _check_stall(session, heartbeat.busy_ms, heartbeat.load.prefill_rate, self._failover.stall_timeout_s)
        session.state.heard = self._clock()
        self._intake.take_report(session, heartbeat.load, heartbeat.submit_seen)

    def kv_events(self, session: Session, events: wpb.KvEvents) -> None:
        """Applies changes of the worker's prefix cache, and passes on digests of its KV blocks."""
        if events.digests:
            # A failing observer must not end the session.
            with contextlib.suppress(Exception):
                self.on_kv_digests(session, events.digests)
        self.caches.accept(session, events)

    def draining(self, session: Session) -> None:
        """Gives the worker no new requests, and moves running ones to other workers if possible."""
        log.info("worker draining", worker=session.address, worker_id=session.worker_id)
        session.is_draining = True
        self._intake.update(session)
        self._requests.hand_over(session)

    def orphans_named(self, session: Session, orphans: wpb.Orphans) -> None:
        """Remembers the sequences of another router that is gone."""
        self.orphans.add(session.address, orphans.keys, orphans.lease_left_ms / 1000)

    def session_down(self, session: Session, fault: Fault, why: str) -> None:
        """Holds the worker's sequences if it may still have them, or moves them to other workers."""
        now, worker = self._clock(), self._workers[session.address]
        worker.session = None
        if not self.sessions():
            self._none_up.set()
        in_good_order = session.is_draining or session.is_leaving or fault is Fault.SHUTDOWN
        worker.history.went_down(now, in_good_order=in_good_order)
        self._requests.worker_down(session, {each.worker_id for each in self._workers.values()})
        self._intake.withdraw(session, self._dispatcher.lane_down)
        if fault is Fault.SHUTDOWN:
            return
        self._worker_lost()
        self._requests.return_unwritten(session)
        if not session.state.live:
            return
        worker.held = session
        if fault not in RESUMABLE or worker.violates_again(fault, now):
            self._give_up(worker, why, worker.loss_by(session, fault))
        else:
            worker.hold(lambda: self._give_up(worker, why, Loss.UNREACHABLE))

    def unusable(self, session: Session, why: str) -> None:
        """Remembers the reason, for operators."""
        worker = self._workers[session.address]
        if not worker.is_parting:
            worker.last_error = why

    # Workers that join and leave.

    def _add(self, address: str) -> None:
        """Dials a worker, or keeps one that was about to part."""
        worker = self._workers.get(address)
        if worker is None:
            self.expected.expect(address)
            worker = self._workers[address] = WorkerRecord(address)
            worker.task = asyncio.create_task(self._connect(worker), name=f"worker {address}")
        elif worker.is_parting:
            worker.is_parting = False
            worker.dial_now.set()
            log.info("worker joined", worker=address)
            if worker.session is not None:
                worker.session.is_parting = False
                self._intake.update(worker.session)

    def _leave(self, worker: WorkerRecord) -> None:
        """Gives a worker no new requests; its connection ends with its last request."""
        worker.is_parting = True
        worker.last_error = ""
        self.expected.forget(worker.address)
        session = worker.session
        log.info("worker left", worker=worker.address, running=0 if session is None else len(session.state.live))
        if session is not None:
            session.is_parting = True
            self._intake.update(session)
            session.notify()

    async def _connect(self, worker: WorkerRecord) -> None:
        address = worker.address
        if self.dialer.tls is None and not is_loopback(address) and not self._has_warned:
            self._has_warned = True
            log.warning("PLAIN TEXT to workers outside loopback: anybody on the network can read it; use --worker-ca")

        def open_session() -> Session:
            return Session(address, self.router_id, self._clock, self.dialer, self._failover.lease_s)

        async def pause(fault: Fault) -> None:
            wait_s = worker.history.redial_after_s(self._clock(), answers=fault is Fault.UNREADY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.dial_now.wait(), wait_s)
            worker.dial_now.clear()

        def connected() -> Awaitable[None]:
            return keep_connected(open_session, self._store, self, lambda: worker.is_wanted, pause)

        try:
            await keep_running("worker connection", connected, worker=address)
        finally:
            del self._workers[address]
            if worker.is_parting:
                self._registry.forget(address)
                self.caches.forget(address)

    # Counting in and out.

    def _count_in(self, session: Session, welcome: wpb.Welcome) -> None:
        assert session.model is not None
        worker, now = self._workers[session.address], self._clock()
        worker.session, session.is_parting = session, worker.is_parting
        worker.worker_id, worker.model = session.worker_id, session.model.name
        self._requests.worker_up(session)
        resumed = len(session.state.live)
        self._dispatcher.lane_up(
            session.address,
            session.model.identity,
            load_report(welcome.load, 0, now),
            now,
            session.numerics,
            max_model_len=session.model.max_model_len,
            caches_prefixes=welcome.kv_events,
            grammar_engine=session.model.grammar_engine,
            role=session.role,
            kv_stores=session.model.kv_stores,
        )
        if problem := self._dispatcher.lanes.role_problem(self._dispatcher.lanes[session.address]):
            told = {"worker": session.address, "role": session.role, "why": problem}
            log.warning("workers for prefills and decodes share no KV blocks", **told)
        self._intake.start_probation(worker, session, now)
        self.caches.welcomed(session)
        worker.release()
        self._requests.forget(session, welcome.unknown)
        session.accepting = True
        session.cordon = cordon_of(welcome.load)
        worker.last_error = ""
        self._intake.update(session)
        log.info(
            "worker up",
            worker=session.address,
            worker_id=session.worker_id,
            model=session.model.name,
            resumed=resumed,
            unknown=len(welcome.unknown),
        )
        for other in self.sessions():
            if other.is_draining or other.cordon is CordonState.EVICTING:
                self._requests.hand_over(other)
        session.notify()
        self._requests.dispatch_soon()

    def _give_up(self, worker: WorkerRecord, why: str, loss: Loss) -> None:
        """Moves the held sequences of a worker to other workers (rule S7)."""
        held = worker.release()
        if held is not None:
            self._requests.lose(held, loss, why)


def _nobody(session: Session, digests: Iterable[wpb.KvDigest]) -> None:
    """Ignores digests."""


def _check_stall(session: Session, busy_ms: int, prefill_rate: float, stall_timeout_s: float) -> None:
    bound_s = stall_bound_s(stall_timeout_s, session.step_tokens, rate(prefill_rate))
    if busy_ms / 1000 > bound_s:
        raise SessionLostError(Fault.STALLED, f"its engine step takes longer than {bound_s:g} s")
