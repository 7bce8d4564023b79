"""Two routers over the same workers, streams that break, frames that are lost, workers that die: in the end each router
knows exactly what each worker's prefix cache holds. Every mutation of that part of the protocol is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.params.sampling_params import SamplingParams
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.placement import PrefixAware
from router.workers.session import Fault
from router.workers.worker_caches import KvEventCursor, WorkerCaches
from tests.sim.service import MAX_MODEL_LEN, SimService
from tests.sim.test_scenario import Outcome, Scenario
from tests.sim.virtual_time import run
from tests.unit.mutants import Mutant, assert_noticed
from worker.session import cache_events
from worker.session.cache_events import KvCursor, KvLog

SEEDS = range(2)
NUM_REQUESTS = 10


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots of several frames."""
    monkeypatch.setattr(cache_events, "MAX_KV_FRAME_CHANGES", 8)


def two_routers(scenario: Scenario, num_workers: int) -> tuple[SimService, SimService]:
    """A block is one token, so that there are many granules."""
    made: list[SimService] = []
    for _ in range(2):
        service = SimService(
            scenario.loop,
            scenario.rnd,
            num_workers=num_workers,
            num_blocks=320,
            block_size=1,
            placement=PrefixAware(1 << 12),
            other=made[0] if made else None,
            worker_wait_s=20.0,
        )
        made.append(service)
    return made[0], made[1]


class TwoRouters(Scenario):
    """One life of two routers and their clients."""

    async def live(self) -> SimService:
        a, b = two_routers(self, num_workers=2)
        await asyncio.sleep(0.2)
        clients = [asyncio.create_task(self.client(a if i % 3 else b, i)) for i in range(NUM_REQUESTS)]
        for fault in [a.break_connection, b.break_connection] * self.breaks + [a.crash] * self.crashes:
            self.loop.call_later(self.rnd.uniform(0.2, 2.5), fault, self.rnd.randrange(2))
        for router in [a, b] * self.replacements:
            self.loop.call_later(self.rnd.uniform(0.2, 2.5), router.replace_placement)
        for freeze in [a.freeze] * self.freezes:
            self.loop.call_later(self.rnd.uniform(0.2, 2.5), freeze, self.rnd.randrange(2))
        a.kv_loss = b.kv_loss = self.kv_loss
        _, hanging = await asyncio.wait(clients, timeout=60)
        assert not hanging, "hang"
        a.kv_loss = b.kv_loss = 0.0
        # A change after the last loss, which otherwise would stay undetected.
        self.prefixes = [self.tokens(60) for _ in range(6)]
        await asyncio.gather(*(self.client(a, NUM_REQUESTS + i) for i in range(6)))
        await asyncio.sleep(12)
        a.check_nothing_left()
        b.check_nothing_left()
        self.gaps = a.kv_gaps + b.kv_gaps
        return a

    kv_loss = 0.0
    replacements = 0
    gaps = 0

    async def client(self, service: SimService, i: int) -> None:
        prompt = self.prefixes[i % len(self.prefixes)][: self.rnd.randrange(20, 120)] + self.tokens(
            self.rnd.randrange(1, 30)
        )
        params = SamplingParams(max_tokens=self.rnd.randrange(1, min(60, MAX_MODEL_LEN - len(prompt))))
        self.outcomes.append(outcome := Outcome(prompt, params, seed=i))
        await asyncio.sleep(self.rnd.uniform(0, 1.5))
        await self.ask(service, outcome, None)


def lived(scenario: TwoRouters) -> TwoRouters:
    service = run(scenario.loop, scenario.live())
    scenario.check_outcomes(service)
    return scenario


def quiet(seed: int) -> None:
    assert lived(TwoRouters(seed)).gaps == 0


def breaking(seed: int) -> None:
    assert lived(TwoRouters(seed, breaks=4)).gaps == 0


def replacing(seed: int) -> None:
    """A placement with an empty index gets the whole cache on the open streams."""
    scenario = TwoRouters(seed)
    scenario.replacements = 3
    assert lived(scenario).gaps == 0


