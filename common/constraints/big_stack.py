"""Work on a thread with a large stack: the library of grammars recurses as deep as rules refer to each other, and what
overflows a stack ends the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

# Address space, of which what is used becomes memory; enough for what MAX_GRAMMAR_BYTES of text can say.
_STACK_BYTES: Final = 256 << 20
# The size is one for the process, until a thread has begun.
_lock = threading.Lock()


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Begins work on a thread of its own."""
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
