"""A worker is registered completely or not at all, and is dialled while it is configured."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import LOST_SERIES_S
from common.process import tasks
from router.scheduling.failover import Loss
from router.workers import worker_pool
from router.workers.session import Fault, WorkerState
from tests.unit.router.pool import ADDRESS, Site


async def test_failed_worker_registration_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a log line raised after a lane was registered; the lane stayed, and its requests hung."""
    site = Site(monkeypatch)
    session = site.described()
    with monkeypatch.context() as broken:
        broken.setattr(worker_pool.log, "info", lambda *_, **__: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            site.pool.session_up(session, wpb.Welcome(instance_id="i"))
    site.pool.session_closed(session, Fault.VIOLATION)
    assert not site.registry.serving
    (known,) = site.pool.workers()
    assert (known.address, known.state, known.load) == (ADDRESS, WorkerState.UNCONNECTED, None)
    lanes = site.requests.lanes()
    assert lanes.idle + lanes.open + lanes.held == 0

    again = site.described()
    site.pool.session_up(again, wpb.Welcome(instance_id="i"))
    assert site.registry.serving
    assert site.told[-1] == "serving changed"
    await site.stop()


async def test_losses_of_departed_workers_are_forgotten_without_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    running, now = site.requests.running, time.monotonic()
    monkeypatch.setattr(running, "_clock", lambda: now)
    for worker_id in ("w", "replaced"):
        running.lost.add(worker_id, Loss.DRAINED)

    def leave() -> None:
        session = site.up()
        site.pool.session_down(session, Fault.SHUTDOWN, "it ends")
        site.pool.session_closed(session, Fault.SHUTDOWN)

    leave()
    now += LOST_SERIES_S - 1
    leave()
    assert running.lost.counts == {("w", "drained"): 1, ("replaced", "drained"): 1}
    now += 1
    leave()
    assert running.lost.counts == {("w", "drained"): 1}
    await site.stop()


async def test_failed_connection_task_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the task that dials a worker ended, and the worker was never dialled again."""
    monkeypatch.setattr(tasks, "TASK_RESTART_S", 0.001)
    site = Site(monkeypatch)
    dials = asyncio.Semaphore(0)

    async def fails(*_: Any) -> None:
        dials.release()
        raise RuntimeError

    monkeypatch.setattr(worker_pool, "keep_connected", fails)
    site.pool.set_workers([ADDRESS, "127.0.0.1:2"])
    async with asyncio.timeout(60):
        for _ in range(3):
            await dials.acquire()
    assert [worker.address for worker in site.pool.workers()] == [ADDRESS, "127.0.0.1:2"]
    await site.stop()


async def test_worker_readded_before_up_is_not_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    session = site.described()
    site.pool.set_workers([])
    site.pool.set_workers([ADDRESS])
    site.pool.session_up(session, wpb.Welcome(instance_id="i"))
    (known,) = site.pool.workers()
    assert known.state is WorkerState.SERVING
    site.pool.set_workers([])
    assert session.is_leaving
    assert not site.registry.serving
    await site.stop()