def replacing_and_breaking(seed: int) -> None:
    scenario = TwoRouters(seed, breaks=4)
    scenario.replacements = 6
    assert lived(scenario).gaps == 0


def replacing_in_the_middle(seed: int) -> None:
    """Between Hello and Welcome, in the middle of a snapshot, while a worker takes no work, and with an empty cache."""
    scenario = TwoRouters(seed)

    async def life() -> None:
        a, b = two_routers(scenario, num_workers=1)
        await asyncio.sleep(0.2)
        a.replace_placement()
        for i in range(4):
            await scenario.client(a, i)
        await asyncio.sleep(0.5)
        for wait_s in (0.0, 0.001, 0.02, 0.08, 0.12):
            b.connections[0].end(Fault.BROKEN)
            b.redial(b.connections[0])
            await asyncio.sleep(wait_s)
            b.replace_placement()
            await asyncio.sleep(wait_s)
            b.replace_placement()
            await asyncio.sleep(3)
            b.check_index()
        b.workers[0].set_intake(wpb.INTAKE_CORDONED)
        await asyncio.sleep(0.2)
        b.replace_placement()
        await asyncio.sleep(1)
        b.workers[0].set_intake(wpb.INTAKE_OPEN)
        # The next stream continues after the snapshot and its later changes.
        b.connections[0].end(Fault.BROKEN)
        b.redial(b.connections[0])
        await scenario.client(a, 4)
        await asyncio.sleep(1)
        for router in (a, b):
            router.check_index()
            assert router.kv_gaps == 0

    run(scenario.loop, life())


def losing(seed: int) -> None:
    """Frames lost on an open stream: TCP prevents this, but a bug may cause it."""
    scenario = TwoRouters(seed, breaks=1)
    scenario.kv_loss = 0.1
    assert lived(scenario).gaps > 0


def dying(seed: int) -> None:
    lived(TwoRouters(seed, breaks=1, crashes=1 + seed % 2, freezes=seed % 2))


def restarted(seed: int) -> None:
    """A disconnected router did not see the worker die. The new worker has an empty or a full cache."""
    scenario = TwoRouters(seed)

    async def life() -> None:
        a, b = two_routers(scenario, num_workers=1)
        await asyncio.sleep(0.2)
        await scenario.client(a, 0)
        await asyncio.sleep(0.5)
        b.check_index()
        b.connections[0].end(Fault.BROKEN)
        a.routers.remove(b)
        a.crash(0)
        await asyncio.sleep(2.5)
        if seed % 2:
            for i in range(3):
                await scenario.client(a, i + 1)
            b.redial(b.connections[0])
            # The stream breaks again within the snapshot.
            await asyncio.sleep(0.08)
            b.connections[0].end(Fault.BROKEN)
        b.redial(b.connections[0])
        await asyncio.sleep(3)
        a.check_index()
        b.check_index()

    run(scenario.loop, life())


def losing_a_piece(seed: int) -> None:
    """Frames in the middle of a snapshot are lost, to a router that was away for long."""
    scenario = TwoRouters(seed)

    async def life() -> None:
        a, b = two_routers(scenario, num_workers=1)
        await asyncio.sleep(0.2)
        b.connections[0].end(Fault.BROKEN)
        for i in range(5):
            await scenario.client(a, i)
        b.redial(b.connections[0])
        await asyncio.sleep(0.08)
        b.kv_loss = 1.0
        await asyncio.sleep(0.06)
        b.kv_loss = 0.0
        scenario.prefixes = [scenario.tokens(60)]
        await scenario.client(a, 5)
        await asyncio.sleep(3)
        a.check_index()
        b.check_index()

    run(scenario.loop, life())


