"""A worker is counted in whole or not at all, and is dialled for as long as it is wanted."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.errors import RouterFailedError
from common.process import tasks
from common.process.tasks import task_failures
from common.protocol import KV_EPOCH_MINOR, PROTO_MINOR
from common.sampling_params import SamplingParams
from router.model_registry import ModelRegistry, ServedModel, TextAssets
from router.requests import fleet as fleet_module
from router.requests.fleet import Fleet, WorkerState
from router.requests.stream import RequestStream, RoutedRequest
from router.scheduling.dispatcher import Dispatcher, Release
from router.scheduling.placement import PLACEMENTS, PrefixAware
from router.text.stream_assembly import StreamAssembly
from router.text.tokenizer_store import TokenizerStore
from router.workers.session import Fault, Session, SessionLostError
from tests.unit.router.support import tokenizer_files

ADDRESS = "127.0.0.1:1"


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Fleet, ModelRegistry, list[str]]:
    """A fleet whose worker is dialled by nobody; the list holds what the fleet's user is told."""
    told: list[str] = []

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(fleet_module, "keep_connected", never)
    registry = ModelRegistry()
    dispatcher = Dispatcher(DelayGate(0.0, 0.25), PLACEMENTS["prefix_aware"].make(), 16)
    fleet = Fleet(dispatcher, registry, TokenizerStore(), lambda: told.append("serving changed"))
    fleet.set_workers([ADDRESS])
    return fleet, registry, told


def described(fleet: Fleet) -> Session:
    session = Session(ADDRESS, "r", time.monotonic)
    session.worker_id, session.instance_id = "w", "i"
    text = TextAssets.from_files(tokenizer_files())
    session.model = ServedModel("m", "Qwen3ForCausalLM", 128, 300, "t", "d", 16, 0, text)
    fleet.session_opening(session)
    return session


async def test_a_worker_that_can_not_be_counted_in_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a lane was registered, then a log line raised: nobody ever took the lane away, and its requests hung."""
    fleet, registry, told = made(monkeypatch)
    session = described(fleet)
    with monkeypatch.context() as broken:
        broken.setattr(fleet_module.log, "info", lambda *_, **__: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            fleet.session_up(session, wpb.Welcome(instance_id="i"))
    fleet.session_closed(session, Fault.VIOLATION)
    assert not registry.serving
    (known,) = fleet.workers()
    assert (known.address, known.state, known.load) == (ADDRESS, WorkerState.UNCONNECTED, None)
    lanes = fleet.lanes()
    assert lanes.idle + lanes.open + lanes.held == 0

    again = described(fleet)
    fleet.session_up(again, wpb.Welcome(instance_id="i"))
    assert registry.serving
    assert told[-1] == "serving changed"
    await fleet.stop()


def cached(placement: PrefixAware) -> set[int]:
    (index,) = placement._indexes.values()
    return index.held(ADDRESS)


async def test_another_placement_is_told_of_the_caches_on_the_streams_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R14: every Session was broken off to get a snapshot."""
    fleet, _, _ = made(monkeypatch)
    session = described(fleet)
    fleet.session_up(session, wpb.Welcome(instance_id="i", proto_minor=PROTO_MINOR, kv_events=True))
    fleet.kv_events(session, wpb.KvEvents(seq=3, stored=[1, 2, 3]))
    placement = PrefixAware()
    fleet.configure(DelayGate(0.0), placement, 16, {})
    frames = iter(lambda: session.state.next_frame(0.0), None)
    assert [frame.lane.kv_epoch for frame in frames if frame.HasField("lane")] == [1]
    fleet.kv_events(session, wpb.KvEvents(seq=4, after=3, stored=[4]))
    assert cached(placement) == set()
    fleet.kv_events(session, wpb.KvEvents(seq=5, snapshot=True, stored=[1, 2, 3, 4, 5], epoch=1))
    fleet.kv_events(session, wpb.KvEvents(seq=6, after=5, evicted=[1], epoch=1))
    assert cached(placement) == {2, 3, 4, 5}
    await fleet.stop()


