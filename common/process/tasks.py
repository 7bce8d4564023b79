"""Tasks that live as long as their process, and callbacks of its event loop: every failure is logged and counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import structlog

from common.limits import TASK_FORGIVEN_S, TASK_RESTART_MAX_S, TASK_RESTART_S

log = structlog.get_logger(__name__)

_failures: Counter[str] = Counter()


def task_failures() -> Mapping[str, int]:
    """Number of failures of this process's long-lived tasks and callbacks, by name."""
    return dict(_failures)


def failed(name: str, event: str, **facts: object) -> None:
    """Counts and logs the exception that is being handled, for code that is not a task of its own.

    Args:
        name: as for `keep_running`.
        event: says what happens now.
        facts: for the log.
    """
    _failures[name] += 1
    log.exception(event, task=name, **facts)


def run_guarded(name: str, act: Callable[[], object], **facts: object) -> None:
    """Runs a callback; logs and counts its exception.

    Args:
        name: of the callback; the label of a metric, so there must be few.
        act: the callback.
        facts: for the log.
    """
    try:
        act()
    except Exception:
        failed(name, "callback failed", **facts)


async def keep_running(name: str, work: Callable[[], Awaitable[None]], **facts: object) -> None:
    """Runs work until it returns or is cancelled. An exception is logged and counted, and the work starts again.

    Args:
        name: of the task; the label of a metric, so there must be few.
        work: returns the awaitable, a new one for each start.
        facts: for the log.
    """
    delay_s = TASK_RESTART_S
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Exception:
            if time.monotonic() - began > TASK_FORGIVEN_S:
                delay_s = TASK_RESTART_S
            failed(name, "task failed; restarting it", after_s=delay_s, **facts)
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, TASK_RESTART_MAX_S)
