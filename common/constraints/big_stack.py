"""Runs work on a thread with a large stack, because the grammar library recurses as deep as rules refer to each other.

A stack overflow would end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

# Address space; only used pages become memory. Enough for any grammar of MAX_GRAMMAR_BYTES.
_STACK_BYTES: Final = 256 << 20
# The stack size is a setting of the process until the thread has started.
_lock = threading.Lock()


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Starts work on a thread of its own."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)
    return result
