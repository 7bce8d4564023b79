"""Unfinished groups of all Sessions have one bound; the Sessions that hold much are closed."""

from __future__ import annotations

import random

import pytest

from common.limits import MAX_ALL_ASSEMBLING_BYTES, MAX_ASSEMBLING_BYTES, MAX_FRAME_BYTES
from worker.session.fleet_backlog import AssemblyRoom


@pytest.mark.parametrize("seed", range(20))
def test_all_sessions_share_one_memory_bound(seed: int) -> None:
    """128 MiB per Session do not bound the memory of many Sessions."""
    rnd, room = random.Random(seed), AssemblyRoom()
    held: dict[int, int] = {}
    silent: set[int] = set()
    highest = 0
    for _ in range(5000):
        session = rnd.randrange(rnd.choice([3, 300]))
        if session in silent:
            continue
        held[session] = min(MAX_ASSEMBLING_BYTES, held.get(session, 0) + rnd.randrange(8 * MAX_FRAME_BYTES))
        room.hold(session, held[session])
        highest = max(highest, sum(held.values()))
        if room.must_go(session):
            room.hold(session, held.pop(session))
            room.hold(session, 0)
        elif rnd.random() < 0.01:
            silent.add(session)
    assert MAX_ALL_ASSEMBLING_BYTES < highest < 1.5 * MAX_ALL_ASSEMBLING_BYTES + 8 * MAX_FRAME_BYTES


def test_session_with_small_share_stays() -> None:
    room = AssemblyRoom()
    for session in range(1, 4):
        room.hold(session, MAX_ASSEMBLING_BYTES)
    room.hold(0, MAX_FRAME_BYTES)
    assert [room.must_go(session) for session in range(4)] == [False, True, True, True]
    room.hold(1, 0)
    room.hold(2, 0)
    assert not room.must_go(3)
