"""Numbers of one router at the ends of their fields do not affect the Sessions of others."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import ApiError
from tests.unit.worker.session.support import FACTS
from tests.unit.worker.session.world import World
from worker.session.router_state import RouterSequences
from worker.session.session import WorkerSession, check_hello

_MOST = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_FIXED64: 2**64 - 1,
}
_FLOATS = (0.0, -0.0, 1e-45, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"))


def fill(message: Message, rnd: random.Random, depth: int = 0) -> None:
    """Sets each number of a message to an end of its field's range, or near one; lists get up to two entries."""
    for field in message.DESCRIPTOR.fields:
        if (field.containing_oneof is not None and depth == 0) or rnd.random() < 0.5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        count = rnd.choice([1, 2]) if field.is_repeated else 1
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for _ in range(count):
                inner = getattr(message, field.name)
                fill(inner.add() if field.is_repeated else inner, rnd, depth + 1)
            continue
        values = [_value(field, rnd) for _ in range(count)]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])


def _value(field: Any, rnd: random.Random) -> Any:
    if field.type in _MOST:
        most = _MOST[field.type]
        return rnd.choice([0, 1, 2, 299, most // 2, most - 1, most])
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return rnd.choice(_FLOATS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rnd.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rnd.choice([0, 1, 2, 2**31 - 1])
    return rnd.choice([b"", bytes(16)]) if field.type == FieldDescriptor.TYPE_BYTES else ""


def session_of(world: World, router_id: str, hello: wpb.Hello | None = None) -> WorkerSession:
    hello = wpb.Hello() if hello is None else hello
    hello.router_id, hello.lease_ms = router_id, 5000
    hello.proto_minor = min(hello.proto_minor, 1)
    checked = check_hello(wpb.SessionRequest(hello=hello))
    sequences = RouterSequences(router_id, FACTS, world.engine, world.tracing)
    return WorkerSession(checked, sequences, FACTS, world.engine, world.lanes, world.now, lambda: None)


def frames(state: WorkerSession, world: World) -> list[wpb.SessionResponse]:
    """Frames that a Session writes, serialized and parsed again."""
    found: list[wpb.SessionResponse] = []
    try:
        while len(found) < 100 and (frame := state.next_frame(world.now)) is not None:
            found.append(wpb.SessionResponse.FromString(frame.SerializeToString()))
    except ValueError as error:
        pytest.fail(f"a number does not fit: {error}")
    return found


@pytest.mark.parametrize("seed", range(60))
def test_extreme_numbers_of_one_router_spare_other_sessions(seed: int) -> None:
    """Former fault: two Lane frames broke all Sessions of a worker."""
    rnd, world, hello = random.Random(seed), World(), wpb.Hello()
    honest = session_of(world, "honest")
    fill(hello, rnd)
    hostile = [session_of(world, "a", hello), session_of(world, "b")]
    for _ in range(rnd.randrange(1, 7)):
        state, kind = rnd.choice(hostile), rnd.choice(["submit", "extend", "cancel", "lane", "adopt"])
        frame = wpb.SessionRequest()
        getattr(frame, kind).SetInParent()
        fill(getattr(frame, kind), rnd, depth=1)
        with contextlib.suppress(ApiError):
            state.receive(frame, world.now)
        world.now += 1.0
        world.engine.step()
        for each in (*hostile, honest):
            frames(each, world)
    world.now += 1.0
    assert frames(honest, world)


@given(tokens=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=5))
@example(tokens=[2**64 - 1] * 2)
def test_waiting_tokens_of_all_routers_fit_field(tokens: list[int]) -> None:
    world = World()
    states = [session_of(world, f"r{i}") for i in range(len(tokens))]
    for state, num_tokens in zip(states, tokens, strict=True):
        state.receive(wpb.SessionRequest(lane=wpb.Lane(tokens=num_tokens, seqs=1, oldest_age_ms=2**32 - 1)), world.now)
    world.now += 100.0
    (welcome,) = frames(states[0], world)
    assert welcome.welcome.load.fleet_oldest_age_ms == 2**32 - 1
    most = 2**41
    assert welcome.welcome.load.fleet_tokens == sum(min(each, most) for each in tokens)
