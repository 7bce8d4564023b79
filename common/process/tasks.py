"""Tasks that live as long as their process, and callbacks of its event loop: none of them ends in silence."""

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
    """Failures of the long-lived tasks and callbacks of this process, by name."""
    return dict(_failures)


def failed(name: str, event: str, **facts: object) -> None:
    """Counts the failure under way of what is no task of its own, and logs it with its traceback.

    Args:
        name: as of `keep_running`.
        event: says what becomes of it.
        facts: for the log.
    """
    _failures[name] += 1
    log.exception(event, task=name, **facts)


def run_guarded(name: str, act: Callable[[], object], **facts: object) -> None:
    """Runs a callback. When it raises, that is logged and counted.

    Args:
        name: of the callback, one of few: the label of a metric.
        act: what to do.
        facts: for the log.
    """
    try:
        act()
    except Exception:
        failed(name, "callback failed", **facts)


async def keep_running(name: str, work: Callable[[], Awaitable[None]], **facts: object) -> None:
    """Runs work until it returns or is cancelled. When it raises, that is logged and counted, and it begins anew.

    Args:
        name: of the task, one of few: the label of a metric.
        work: makes what is awaited, anew each time.
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
