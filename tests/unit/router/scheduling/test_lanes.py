"""LaneAgenda: lanes that changed or are due, each once. LaneTable: lanes for each half of a request's work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from common.delay_gate import DelayGate
from common.wire.block_hash import GRANULE_BLOCKS
from common.wire.protocol import DECODE_FEATURE, PREFILL_FEATURE
from router.scheduling.lane import Lane, LaneKind
from router.scheduling.lanes import LaneAgenda, LaneTable
from router.scheduling.placement import PLACEMENTS, CacheChange, LeastLoad
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import chain, make_dispatcher, make_lane, request


def test_lane_agenda_takes_due_lanes_first_and_once() -> None:
    a, b, c = (make_lane(name, "m", LoadReport(0.0)) for name in "abc")
    agenda = LaneAgenda()
    agenda.set_time(a, 2.0)
    agenda.set_time(b, 1.0)
    agenda.add([c, a])
    assert agenda.next_time() == 1.0
    assert list(agenda.take(2.0)) == [b, a, c]
    assert (agenda.next_time(), list(agenda.take(9.0))) == (None, [])
    agenda.set_time(a, 3.0)
    agenda.touch(b)
    agenda.forget(a)
    agenda.forget(b)
    assert (agenda.next_time(), list(agenda.take(9.0))) == (None, [])


def test_random_times_against_a_table() -> None:
    rnd = random.Random(1)
    lanes = [make_lane(str(i), "m", LoadReport(0.0)) for i in range(20)]
    agenda, known = LaneAgenda(), dict[Lane, float]()
    for _ in range(3000):
        lane, at = rnd.choice(lanes), rnd.choice([None, rnd.uniform(0, 100)])
        agenda.set_time(lane, at)
        known.pop(lane, None)
        if at is not None:
            known[lane] = at
        assert agenda.next_time() == min(known.values(), default=None)
        if rnd.random() < 0.05:
            now = rnd.uniform(0, 30)
            due = {lane for lane, at in known.items() if at <= now}
            assert set(agenda.take(now)) == due
            known = {lane: at for lane, at in known.items() if lane not in due}
    # Entries of removed lanes do not accumulate.
    assert len(agenda._heap) <= 2 * len(lanes) + 65


@pytest.mark.parametrize(
    ("roles", "new", "continued"),
    [
        ("pdb", "p", "d"),
        ("pb", "p", "b"),
        ("db", "b", "d"),
        ("p", "p", "p"),
        ("d", "d", "d"),
        ("pd", "p", "d"),
        ("bb", "bb", "bb"),
    ],
)
def test_requests_go_to_workers_for_the_half_that_comes_next(roles: str, new: str, continued: str) -> None:
    """The others do a half that has no workers: those for both first."""
    names = {"p": PREFILL_FEATURE, "d": DECODE_FEATURE, "b": ""}
    table = LaneTable()
    room = LoadReport(0.0, room_seqs=1, free_blocks=9)
    lanes = [make_lane(f"{role}{i}", "m", room, kind=LaneKind(role=names[role])) for i, role in enumerate(roles)]
    for lane in lanes:
        table.add(lane)
        table.set_ready(lane, True)
    queued = request(1)
    assert "".join(lane.worker[0] for lane in table.candidates(queued)) == new
    queued.has_output = True
    assert "".join(lane.worker[0] for lane in table.candidates(queued)) == continued
    needed = {"num_tokens": 33, "block_size": 4}
    assert table.has_decode_place("m", None, 0, "", **needed) == (set(roles) != {"p"})
    # A stream that has begun waits for no place.
    for full in (LoadReport(0.0, room_seqs=0, free_blocks=9), LoadReport(0.0, room_seqs=1, free_blocks=8)):
        for lane in lanes:
            lane.load.take(full)
        assert not table.has_decode_place("m", None, 0, "", **needed)


@pytest.mark.parametrize("state", ["bound", "on its way", "waits at the worker"])
def test_blocks_of_requests_that_no_report_counts_are_taken(state: str) -> None:
    """120 blocks of 4 tokens are free; a request of 400 tokens takes 101 of them at most."""
    report = LoadReport(0.0, room_tokens=1000, room_seqs=9, free_blocks=120, decoding_seqs=1)
    lane = make_lane("d", "m", report)
    assert lane.has_place(400, 4)
    handed_over = request(1, tokens=400)
    handed_over.is_retry = True
    lane.bind(handed_over)
    if state != "bound":
        _, serial = lane.release(0.0)
        if state == "waits at the worker":
            seen = replace(report, submit_seen=serial, room_seqs=8, waiting_seqs=1, waiting_tokens=400)
            lane.load.take(seen)
    assert not lane.has_place(400, 4)
    assert lane.has_place(75, 4)
    assert not lane.has_place(76, 4)
    # The worker has given it blocks.
    if state == "waits at the worker":
        lane.load.take(replace(report, submit_seen=serial, decoding_seqs=2, free_blocks=19))
        assert lane.has_place(75, 4)
        assert not lane.has_place(76, 4)


@pytest.mark.parametrize("policy", PLACEMENTS)
def test_begun_stream_goes_to_a_worker_with_free_blocks(policy: str) -> None:
    placement, prompt = PLACEMENTS[policy](), chain(1, 2, 3, 4)
    d = make_dispatcher(DelayGate(0.0), placement)
    for worker, free_blocks in (("full", 0), ("short", 4 * GRANULE_BLOCKS), ("free", 1000)):
        room = LoadReport(0.0, decoding_seqs=1, room_tokens=100_000, room_seqs=9, free_blocks=free_blocks)
        d.lane_up(worker, "m", room, 0.0)
        d.report(worker, room)
    placement.cache_changed("full", CacheChange(stored=prompt[:3]))

    def queued(key: int, *, has_output: bool) -> QueuedRequest:
        return QueuedRequest(
            key,
            "m",
            4 * 16 * GRANULE_BLOCKS + 1,
            0.0,
            session="s",
            granules=prompt,
            granule_tokens=16 * GRANULE_BLOCKS,
            has_output=has_output,
        )

    # A new request may wait for blocks; its session is with the full worker from now on.
    d.arrive(queued(0, has_output=False), 0.0)
    assert [release.worker for release in d.decide(0.0)] == ["full"]
    for key in range(1, 4):
        d.requeue(queued(key, has_output=True), 0.0)
        assert [release.worker for release in d.decide(0.0)] == ["free"]


def test_begun_stream_that_waits_moves_to_a_worker_with_free_blocks() -> None:
    placement, queued = LeastLoad(), request(1, tokens=100)
    queued.has_output, queued.granule_tokens = True, 16 * GRANULE_BLOCKS
    full, free, short = (
        make_lane(name, "m", LoadReport(0.0, decoding_seqs=1, room_seqs=9, free_blocks=free_blocks))
        for name, free_blocks in (("full", 0), ("free", 7), ("short", 6))
    )
    for lane in (full, short):
        placement.lane_up(lane)
    full.bind(queued)
    placement.load_changed(full)
    assert placement.find_better_lane(queued, full, {}, 0.0) is None
    placement.lane_up(free)
    move = placement.find_better_lane(queued, full, {}, 0.0)
    assert move is not None
    assert move.lane is free


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        ([], ""),
        (["prefill A files:1"], ""),
        (["decode A files:1"], ""),
        (["decode B files:1", "decode A files:2", "decode A redis:3,files:1"], ""),
        (["decode B files:1"], "its numerics class is not that of a worker for decodes"),
        (["decode B files:1", "decode A redis:3"], "--kv-tiers names no tier of a worker for decodes"),
        (["decode A "], "--kv-tiers names no tier of a worker for decodes"),
    ],
)
def test_halves_without_common_blocks_are_named(kinds: list[str], problem: str) -> None:
    table = LaneTable()
    for i, kind in enumerate(["prefill A files:1", *kinds]):
        role, numerics, stores = kind.split(" ")
        own = LaneKind(numerics, role=role, kv_stores=frozenset(stores.split(",")))
        lane = make_lane(f"w{i}", "m", LoadReport(0.0), kind=own)
        table.add(lane)
        table.set_ready(lane, True)
    assert table.role_problem(table["w0"]) == problem


def test_waiting_request_stays_with_workers_of_its_role() -> None:
    placement, queued = LeastLoad(), request(1)
    busy = make_lane("busy", "m", LoadReport(0.0, waiting_tokens=100_000), kind=LaneKind(role=DECODE_FEATURE))
    idle = make_lane("idle", "m", LoadReport(0.0, room_seqs=10), kind=LaneKind(role=PREFILL_FEATURE))
    other = make_lane("other", "m", LoadReport(0.0, room_seqs=10), kind=LaneKind(role=DECODE_FEATURE))
    idler = make_lane("idler", "m", LoadReport(0.0, room_seqs=10), kind=LaneKind(role=PREFILL_FEATURE))
    for lane in (busy, idle, idler):
        placement.lane_up(lane)
    busy.bind(queued)
    assert placement.find_better_lane(queued, busy, {}, 0.0) is None
    placement.lane_up(other)
    move = placement.find_better_lane(queued, busy, {}, 0.0)
    assert move is not None
    assert move.lane is other
