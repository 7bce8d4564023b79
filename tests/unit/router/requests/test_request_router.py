"""A request that cannot be sent ends alone, and a decision that fails is made again."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import RouterFailedError, SlowClientError
from common.process.tasks import task_failures
from router.requests import request_router
from router.scheduling.dispatcher import Release
from router.workers.session import Session
from tests.unit.router.pool import Site


def submitted(session: Session) -> list[int]:
    """Sizes of the groups that a worker gets."""
    frames = iter(lambda: session.state.next_frame(0.0), None)
    return [len(frame.submit.seqs) for frame in frames if frame.HasField("submit")]


async def test_a_request_that_can_not_be_sent_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: it had left the queue, no worker had it, and its client waited for ever; so did those released with it."""
    site = Site(monkeypatch)
    session = site.up()
    before = task_failures().get("dispatching", 0)
    streams = [site.ask(), site.ask(lambda worker: 1 / 0), site.ask()]  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        with pytest.raises(RouterFailedError):
            await streams[1].next()
    assert task_failures()["dispatching"] == before + 1
    assert submitted(session) == [2]
    assert [stream.session for stream in streams] == [session, None, session]
    for stream in streams:
        site.requests.close(stream)
    tables = site.requests.tables()
    assert tables["sequences"] == tables["streams"] == 0
    await site.stop()


async def test_a_decision_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: nothing decided again until something else happened, and nobody counted it."""
    monkeypatch.setattr(request_router, "TASK_RESTART_S", 0.001)
    site = Site(monkeypatch)
    session = site.up()
    before = task_failures().get("dispatching", 0)
    decide, fails = site.dispatcher.decide, iter(range(3))

    def failing(now: float) -> list[Release]:
        if next(fails, None) is not None:
            raise RuntimeError
        done.set()
        return decide(now)

    done = asyncio.Event()
    monkeypatch.setattr(site.dispatcher, "decide", failing)
    stream = site.ask()
    async with asyncio.timeout(60):
        await done.wait()
    assert task_failures()["dispatching"] == before + 3
    assert submitted(session) == [1]
    site.requests.close(stream)
    await site.stop()


async def test_an_answer_that_is_dropped_does_not_wait_for_its_turn_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a timeout for slow clients, an answer that overflowed waited for another one's last write for ever."""
    site = Site(monkeypatch)
    site.up()
    stream, turn = site.ask(), asyncio.Lock()
    await turn.acquire()
    waiting = asyncio.create_task(stream.turn(turn))
    await asyncio.sleep(0)
    # Time alone drops nobody who does not write.
    for now in (0.0, 1e9):
        stream.drop_if_stuck(now, 1.0)
    assert not stream.assembly.is_dropped
    stream.drop(SlowClientError(7, None))
    async with asyncio.timeout(60):
        with pytest.raises(SlowClientError):
            await waiting
    turn.release()
    assert not turn.locked()
    await turn.acquire()
    site.requests.close(stream)
    await site.stop()
