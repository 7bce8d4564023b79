"""OrphanTable: bounded, expires with the lease, gives each key once, and lets adopters wait briefly."""

from __future__ import annotations

import asyncio

import pytest

from router.workers.orphans import OrphanTable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_orphan_key_is_taken_once_within_lease() -> None:
    clock = Clock()
    table = OrphanTable(clock)
    table.add("w0", [b"a", b"b"], 5.0)
    table.add("w1", [b"b"], 5.0)
    assert table.knows(b"a")
    assert [table.take(key) for key in (b"a", b"a", b"b", b"c")] == ["w0", "", "w1", ""]
    table.add("w0", [b"d"], 5.0)
    clock.now += 5.0
    assert not table.knows(b"d")
    assert table.take(b"d") == ""


def test_orphan_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.orphans.MAX_ORPHANS", 3)
    clock = Clock()
    table = OrphanTable(clock)
    table.add("w0", [b"1", b"2", b"3", b"4"], 5.0)
    assert [table.knows(key) for key in (b"1", b"2", b"3", b"4")] == [False, True, True, True]
    clock.now += 6.0
    table.add("w0", [b"5"], 5.0)
    assert len(table) == 1


async def test_early_adopter_waits_for_all_keys() -> None:
    clock = Clock()
    table = OrphanTable(clock)
    waiting = asyncio.create_task(table.wait_for([b"a", b"", b"b"], 60.0))
    for key in (b"x", b"a"):
        await asyncio.sleep(0)
        table.add("w0", [key], 5.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    table.add("w0", [b"b"], 5.0)
    await waiting
    await table.wait_for([b"a", b"b"], 0.0)
    await table.wait_for([b"missing"], 0.001)
