"""Sessions that end: leases, closed and renewed streams, drains."""

from __future__ import annotations

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from tests.unit.worker.session.support import (
    long_prompt,
    record,
    simulated_runner,
    submit,
)
from tests.unit.worker.session.world import Router, Stream, World, run


def test_lease_starts_at_last_frame() -> None:
    world = World()
    router = world.router(lease_ms=400)
    world.now += 0.3
    router.write(wpb.SessionRequest(lane=wpb.Lane()))
    assert router.state.lease_left(world.now) == pytest.approx(0.4)
    world.now += 0.4
    assert router.state.lease_left(world.now) <= 0


def test_closing_session_cancels_all_without_messages() -> None:
    world = World()
    gone, other = world.router(), world.router()
    gone.write(wpb.SessionRequest(lane=wpb.Lane(oldest_age_ms=500, tokens=70, seqs=3)))
    gone.write(submit(1, record(1, range(100), max_tokens=500)))
    other.write(submit(1, record(1, [9, 9], max_tokens=20)))
    run(world, gone, other, steps=3)
    assert other.load.fleet_tokens == 70
    gone.state.close()
    gone.sequences.end()
    assert world.tracing.open_spans() == 2
    run(world, other)
    assert not world.engine.deliveries
    assert world.tracing.open_spans() == 0
    # Rids of two routers may be equal.
    assert other.streams[1].tokens[2:] == simulated_runner().reference([9, 9], 20, seed=1)
    world.now += 1
    other.read()
    assert (other.load.fleet_tokens, other.load.fleet_oldest_age_ms) == (0, 0)


def test_new_stream_continues_from_router_positions() -> None:
    world = World()
    router = world.router()
    router.write(submit(5, *(record(rid, [rid], max_tokens=20) for rid in range(1, 6)), record(6, [6], max_tokens=2)))
    run(world, router, steps=4)
    assert router.reasons() == {6: wpb.END_REASON_LENGTH}
    old = router.state
    lost = router.streams.pop(5)
    # The end of 6 did not arrive after all, and a token of 1 neither.
    del router.streams[1].tokens[-1]
    router.streams[6].tokens.pop()
    router.streams[6].end = None
    for rid in (1, 6):
        router.streams[rid].start = None if len(router.streams[rid].tokens) == 1 else router.streams[rid].start
    old.close()
    router.sequences.detach(world.now + 5)
    router.dial({rid: len(stream.tokens) for rid, stream in router.streams.items()} | {99: 4})
    old.receive(wpb.SessionRequest(cancel=wpb.Cancel(rids=[1, 2, 3])), world.now)
    assert old.next_frame(world.now + 9) is None
    router.write(submit(1, record(7, [7], max_tokens=3), record(6, [6])))
    run(world, router)
    assert router.unknown == [99]
    assert router.submit_seen == 1
    assert lost.end is None
    runner = simulated_runner()
    for rid, count in {1: 20, 2: 20, 3: 20, 4: 20, 6: 2, 7: 3}.items():
        assert router.streams[rid].tokens[1:] == runner.reference([rid], count, seed=rid)
        assert router.reasons()[rid] == wpb.END_REASON_LENGTH
    assert not world.engine.deliveries
    assert world.tracing.open_spans() == 0
    # Ended and sent: only a Hello, a Cancel or the end of the lease lets them go (S6).
    assert router.sequences.knows(1)
    router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=[1])))
    assert not router.sequences.knows(1)
    router.dial({})
    assert router.sequences.is_empty


def test_unresumable_sequence_is_unknown_and_ends() -> None:
    world = World()
    router = world.router()
    router.write(submit(1, record(1, [1], max_tokens=50), record(2, [2], max_tokens=50)))
    run(world, router, steps=3)
    router.dial({1: 400, 2: 1})
    router.streams[2] = Stream([2])
    run(world, router)
    assert router.unknown == [1]
    made = router.streams[2].tokens[1:]
    assert len(made) > 30
    assert made == simulated_runner().reference([2], len(made), seed=2)
    assert world.engine.core.load().decoding_seqs == 1


def test_draining_worker_returns_new_and_finishes_running() -> None:
    world = World()
    router = world.router()
    unfinished, rest = long_prompt(2, range(200), cut=100)
    router.write(submit(1, record(1, max_tokens=5)))
    router.write(submit(2, unfinished))
    router.state.drain(world.now + 5)
    router.write(wpb.SessionRequest(extend=rest))
    router.write(submit(3, record(3), record(4)))
    run(world, router)
    assert router.frames[1] == "draining"
    assert router.reasons() == {1: wpb.END_REASON_LENGTH}
    assert sorted(router.returned) == [2, 3, 4]


def test_long_waiting_sequence_is_returned_unless_kept() -> None:
    world = World()
    router = world.router()
    router.write(submit(1, *(record(rid, [rid], max_tokens=90) for rid in range(1, 33))))
    run(world, router, steps=2)
    router.write(submit(2, record(50), record(51, keep=True), record(52)))
    run(world, router, steps=23)
    assert router.returned == []
    run(world, router, steps=4)
    assert router.returned == [50, 52]
    assert router.reasons() == {}
    run(world, router, steps=100)
    assert router.reasons()[51] == wpb.END_REASON_LENGTH
    assert len(router.reasons()) == 33
    assert not world.engine.deliveries
    assert world.tracing.open_spans() == 0


def full_world() -> tuple[World, Router]:
    """A worker with a full running set and two more sequences."""
    world = World()
    router = world.router()
    router.write(submit(1, *(record(rid, [rid], max_tokens=500) for rid in range(32))))
    run(world, router, steps=3)
    router.write(submit(2, record(50), record(51)))
    run(world, router, steps=1)
    return world, router


def test_drain_end_returns_unstarted_and_cancels_running() -> None:
    world, router = full_world()
    router.state.drain(world.now)
    world.engine.end_all("drained")
    run(world, router, steps=1)
    assert set(router.reasons().values()) == {wpb.END_REASON_CANCELLED}
    assert len(router.reasons()) == 32
    assert sorted(router.returned) == [50, 51]


def test_cancelled_sequence_is_not_returned_at_drain_end() -> None:
    """Cancels arrive in the same turn in which all sequences end."""
    world, router = full_world()
    router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=[3, 50])))
    world.engine.end_all("drained")
    run(world, router, steps=1)
    assert sorted(router.returned) == [51]
    assert set(router.reasons().values()) == {wpb.END_REASON_CANCELLED}
    assert len(router.reasons()) == 33
