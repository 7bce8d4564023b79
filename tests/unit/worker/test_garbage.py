"""The collector of cyclic garbage in a worker's process: rules alone, and with an engine that makes cycles."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import dataclass, field

import pytest

from tests.unit.worker.session.support import CONFIG, submit_group
from tests.unit.worker.session.test_engine_loop import Listener, WatchedRunner, sequence
from worker import garbage
from worker.engine import core
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.garbage import (
    BUSY_FULL_S,
    IDLE_FULL_S,
    MIDDLE_PER_FULL,
    YOUNG_ALLOCATIONS,
    YOUNG_PER_MIDDLE,
    CollectionPolicy,
    Generation,
)
from worker.session.engine_loop import EngineLoop


class TestPolicy:
    def test_collection_waits_for_enough_allocations(self) -> None:
        policy = CollectionPolicy(0.0)
        assert policy.due(YOUNG_ALLOCATIONS - 1, 1.0, idle=False) is None
        assert policy.due(YOUNG_ALLOCATIONS, 1.0, idle=False) is Generation.YOUNG

    def test_busy_engine_reaches_full_collection_by_growth(self) -> None:
        policy = CollectionPolicy(0.0)
        kinds = [policy.due(YOUNG_ALLOCATIONS, 1.0, idle=False) for _ in range(2000)]
        per_full = (YOUNG_PER_MIDDLE + 1) * MIDDLE_PER_FULL
        assert kinds[: YOUNG_PER_MIDDLE + 1] == [*[Generation.YOUNG] * YOUNG_PER_MIDDLE, Generation.MIDDLE]
        assert [i for i, kind in enumerate(kinds) if kind is Generation.FULL][:2] == [per_full, 2 * per_full + 1]
        assert per_full * YOUNG_ALLOCATIONS == 300_000

    def test_busy_engine_reaches_full_collection_in_time(self) -> None:
        policy = CollectionPolicy(100.0)
        assert policy.due(0, 100.0 + BUSY_FULL_S - 1, idle=False) is None
        assert policy.due(0, 100.0 + BUSY_FULL_S, idle=False) is Generation.FULL
        assert policy.due(0, 101.0 + BUSY_FULL_S, idle=False) is None

    def test_idle_engine_runs_full_collections_periodically(self) -> None:
        policy = CollectionPolicy(0.0)
        kinds = [policy.due(10, 0.5 * i, idle=True) for i in range(1, 61)]
        assert kinds.count(Generation.FULL) == int(30 / IDLE_FULL_S)
        assert set(kinds) == {None, Generation.FULL}

    def test_idle_full_collections_keep_minimum_interval(self) -> None:
        policy = CollectionPolicy(0.0)
        assert policy.due(YOUNG_ALLOCATIONS, 0.5, idle=True) is Generation.YOUNG


class Node:
    """One of a pair that hold each other."""

    def __init__(self) -> None:
        self.other = self


@dataclass
class Cycles(WatchedRunner):
    """Leaves reference cycles in each step, and records how many exist."""

    made: list[weakref.ref[Node]] = field(default_factory=list)
    most: int = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.made += [weakref.ref(Node()) for _ in range(500)]
        self.most = max(self.most, self.alive)
        return super().forward(batch)

    @property
    def alive(self) -> int:
        """Cycles that have not been freed."""
        return sum(node() is not None for node in self.made)


async def test_busy_engine_frees_cycles_between_steps() -> None:
    """Without the automatic collector their number must not grow while the engine has work."""
    engine, runner, listener = EngineLoop(), Cycles(), Listener()
    engine.start(lambda: EngineCore(CONFIG, runner))
    await asyncio.wait_for(engine.wait_started(), 60)
    assert not gc.isenabled()
    submit_group(engine, listener, 1, [sequence(max_tokens=100)])
    await asyncio.wait_for(engine.wait_idle(), 60)
    engine.stop()
    assert engine.join(60)
    assert gc.isenabled()
    assert len(runner.made) == 100 * 500
    assert runner.most <= 2 * YOUNG_ALLOCATIONS


@pytest.mark.slow
async def test_idle_engine_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage of a burst is freed after the burst."""
    monkeypatch.setattr(core, "_IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(garbage, "IDLE_FULL_S", 0.05)
    monkeypatch.setattr(garbage, "YOUNG_ALLOCATIONS", 10**9)
    engine, runner, listener = EngineLoop(), Cycles(), Listener()
    engine.start(lambda: EngineCore(CONFIG, runner))
    await asyncio.wait_for(engine.wait_started(), 60)
    submit_group(engine, listener, 1, [sequence(max_tokens=5)])
    await asyncio.wait_for(engine.wait_idle(), 60)
    async with asyncio.timeout(60):
        while runner.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    engine.stop()
    assert engine.join(60)


async def test_failed_engine_restores_automatic_collector() -> None:
    engine = EngineLoop()
    engine.start(lambda: EngineCore(CONFIG, WatchedRunner(fail=True)))
    await asyncio.wait_for(engine.wait_started(), 60)
    submit_group(engine, Listener(), 1, [sequence()])
    await asyncio.wait_for(engine.wait_failed(), 60)
    assert engine.join(60)
    assert gc.isenabled()
