"""Snapshots of a router are made on its event loop, when a thread reads them."""

from __future__ import annotations

import asyncio
import itertools
import threading

from common.limits import FIGURES_EVERY_S
from common.telemetry.failures import failures
from router.telemetry.router_snapshot import NewestSnapshot, RouterSnapshot


class Source:
    """Makes numbered snapshots, and notes the threads on which it did."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def make(self) -> RouterSnapshot:
        self.threads.append(threading.get_ident())
        return RouterSnapshot(in_flight=len(self.threads))


async def read(newest: NewestSnapshot) -> int:
    return (await asyncio.to_thread(newest.read)).in_flight


def seconds_apart() -> NewestSnapshot:
    """Snapshots for readers that are far apart by their clock."""
    return NewestSnapshot(itertools.count(step=10 * FIGURES_EVERY_S).__next__)


async def test_snapshot_is_made_on_the_loop_for_each_reader() -> None:
    newest, source = seconds_apart(), Source()
    newest.start(source.make)
    await asyncio.sleep(0)
    assert source.threads == []
    # A reader whose thread gets no processor in time has the snapshot before.
    while await read(newest) < 3:
        pass
    assert set(source.threads) == {threading.get_ident()}


async def test_readers_at_one_moment_share_a_snapshot() -> None:
    newest, source = NewestSnapshot(lambda: 5.0), Source()
    newest.start(source.make)
    while not await read(newest):
        pass
    assert [await read(newest) for _ in range(5)] == [1] * 5


async def test_busy_loop_leaves_its_readers_the_last_snapshot() -> None:
    newest, source, has_read = seconds_apart(), Source(), threading.Event()
    newest.start(source.make)
    found: list[int] = []

    def look() -> None:
        found.extend(newest.read().in_flight for _ in range(3))
        has_read.set()

    thread = threading.Thread(target=look)
    thread.start()
    # Holds the loop until the readers have their answers.
    assert has_read.wait(60)
    thread.join()
    assert found == [0, 0, 0]
    while not await read(newest):
        pass


async def test_failed_snapshot_is_counted_and_leaves_the_last_one() -> None:
    newest, before = seconds_apart(), failures().get("metrics", 0)
    newest.start(lambda: RouterSnapshot(in_flight=1 // 0))
    assert await read(newest) == 0
    while failures().get("metrics", 0) < before + 2:
        await read(newest)


async def test_stopped_router_makes_one_last_snapshot() -> None:
    newest, source = seconds_apart(), Source()
    newest.start(source.make)
    newest.stop()
    assert [await read(newest) for _ in range(3)] == [1, 1, 1]
    assert newest.read().in_flight == 1