CAUGHT: list[tuple[Mutant, Callable[[int], None]]] = [
    (Mutant("noresync", KvCursor, "_take_frame", " or not self._log.remembers(self._seq)", ""), breaking),
    (Mutant("noseqcheck", KvEventCursor, "_continues", "events.after != self._seq", "False"), losing),
    (Mutant("wrongseq", KvCursor, "_take_changes", "frame.seq = self._seq", "frame.seq = self._seq + 1"), quiet),
    (Mutant("oldinstance", KvEventCursor, "goes_on_with", "instance_id == self._instance_id and ", ""), restarted),
    (
        Mutant(
            "notforgotten", WorkerCaches, "opening", "self._assignment.placement.cache_gone(session.address)", "pass"
        ),
        restarted,
    ),
    (Mutant("noevicted", PrefixAware, "cache_changed", "if change.evicted:", "if False:"), quiet),
    (Mutant("notanew", PrefixAware, "cache_changed", "if change.anew:", "if False:"), breaking),
    (Mutant("halfsnapshot", KvEventCursor, "accept", "events.seq, events.left", "events.seq, 0"), breaking),
    (Mutant("piecelost", KvEventCursor, "_continues", "self._left == (", "0 == 0 * ("), losing_a_piece),
    (Mutant("halfforgotten", KvEventCursor, "seq", "0 if self._left else self._seq", "self._seq"), restarted),
    (Mutant("numbersslip", KvLog, "append", "self._forgotten += ", "self._forgotten = "), breaking),
    (
        Mutant("changesdropped", KvCursor, "_take_changes", "self._seq += len(changes)", "self._seq = self._log.seq"),
        quiet,
    ),
    (Mutant("notasked", WorkerCaches, "learn_anew", "self._ask(session)", "pass"), replacing),
    (Mutant("notforgotten2", WorkerCaches, "learn_anew", "cursor.reset()", "pass"), replacing_in_the_middle),
    (Mutant("askednever", WorkerCaches, "welcomed", "self._ask(session)", "pass"), replacing_in_the_middle),
    (
        Mutant(
            "noanswer",
            KvCursor,
            "restart",
            "self._needs_snapshot, self._left = epoch, True,",
            "self._needs_snapshot, self._left = epoch, False,",
        ),
        replacing,
    ),
    (
        Mutant("piecesgoon", KvCursor, "restart", "epoch, True, None", "epoch, True, self._left"),
        replacing_in_the_middle,
    ),
    (Mutant("outdated", KvEventCursor, "accept", "return Continuity.OUTDATED", "pass"), replacing),
    (
        Mutant("asksoutlast", KvEventCursor, "open", "self._epoch, self._awaits = 0, False", "pass"),
        replacing_in_the_middle,
    ),
    (
        Mutant(
            "cordonedunknown",
            Dispatcher,
            "configure",
            "placement.lane_up(lane)",
            "lane.ready and placement.lane_up(lane)",
        ),
        replacing_in_the_middle,
    ),
]
LIVES = [
    quiet,
    breaking,
    replacing,
    replacing_and_breaking,
    replacing_in_the_middle,
    losing,
    losing_a_piece,
    dying,
    restarted,
]
# The worker sends a snapshot, which is only dearer.
HARMLESS = [
    Mutant("nokvseq", WorkerCaches, "opening", "session.state.know_cache(cursor.seq)", "session.state.know_cache(0)")
]


@pytest.mark.parametrize("life", LIVES)
def test_each_router_index_converges_to_cache_contents(life: Callable[[int], None]) -> None:
    for seed in SEEDS:
        life(seed)


@pytest.mark.parametrize(("mutant", "life"), CAUGHT, ids=[mutant.trap for mutant, _ in CAUGHT])
def test_mutation_is_detected(mutant: Mutant, life: Callable[[int], None]) -> None:
    assert_noticed(mutant, life, SEEDS)


@pytest.mark.parametrize("mutant", HARMLESS, ids=[mutant.trap for mutant in HARMLESS])
def test_harmless_mutation_stays_undetected(mutant: Mutant) -> None:
    with mutant.applied():
        for seed in SEEDS:
            breaking(seed)
