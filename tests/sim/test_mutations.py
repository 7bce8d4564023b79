"""Every mutation of the protocol's random simulator, applied to our objects: the simulated service notices each.

Two mutations are harmless (no acknowledgement kept, no instance id), which is tested the other way round. Two
more cannot happen on these wires, because a finish rides with its last token (S3) and a rewind goes exactly to what
the router has (S4): the objects are asked directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.telemetry.tracing import SpanFactory
from common.text.answer_text import AnswerText
from router.answers.stream_assembly import StreamAssembly
from router.requests.running import RunningRequests
from router.workers.worker_pool import WorkerPool
from tests.sim.service import SimService
from tests.sim.test_scenario import Scenario, lived
from tests.sim.virtual_time import run
from tests.unit.mutants import Mutant, assert_noticed
from tests.unit.worker.session.support import FACTS, SteppedEngine, record, simulated_core, submit
from worker.engine.lifecycle import Lifecycle
from worker.session.fleet_backlog import FleetLanes
from worker.session.outbox import Outbox
from worker.session.router_state import RouterSequences
from worker.session.session import WorkerSession

SEEDS = range(3)


def breaking(seed: int) -> None:
    lived(Scenario(seed, breaks=8, crashes=seed % 2, lease_s=1.0))


def killed_router(seed: int) -> None:
    """The router dies with everything running; the workers are empty a lease later."""
    scenario = Scenario(seed)

    async def life() -> None:
        service = SimService(scenario.loop, scenario.rnd, lease_s=0.3)
        await asyncio.sleep(0.2)
        clients = [asyncio.create_task(scenario.client(service, i)) for i in range(60)]
        await asyncio.sleep(1.0)
        service.kill_router()
        for client in clients:
            client.cancel()
        await asyncio.sleep(0.1)
        assert any(worker.num_live for worker in service.workers)
        await asyncio.sleep(0.4)
        service.check_workers_idle()
        assert not any(worker.routers for worker in service.workers), "leak"

    run(scenario.loop, life())


def ended_before(_: int) -> None:
    """A stream that had ended is submitted again: it ends at once, without another token (S5)."""
    full = record(1, [5, 6, 7], max_tokens=2)
    stopped = record(1, [5, 6, 7], max_tokens=9)
    stopped.params.stop_token_ids.append(9)
    for resumed, reason in ((full, wpb.END_REASON_LENGTH), (stopped, wpb.END_REASON_STOP_TOKEN)):
        assert ends_of_resumed(resumed, [8, 9]) == [(5, reason)]


def ends_of_resumed(resumed: wpb.SubmitSequence, answer: list[int]) -> list[tuple[int, int]]:
    """Positions and reasons of the ends in the first frame after a sequence submitted with an answer."""
    now = 1000.0
    engine = SteppedEngine(simulated_core(clock=lambda: now), lambda: now)
    sequences = RouterSequences("r", FACTS, engine, SpanFactory())
    hello = wpb.Hello(router_id="r", lease_ms=5000)
    state = WorkerSession(hello, sequences, FACTS, engine, FleetLanes(), now, lambda: None)
    resumed.token_ids.extend(answer)
    state.receive(submit(1, resumed), now)
    engine.step()
    assert state.next_frame(now)
    frame = state.next_frame(now)
    assert frame is not None
    assert not frame.step_output.token_ids
    return [(end.end_pos, end.reason) for end in frame.step_output.ends]


def repeated(_: int) -> None:
    """Tokens that the router has already are not appended again (S2)."""
    assembly = StreamAssembly(3, text=AnswerText(None))
    for first_pos, tokens in ((3, [1, 2]), (3, [1, 2]), (4, [2]), (5, [3])):
        assembly.append(first_pos, tokens, 0.0)
    assert list(assembly.token_ids) == [1, 2, 3]


CAUGHT = [
    (Mutant("reuserid", RunningRequests, "_begin", "next(self._counter)", "(next(self._counter) % 6)"), breaking),
    (
        Mutant("keeporphans", RouterSequences, "attach", "if rid not in have", "if False"),
        breaking,
    ),
    (Mutant("nounknown", WorkerSession, "_welcome", "unknown=self._unknown", "unknown=[]"), breaking),
    (Mutant("noresend", Outbox, "rewind", "run.sent = have - run.first_pos", "pass"), breaking),
    (Mutant("nofence", WorkerSession, "close", "self.is_closed = True", "pass"), breaking),
    (
        Mutant(
            "nolease",
            RouterSequences,
            "end",
            "self._engine.cancel([active.seq.id for active in self._active.values()])",
            "pass",
        ),
        killed_router,
    ),
    (
        Mutant("nostopcheck", Lifecycle, "enter", "stop = self._stop_rules.check(seq)", "stop = None"),
        ended_before,
    ),
    (Mutant("nodedup", StreamAssembly, "append", "first_pos < self.num_tokens", "False"), repeated),
]
HARMLESS = [
    Mutant("noack", Outbox, "_keep_tail", "run.end is not None and run.end.reason == wpb.END_REASON_CANCELLED", "True"),
    Mutant("noinst", WorkerPool, "session_opening", "worker.held.instance_id != session.instance_id", "False"),
]


@pytest.mark.parametrize("life", [breaking, killed_router, ended_before, repeated])
def test_protocol_rules_hold_in_random_runs(life: Callable[[int], None]) -> None:
    for seed in SEEDS:
        life(seed)


@pytest.mark.parametrize(("mutant", "life"), CAUGHT, ids=[mutant.trap for mutant, _ in CAUGHT])
def test_mutation_is_detected(mutant: Mutant, life: Callable[[int], None]) -> None:
    assert_noticed(mutant, life, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", HARMLESS, ids=[mutant.trap for mutant in HARMLESS])
def test_harmless_mutation_stays_undetected(mutant: Mutant) -> None:
    with mutant.applied():
        for seed in SEEDS:
            breaking(seed)
