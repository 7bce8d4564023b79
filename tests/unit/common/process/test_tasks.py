"""A failed long-lived task is logged, counted and restarted."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from common.process import tasks
from common.process.tasks import keep_running, run_guarded, task_failures
from common.telemetry.logs import setup_logging


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "TASK_RESTART_S", 0.001)
    monkeypatch.setattr(tasks, "TASK_RESTART_MAX_S", 0.004)
    yield
    structlog.reset_defaults()


async def test_failed_task_is_logged_counted_and_restarted() -> None:
    stream, runs = io.StringIO(), 0
    setup_logging(stream=stream, format="json")

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 6:
            raise KeyError("a bug")

    await keep_running("test task", work, worker="w")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert task_failures()["test task"] == 5
    assert [line["after_s"] for line in lines] == [0.001, 0.002, 0.004, 0.004, 0.004]
    assert {(line["task"], line["worker"]) for line in lines} == {("test task", "w")}
    assert all("KeyError" in line["exception"] for line in lines)


async def test_cancelled_task_is_not_restarted() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(keep_running("cancelled", work))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "cancelled" not in task_failures()


def test_callback_that_fails_is_logged_and_counted() -> None:
    """Regression: an event loop reports it only to asyncio's own log."""
    with capture_logs() as logs:
        run_guarded("test callback", lambda: 1 / 0, router="r")
        run_guarded("test callback", lambda: None)
    assert task_failures()["test callback"] == 1
    assert [(line["task"], line["router"]) for line in logs] == [("test callback", "r")]
