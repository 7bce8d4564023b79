"""Intake of the workers: tells registry and dispatcher which workers accept new work, and how loaded they are.

Invariant: the registry counts a worker, and its lane is ready, exactly while `session.accepting`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import PROBATION_SEQS
from common.wire.peer_numbers import counted, rate
from router.model_registry import ModelRegistry
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.failover import Loss
from router.scheduling.worker_load import LoadReport
from router.workers.expected_workers import ExpectedWorkers
from router.workers.session import CordonState, Session, WorkerState
from router.workers.session_state import StepEffects
from router.workers.worker_record import WorkerRecord

_CORDONS: Final = {wpb.INTAKE_CORDONED: CordonState.CORDONED, wpb.INTAKE_EVICTING: CordonState.EVICTING}

log = structlog.get_logger(__name__)


class SequenceEvents(Protocol):
    """Owner of the sequences that run on workers. Called on the event loop, never concurrently."""

    def worker_up(self, session: Session) -> None:
        """Sequences can be sent on this session from now on."""

    def worker_down(self, session: Session, known: Collection[str]) -> None:
        """The session has ended; its sequences in `state.live` are held, or lost next. `known`: ids of all workers."""

    def take_over(self, session: Session) -> None:
        """The session continues the sequences in its `state.live`, which ran on an earlier session."""

    def carry_out(self, session: Session, effects: StepEffects) -> None:
        """The worker has computed a step."""

    def lose(self, session: Session, loss: Loss, why: str) -> None:
        """The sequences in the session's `state.live` are lost."""

    def forget(self, session: Session, rids: Iterable[int]) -> None:
        """The worker no longer has these sequences."""

    def return_unwritten(self, session: Session) -> None:
        """Sequences that were not completely written cannot be at the worker, and must be queued again."""

    def hand_over(self, session: Session) -> None:
        """Running sequences must move to other workers if possible."""

    def dispatch_soon(self) -> None:
        """A dispatch decision may have changed."""


class WorkerIntake:
    """Tells the registry and the dispatcher which workers accept new work, and the load that they report.

    Args:
        dispatcher: has the workers' lanes.
        registry: counts the workers of each model.
        requests: moves requests off workers that evict them.
        expected: workers that have never been up.
        serving_changed: called when the first worker serves, and when the last one stops.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: ModelRegistry,
        requests: SequenceEvents,
        expected: ExpectedWorkers,
        serving_changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._requests = requests
        self._expected = expected
        self._serving_changed = serving_changed
        self._clock = clock

    def admit(self, session: Session) -> None:
        """Adds a worker to those of its model; logs how it differs from them."""
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
        self._expected.came_up(session.address)

    def withdraw(self, session: Session, lane_closes: Callable[[str, float], None]) -> None:
        """Removes a worker from those of its model and closes its lane with `lane_closes`."""
        with self._registry.watched(self._serving_changed):
            lane_closes(session.address, self._clock())
            self._registry.release(session.address)
        self._requests.dispatch_soon()

    def update(self, session: Session) -> None:
        """Applies a change of whether a worker accepts new work, by its own wish or by this router's."""
        accepting = session.worker_state is WorkerState.SERVING
        if accepting == session.accepting:
            return
        session.accepting = accepting
        if not accepting:
            self.withdraw(session, self._dispatcher.lane_draining)
            return
        with self._registry.watched(self._serving_changed):
            self.admit(session)
            self._dispatcher.lane_ready(session.address, self._clock())
        self._requests.dispatch_soon()

    def take_report(self, session: Session, load: wpb.Load, submit_seen: int) -> None:
        """Takes a worker's load and its cordon state."""
        self._dispatcher.report(session.address, load_report(load, submit_seen, self._clock()))
        cordon = cordon_of(load)
        if cordon is not session.cordon:
            session.cordon = cordon
            log.info(
                "worker intake changed", worker=session.address, worker_id=session.worker_id, intake=cordon.name.lower()
            )
            self.update(session)
            if cordon is CordonState.EVICTING:
                self._requests.hand_over(session)
        self._requests.dispatch_soon()

    def start_probation(self, worker: WorkerRecord, session: Session, now: float) -> None:
        """Limits a worker that died young several times in a row to PROBATION_SEQS sequences, for a while."""
        worker.history.came_up(session.instance_id, now)
        if not (seconds := worker.history.probation_s(now)):
            return

        def end() -> None:
            if worker.session is session:
                self._dispatcher.limit(session.address, None)
                self._requests.dispatch_soon()

        log.warning(
            "worker on probation",
            worker=session.address,
            worker_id=session.worker_id,
            seconds=round(seconds),
            why="it has died young each time lately",
        )
        self._dispatcher.limit(session.address, PROBATION_SEQS)
        asyncio.get_running_loop().call_later(seconds, end)


def cordon_of(load: wpb.Load) -> CordonState:
    """The cordon state that a worker reports."""
    return _CORDONS.get(load.intake, CordonState.OPEN)


def load_report(load: wpb.Load, submit_seen: int, now: float) -> LoadReport:
    """A worker's load as it arrived at `now`, monotonic seconds."""
    return LoadReport(
        time=now,
        decoding_seqs=load.decoding_seqs,
        waiting_seqs=load.waiting_seqs,
        waiting_tokens=counted(load.waiting_tokens),
        room_tokens=counted(load.room_tokens),
        room_seqs=load.room_seqs,
        last_prompt_latency_s=counted(load.last_prompt_latency_us) / 1e6,
        prefill_rate=rate(load.prefill_rate),
        memory_rate=rate(load.memory_rate),
        prefill_samples=load.prefill_samples,
        fleet_oldest_age_s=load.fleet_oldest_age_ms / 1e3,
        fleet_tokens=counted(load.fleet_tokens),
        submit_seen=submit_seen,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
    )