async def test_a_worker_that_knows_no_asks_says_its_cache_on_a_new_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _, _ = made(monkeypatch)
    session = described(fleet)
    fleet.session_up(session, wpb.Welcome(instance_id="i", proto_minor=KV_EPOCH_MINOR - 1, kv_events=True))
    fleet.kv_events(session, wpb.KvEvents(seq=3, stored=[1, 2, 3]))
    fleet.configure(DelayGate(0.0), PrefixAware(), 16, {})
    with pytest.raises(SessionLostError, match="KV events are missing"):
        fleet.kv_events(session, wpb.KvEvents(seq=4, after=3, stored=[4]))
    await fleet.stop()


def asked(fleet: Fleet, on_submit: Callable[[str], None] = lambda worker: None) -> RequestStream:
    (known,) = fleet._registry.models
    params = SamplingParams(max_tokens=4)
    request = RoutedRequest("m", known.identity, array("I", [1, 2, 3]), params, 0, 0, time.monotonic())
    return fleet.open(request, StreamAssembly(3, detokenizer=None), on_submit)


def up(fleet: Fleet) -> Session:
    session = described(fleet)
    load = wpb.Load(room_tokens=1000, room_seqs=16)
    fleet.session_up(session, wpb.Welcome(instance_id="i", load=load, proto_minor=PROTO_MINOR))
    return session


def submitted(session: Session) -> list[int]:
    """Sizes of the groups that a worker gets."""
    frames = iter(lambda: session.state.next_frame(0.0), None)
    return [len(frame.submit.seqs) for frame in frames if frame.HasField("submit")]


async def test_a_request_that_can_not_be_sent_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: it had left the queue, no worker had it, and its client waited for ever; so did those released with it."""
    fleet, _, _ = made(monkeypatch)
    session = up(fleet)
    before = task_failures().get("dispatching", 0)
    streams = [asked(fleet), asked(fleet, lambda worker: 1 / 0), asked(fleet)]  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        with pytest.raises(RouterFailedError):
            await streams[1].next()
    assert task_failures()["dispatching"] == before + 1
    assert submitted(session) == [2]
    assert [stream.session for stream in streams] == [session, None, session]
    for stream in streams:
        fleet.close(stream)
    assert fleet.tables()["sequences"] == fleet.tables()["streams"] == 0
    await fleet.stop()


async def test_a_decision_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: nothing decided again until something else happened, and nobody counted it."""
    monkeypatch.setattr(fleet_module, "TASK_RESTART_S", 0.001)
    fleet, _, _ = made(monkeypatch)
    session = up(fleet)
    before = task_failures().get("dispatching", 0)
    decide, fails = fleet._dispatcher.decide, iter(range(3))

    def failing(now: float) -> list[Release]:
        if next(fails, None) is not None:
            raise RuntimeError
        done.set()
        return decide(now)

    done = asyncio.Event()
    monkeypatch.setattr(fleet._dispatcher, "decide", failing)
    stream = asked(fleet)
    async with asyncio.timeout(60):
        await done.wait()
    assert task_failures()["dispatching"] == before + 3
    assert submitted(session) == [1]
    fleet.close(stream)
    await fleet.stop()


async def test_a_connection_that_fails_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: the task that dials a worker ended, and nobody dialled it any more."""
    monkeypatch.setattr(tasks, "TASK_RESTART_S", 0.001)
    fleet, _, _ = made(monkeypatch)
    dials = asyncio.Semaphore(0)

    async def fails(*_: Any) -> None:
        dials.release()
        raise RuntimeError

    monkeypatch.setattr(fleet_module, "keep_connected", fails)
    fleet.set_workers([ADDRESS, "127.0.0.1:2"])
    async with asyncio.timeout(60):
        for _ in range(3):
            await dials.acquire()
    assert [worker.address for worker in fleet.workers()] == [ADDRESS, "127.0.0.1:2"]
    await fleet.stop()
