"""A Session without its stream: a real engine stepped by hand, a virtual clock, and a router that checks every rule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ApiError
from common.limits import HEARTBEAT_S, MAX_FRAME_TOKENS
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain
from common.wire.protocol import PROTO_MINOR
from tests.unit.worker.session.support import (
    BLOCK_SIZE,
    FACTS,
    LIMITS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    long_prompt,
    record,
    simulated_runner,
    submit,
)
from tests.unit.worker.session.world import World, opened, run
from worker.session import fleet_backlog
from worker.session.session import check_hello, check_owner


def test_welcome_then_tokens_then_ends() -> None:
    world = World()
    router = world.router()
    router.write(submit(3, record(1, range(40), max_tokens=6), record(2, [5], max_tokens=2)))
    run(world, router)
    assert router.submit_seen == 3
    runner = simulated_runner()
    assert router.streams[1].tokens[40:] == runner.reference(list(range(40)), 6, seed=1)
    assert router.streams[2].tokens[1:] == runner.reference([5], 2, seed=2)
    assert router.reasons() == {1: wpb.END_REASON_LENGTH, 2: wpb.END_REASON_LENGTH}
    assert router.load.free_blocks == router.load.total_blocks == NUM_BLOCKS
    assert router.wakes > 0


def test_prefix_hit_and_times_arrive_with_first_token() -> None:
    world = World()
    router = world.router()
    router.write(submit(1, record(1, range(64))))
    run(world, router)
    router.write(submit(2, record(2, range(64))))
    world.now += 0.125
    run(world, router)
    start = router.streams[2].start
    assert start is not None
    assert start.cached_tokens == 48
    assert start.queue_us == pytest.approx(135_000, abs=10)


def test_invalid_sequence_ends_alone() -> None:
    world = World()
    router = world.router()
    bad = record(2, [VOCAB_SIZE])
    too_long = record(3, [1] * 1024)
    router.write(submit(1, record(1), bad, too_long))
    run(world, router)
    assert router.reasons() == {1: wpb.END_REASON_LENGTH, 2: wpb.END_REASON_INVALID, 3: wpb.END_REASON_INVALID}
    end = router.streams[2].end
    assert end is not None
    assert "token_ids[0]" in end.message


def test_refused_rid_resent_before_its_end_is_ignored() -> None:
    world = World()
    router = world.router()
    router.write(submit(1, record(2, [VOCAB_SIZE]), record(2, [VOCAB_SIZE, 1])))
    router.write(submit(2, record(2, [VOCAB_SIZE, 1, 2])))
    run(world, router)
    assert router.reasons() == {2: wpb.END_REASON_INVALID}


def test_cancel_frees_the_blocks_with_the_next_step() -> None:
    world = World()
    router = world.router()
    router.write(submit(1, record(1, range(100), max_tokens=500), record(2, [1], max_tokens=500)))
    run(world, router, steps=5)
    router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=[1, 2, 77])))
    run(world, router, steps=1)
    assert router.reasons() == {1: wpb.END_REASON_CANCELLED, 2: wpb.END_REASON_CANCELLED}
    assert router.load.free_blocks == NUM_BLOCKS
    assert router.load.decoding_seqs == 0
    router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=[1, 2])))
    run(world, router, steps=2)


def test_deadline_ends_pending_and_running_sequences() -> None:
    world = World()
    router = world.router()
    unfinished, _ = long_prompt(1, range(200), cut=100)
    unfinished.deadline_left_ms = 50
    router.write(submit(1, unfinished))
    router.write(submit(2, record(2, max_tokens=500, deadline_left_ms=50)))
    run(world, router, steps=10)
    assert router.reasons() == {1: wpb.END_REASON_DEADLINE, 2: wpb.END_REASON_DEADLINE}
    assert router.submit_seen in (1, 2)


def test_heartbeats_fill_silence() -> None:
    world = World()
    router = world.router()
    router.read()
    assert router.state.silent_for(world.now) == pytest.approx(HEARTBEAT_S)
    world.now += HEARTBEAT_S - 0.01
    router.read()
    world.now += 0.02
    router.read()
    router.read()
    assert router.frames == ["welcome", "heartbeat"]


def test_cordon_is_sent_to_router_at_once() -> None:
    world = World()
    router = world.router()
    router.read()
    assert router.load.intake == wpb.INTAKE_OPEN
    wakes = router.wakes
    router.state.set_intake(wpb.INTAKE_CORDONED)
    assert router.wakes == wakes + 1
    router.read()
    assert router.frames == ["welcome", "heartbeat"]
    assert router.load.intake == wpb.INTAKE_CORDONED
    router.read()
    assert len(router.frames) == 2
    # What was on its way is run.
    router.write(submit(1, record(1)))
    run(world, router)
    assert router.reasons() == {1: wpb.END_REASON_LENGTH}
    assert router.load.intake == wpb.INTAKE_CORDONED
    router.state.set_intake(wpb.INTAKE_OPEN)
    router.read()
    assert router.load.intake == wpb.INTAKE_OPEN


def test_oldest_fleet_age_grows_with_time() -> None:
    world = World()
    first, second = world.router(), world.router()
    first.read()
    first.write(wpb.SessionRequest(lane=wpb.Lane(oldest_age_ms=500, tokens=70, seqs=3)))
    second.write(wpb.SessionRequest(lane=wpb.Lane(oldest_age_ms=100, tokens=7, seqs=1)))
    world.now += 1.0
    first.read()
    assert (first.load.fleet_oldest_age_ms, first.load.fleet_tokens) == (1500, 77)
    first.write(wpb.SessionRequest(lane=wpb.Lane()))
    world.now += 1.0
    first.read()
    assert (first.load.fleet_oldest_age_ms, first.load.fleet_tokens) == (2100, 7)


@pytest.mark.parametrize(
    ("frame", "code", "message"),
    [
        (wpb.SessionRequest(), grpc.StatusCode.INVALID_ARGUMENT, "frame is empty or unknown"),
        (
            wpb.SessionRequest(hello=wpb.Hello(router_id="r")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "frame is a second Hello",
        ),
        (
            wpb.SessionRequest(extend=wpb.Extend(token_ids=[1] * (MAX_FRAME_TOKENS + 1))),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "a frame of 16385 token ids; at most 16384",
        ),
        (
            submit(1, record(1, [1] * 10_000), record(2, [1] * 10_000)),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "a frame of 20000 token ids",
        ),
        (
            submit(1, record(1, traceparent="x" * (1 << 20))),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "a frame of 1048",
        ),
    ],
)
def test_invalid_frame_closes_session(frame: wpb.SessionRequest, code: grpc.StatusCode, message: str) -> None:
    router = World().router()
    with pytest.raises(ApiError) as raised:
        router.state.receive(frame, 0.0)
    assert raised.value.code is code
    assert raised.value.message.startswith(message)


@pytest.mark.parametrize(
    ("hello", "code", "field"),
    [
        (wpb.Hello(lease_ms=1000), grpc.StatusCode.INVALID_ARGUMENT, "hello.router_id"),
        (wpb.Hello(lease_ms=1000, router_id="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "hello.router_id"),
        (wpb.Hello(router_id="r"), grpc.StatusCode.INVALID_ARGUMENT, "hello.lease_ms"),
        (wpb.Hello(router_id="r", lease_ms=10**6), grpc.StatusCode.INVALID_ARGUMENT, "hello.lease_ms"),
        (wpb.Hello(router_id="r", lease_ms=1000, proto_minor=PROTO_MINOR + 2), grpc.StatusCode.FAILED_PRECONDITION, ""),
    ],
)
def test_session_refuses_invalid_hello(hello: wpb.Hello, code: grpc.StatusCode, field: str) -> None:
    with pytest.raises(ApiError) as raised:
        check_hello(wpb.SessionRequest(hello=hello))
    assert raised.value.code is code
    assert [violation.path for violation in raised.value.violations] == ([field] if field else [])


def test_neighbouring_minor_version_is_served() -> None:
    check_hello(wpb.SessionRequest(hello=wpb.Hello(router_id="r", lease_ms=1000, proto_minor=PROTO_MINOR + 1)))
    with pytest.raises(ApiError, match="a Hello as the first frame"):
        check_hello(submit(1, record(1)))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_cancel_storm_with_two_routers(seed: int) -> None:
    """Random submits, cancels and slow readers: every stream is right and ends once, and no state remains."""
    random = Random(seed)
    world = World()
    routers = [world.router(), world.router()]
    next_rid = 1
    for turn in range(40):
        for router in routers:
            if turn < 28 and random.random() < 0.5:
                group = [_random_record(random, next_rid + i) for i in range(random.randint(0, 4))]
                next_rid += len(group)
                router.write(submit(turn + 1, *group))
            live = [rid for rid in router.streams if rid not in router.reasons()]
            if random.random() < 0.4:
                unwanted = random.sample(live, min(len(live), 3))
                router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=unwanted)))
            router.read(at_most=random.randint(0, 2))
        world.now += 0.01
        world.engine.step()
    for router in routers:
        live = [rid for rid in router.streams if rid not in router.reasons()]
        router.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=live)))
    run(world, *routers, steps=2)
    runner = simulated_runner()
    for router in routers:
        assert router.reasons().keys() == router.streams.keys()
        for rid, stream in router.streams.items():
            prompt = _random_prompt(rid)
            made = stream.tokens[len(prompt) :]
            assert made == runner.reference(prompt, len(made), seed=rid)
    assert not world.engine.deliveries
    assert world.tracing.open_spans() == 0
    assert world.engine.core.load().free_blocks == NUM_BLOCKS


def _random_prompt(rid: int) -> list[int]:
    return [Random(rid // 3).randrange(VOCAB_SIZE)] * (1 + rid % 40) + [rid % VOCAB_SIZE]


def _random_record(random: Random, rid: int) -> wpb.SubmitSequence:
    return record(rid, _random_prompt(rid), max_tokens=random.randint(1, 30))


def test_kv_events_precede_steps_and_replace_no_heartbeat() -> None:
    world = World()
    (a, welcome), (b, _) = opened(world, "a"), opened(world, "b")
    assert welcome.kv_events
    prompt = list(range(1, 150))
    a.receive(submit(1, record(1, prompt, max_tokens=800)), world.now)
    world.engine.step()
    chain = hash_chain(prompt, BLOCK_SIZE, seed=LIMITS.hash_seed)
    for state in (a, b):
        frame = state.next_frame(world.now)
        assert frame is not None
        assert (list(frame.kv_events.stored), frame.kv_events.seq) == ([chain[GRANULE_BLOCKS - 1]], 1)
    step = a.next_frame(world.now)
    assert step is not None
    assert step.HasField("step_output")
    assert b.silent_for(world.now) == HEARTBEAT_S
    kinds = []
    for _ in range(210):
        world.now += 0.01
        world.engine.step()
        while (frame := b.next_frame(world.now)) is not None:
            kinds.append(frame.WhichOneof("frame"))
    assert (kinds.count("heartbeat"), kinds.count("kv_events")) == (4, 1)
    late, _ = opened(world, "b", kv_seq=1)
    frame = late.next_frame(world.now)
    assert frame is not None
    assert (frame.kv_events.after, frame.kv_events.seq) == (1, 2)


def test_router_gets_cache_snapshot_on_open_stream() -> None:
    """Former fault: a router had to break the stream to get a snapshot."""
    world = World()
    state, _ = opened(world, "r")
    world.engine.kv_log.append([1, 2])
    first = state.next_frame(world.now)
    assert first is not None
    assert not first.kv_events.snapshot
    world.now += 1.0
    for _ in range(2):
        # Every later Lane frame says it again.
        state.receive(wpb.SessionRequest(lane=wpb.Lane(kv_epoch=1)), world.now)
    frames = []
    for _ in range(10):
        world.now += 0.1
        frames.append(state.next_frame(world.now))
    (whole,) = [frame.kv_events for frame in frames if frame is not None and frame.HasField("kv_events")]
    assert (sorted(whole.stored), whole.seq, whole.snapshot, whole.epoch) == ([1, 2], 2, True, 1)


def test_worker_without_prefix_caching_sends_no_kv_events() -> None:
    world = World()
    state, welcome = opened(world, "r", facts=replace(FACTS, prefix_caching=False))
    assert not welcome.kv_events
    world.engine.kv_log.append([1])
    assert state.next_frame(world.now) is None
    state.receive(wpb.SessionRequest(lane=wpb.Lane(kv_epoch=1)), world.now)
    assert state.next_frame(world.now) is None


def test_rids_are_per_router() -> None:
    """Rule S11: a router's frames about a rid do not affect another router's sequence of the same rid."""
    world = World()
    one, other = world.router(), world.router()
    for router in (one, other):
        router.write(submit(1, record(1, range(40), max_tokens=30)))
    run(world, one, other, steps=5)
    other.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=[1])))
    other.state.close()
    other.dial({1: 0, 2: 0})
    run(world, one, other)
    assert other.unknown == [1, 2]
    assert one.reasons() == {1: wpb.END_REASON_LENGTH}
    assert one.streams[1].tokens[40:] == simulated_runner().reference(list(range(40)), 30, seed=1)


@pytest.mark.parametrize(
    ("owner", "identity", "taken"),
    [("", "", False), ("a", "a", False), ("a", "b", True), ("a", "", True), ("", "a", True)],
)
def test_router_id_is_bound_to_first_certificate(owner: str, identity: str, taken: bool) -> None:
    if not taken:
        check_owner("r", owner, identity)
        return
    with pytest.raises(ApiError, match="router_id 'r' is in use by another certificate") as caught:
        check_owner("r", owner, identity)
    assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("kind", ["running", "refused", "given back"])
def test_endless_sequences_close_session(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running, refused and returned sequences, for a router that never reads."""
    monkeypatch.setattr("worker.session.session.MAX_ROUTER_SEQS", 50)
    world = World()
    router = world.router()
    if kind == "given back":
        router.state.drain(world.now + 5)
    frames = [submit(rid + 1, record(rid, [VOCAB_SIZE if kind == "refused" else 1])) for rid in range(51)]
    for frame in frames[:50]:
        router.state.receive(frame, world.now)
    with pytest.raises(ApiError, match="more than 50 sequences") as caught:
        router.state.receive(frames[50], world.now)
    assert caught.value.reason == "SESSION_BOUNDS"


def test_reading_router_may_send_unlimited_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.session.session.MAX_ROUTER_SEQS", 50)
    world = World()
    router = world.router()
    for rid in range(200):
        router.write(submit(rid + 1, record(rid, [VOCAB_SIZE if rid % 2 else 1])))
        run(world, router, steps=10)
    assert len(router.reasons()) == 200


def test_endless_groups_close_largest_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: each Session had a bound, but all Sessions together had none."""
    monkeypatch.setattr(fleet_backlog, "MAX_ALL_ASSEMBLING_BYTES", 20_000)
    world = World()
    honest, _ = opened(world, "honest")
    hostile = [opened(world, f"r{i}")[0] for i in range(5)]

    def flood() -> None:
        for number in range(1, 200):
            frame = submit(number, record(number))
            frame.submit.more = True
            hostile[number % 5].receive(frame, world.now)

    with pytest.raises(ApiError) as caught:
        flood()
    assert caught.value.reason == "SESSION_BOUNDS"
    # A complete group needs no assembly memory, so this Session stays however much the others hold.
    honest.receive(submit(1, record(1)), world.now)
    assert not honest.is_closed
