"""An unsendable request ends alone, a failed decision is repeated, and orphans of a router are adopted."""

from __future__ import annotations

import asyncio

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import RouterFailedError, SlowClientError
from common.process.tasks import task_failures
from common.wire.adoption import delivered_digest
from router.requests import request_router
from router.scheduling.dispatcher import Release
from router.workers.session import Fault, Session
from tests.unit.router.pool import Site


def submitted(session: Session) -> list[int]:
    """Sizes of the groups that a worker receives."""
    frames = iter(lambda: session.state.next_frame(0.0), None)
    return [len(frame.submit.seqs) for frame in frames if frame.HasField("submit")]


async def test_unsendable_request_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: such a request and those released with it left the queue without a worker; their clients hung."""
    site = Site(monkeypatch)
    session = site.up()
    before = task_failures().get("dispatching", 0)
    streams = [site.ask(), site.ask(lambda worker, choice: 1 / 0), site.ask()]  # type: ignore[arg-type]
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


async def test_failed_decision_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no decision was made again until another event, and the failure was not counted."""
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


async def test_dropped_answer_does_not_wait_for_write_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: without a timeout for slow clients, an overflowing answer waited for another's write for ever."""
    site = Site(monkeypatch)
    site.up()
    stream, turn = site.ask(), asyncio.Lock()
    await turn.acquire()
    waiting = asyncio.create_task(stream.turn(turn))
    await asyncio.sleep(0)
    # Elapsed time alone drops no stream that is not writing.
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


def written(session: Session) -> list[wpb.SessionRequest]:
    """The frames that a worker receives, except Hello and Lane."""
    frames = iter(lambda: session.state.next_frame(0.0), None)
    return [frame for frame in frames if frame.WhichOneof("frame") in ("adopt", "submit", "cancel")]


def orphan(site: Site, session: Session, key: bytes = b"k") -> None:
    """Makes the worker report an orphaned sequence of a lost router."""
    site.pool.orphans_named(session, wpb.Orphans(keys=[key], lease_left_ms=60_000))


async def test_adopting_request_skips_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    session = site.up()
    orphan(site, session)
    stream, other = site.ask(adoption_key=b"k"), site.ask(adoption_key=b"k")
    adopt, submit = written(session)[0], None
    assert (adopt.adopt.rid, adopt.adopt.key, adopt.adopt.have) == (stream.rid, b"k", 3)
    assert adopt.adopt.digest == delivered_digest([])
    assert stream.session is session
    # A key is given once: the other request is queued and may be adopted later.
    await asyncio.sleep(0)
    (submit,) = written(session)
    assert [each.adoption_key for each in submit.submit.seqs] == [b"k"]
    site.pool.step_output(session, wpb.StepOutput(rid=[stream.rid], first_pos=[3], n=[1], token_ids=[7]))
    assert list(stream.assembly.token_ids) == [7]
    for each in (stream, other):
        site.requests.close(each)
    assert (site.requests.running.num_adopted, site.requests.running.num_unadopted) == (1, 0)
    await site.stop()


@pytest.mark.parametrize("how", ["given back", "not written"])
async def test_lost_orphan_leaves_ordinary_request(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    site = Site(monkeypatch)
    session = site.up()
    orphan(site, session)
    stream = site.ask(adoption_key=b"k")
    if how == "given back":
        (adopt,) = written(session)
        site.pool.step_output(session, wpb.StepOutput(returned=[adopt.adopt.rid]))
    else:
        site.pool.session_down(session, Fault.BROKEN, "cut")
        site.pool.session_closed(session, Fault.BROKEN)
        session = site.up()
    await asyncio.sleep(0)
    assert submitted(session) == [1]
    # It was on no worker, so it may be returned, and is charged for its prompt.
    assert (stream.was_returned, stream.queued.is_retry, len(stream.attempts)) == (False, False, 1)
    site.requests.close(stream)
    assert (site.requests.running.num_adopted, site.requests.running.num_unadopted) == (0, 1)
    assert site.requests.tables()["sequences"] == 0
    await site.stop()


async def test_adoption_needs_worker_of_class_with_orphans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    session = site.up()
    orphan(site, session)
    streams = [site.ask(adoption_key=b"k", resumed_from="another class")]
    session.proto_minor = 1
    orphan(site, session)
    streams.append(site.ask(adoption_key=b"k"))
    site.pool.orphans.add("elsewhere", [b"k"], 60.0)
    streams.append(site.ask(adoption_key=b"k"))
    await asyncio.sleep(0)
    (submit,) = written(session)
    assert [bytes(each.adoption_key) for each in submit.submit.seqs] == [b"", b""]
    for stream in streams:
        site.requests.close(stream)
    await site.stop()
