"""Queued standard error and output: writers never wait for the stream, because a thread of its own writes to it.

A pipe whose reader has ended or stopped reading, a full disk, a lost terminal: none of them raises into a writer, and
none makes it wait. Invariants:
  * `Output.put` neither raises nor waits for the stream.
  * Pieces are written in order, each by one system call if the system takes it whole.
  * The first piece after a quiet time is written at once. Later ones gather for up to GATHER_S: waking the thread for
      each piece would cost more than writing it.
  * Dropped pieces are counted (`dropped`), and one line reports them as soon as the stream can be written again.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import io
import itertools
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TextIO

from common.limits import MAX_OUTPUT_BYTES, MAX_OUTPUT_PIECES, OUTPUT_DRAIN_S

# How long pieces gather after a write, seconds.
GATHER_S: Final = 0.01
# Most bytes of pieces that are written together: as many as a pipe takes whole beside other writers.
_TOGETHER_BYTES: Final = select.PIPE_BUF
# Pause between tries to write to a stream that returns EAGAIN, seconds.
_RETRY_S: Final = 0.1


def _plain_notice(count: int) -> str:
    return f"{count} lines could not be written here and are lost\n"


class Output:
    """Queue and writing thread of one stream. A stream in memory, which cannot block, is written at once.

    Args:
        stream: destination; only its file descriptor is used if it has one.
        max_pieces: most pieces in the queue; further ones are dropped.
        max_bytes: most bytes in the queue.

    Attributes:
        notice: makes the line that reports a number of lost pieces.
        dropped: pieces that were not written.
    """

    def __init__(self, stream: TextIO, max_pieces: int = MAX_OUTPUT_PIECES, max_bytes: int = MAX_OUTPUT_BYTES) -> None:
        self.notice: Callable[[int], str] = _plain_notice
        self.dropped = 0
        self._stream = stream
        self._in_memory = descriptor_of(stream) is None
        self._max_pieces = max_pieces
        self._max_bytes = max_bytes
        self._begin()
        _outputs.add(self)

    def _begin(self) -> None:
        """Resets to an empty queue without a thread: at the start, and in a forked process."""
        # Reentrant, because a signal handler or a finalizer may write in the middle of `put`.
        self._lock = threading.RLock()
        # Wakes the writing thread, and callers that wait for it.
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._is_idle = False
        self._drains = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._taken = 0
        self._given_up = -1
        self._unsaid = 0
        self._is_torn = False
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Queues a piece, or drops it."""
        try:
            if self._in_memory:
                self._stream.write(text)
            else:
                self._queue(text.encode("utf-8", "backslashreplace"))
        except Exception:
            # No memory, no thread, or a closed stream.
            self._count()

    def drain(self, timeout_s: float = OUTPUT_DRAIN_S) -> bool:
        """Waits until everything is written, at most `timeout_s`. False if it was not.

        A stream on which nothing has moved since the last wait is not waited for again.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            self._drains += 1
            self._work.notify()
            try:
                while self._waiting and self._thread is not None and self._given_up != self._taken:
                    left = end - time.monotonic()
                    if left <= 0:
                        self._given_up = self._taken
                    self._progress.wait(max(0.0, left))
            finally:
                self._drains -= 1
            return not self._waiting

    def _queue(self, piece: bytes) -> None:
        with self._lock:
            if len(self._waiting) >= self._max_pieces or self._waiting_bytes + len(piece) > self._max_bytes:
                self._count()
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="output", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(piece)
            self._waiting_bytes += len(piece)
            if self._is_idle:
                self._work.notify()

    def _count(self, pieces: int = 1) -> None:
        with self._lock:
            self.dropped += pieces
            self._unsaid += pieces

    def _run(self) -> None:
        while True:
            pieces = self._next_pieces()
            if lost := len(pieces) - self._write(pieces):
                self._count(lost)
            elif self._unsaid and len(self._waiting) == len(pieces):
                self._say_lost()
            self._forget(pieces)

    def _next_pieces(self) -> list[bytes]:
        """Waits for the next pieces, which stay in the queue until they are written."""
        with self._lock:
            while not self._waiting:
                self._is_idle = True
                self._work.wait()
            self._is_idle = False
            pieces, size = [self._waiting[0]], len(self._waiting[0])
            # By number, because a finalizer that runs here may add pieces.
            for i in range(1, len(self._waiting)):
                size += len(self._waiting[i])
                if size > _TOGETHER_BYTES:
                    break
                pieces.append(self._waiting[i])
            return pieces

    def _forget(self, pieces: list[bytes]) -> None:
        """Removes written pieces. New ones gather for a while, unless a caller waits for the queue to empty."""
        with self._lock:
            for piece in pieces:
                self._waiting.popleft()
                self._waiting_bytes -= len(piece)
            self._taken += len(pieces)
            self._progress.notify_all()
            if self._waiting_bytes < _TOGETHER_BYTES and not self._drains:
                self._work.wait(GATHER_S)

    def _say_lost(self) -> None:
        count = self._unsaid
        try:
            line = self.notice(count)
        except Exception:
            line = _plain_notice(count)
        if self._write([line.encode("utf-8", "backslashreplace")]):
            with self._lock:
                self._unsaid -= count

    def _write(self, pieces: Sequence[bytes]) -> int:
        """Writes pieces, however long that takes. Returns how many were written: all, unless the stream failed."""
        data = b"".join((b"\n", *pieces) if self._is_torn else pieces)
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._stream.fileno(), left) :]
            except BlockingIOError:
                self._wait_writable()
            except (OSError, ValueError):
                return self._num_whole(pieces, len(data) - len(left))
        self._is_torn = False
        return len(pieces)

    def _num_whole(self, pieces: Sequence[bytes], written: int) -> int:
        """Number of pieces that are whole in the first `written` bytes. After half a piece the next one begins a new
        line."""
        if not written:
            return 0
        written -= self._is_torn
        ends = list(itertools.accumulate(map(len, pieces)))
        self._is_torn = written not in (0, *ends)
        return bisect.bisect(ends, written)

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._stream.fileno(), select.POLLOUT)
        # A descriptor may poll as writable and take nothing; without a pause the loop would spin.
        if poll.poll(1000 * _RETRY_S):
            time.sleep(_RETRY_S / 10)


_outputs: weakref.WeakSet[Output] = weakref.WeakSet()
_of_stream: weakref.WeakKeyDictionary[TextIO, Output] = weakref.WeakKeyDictionary()


class OutputStream(io.TextIOBase):
    """Text stream in front of an `Output`, for `sys.stderr` and `sys.stdout`: written line by line, and at every
    `flush`.

    Args:
        stream: the original stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.output = output_of(stream)
        self._stream = stream
        self._line = ""
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the output."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Error handler for characters that cannot be encoded."""
        return "backslashreplace"

    def writable(self) -> bool:
        """True, always."""
        return True

    def isatty(self) -> bool:
        """True if the original stream is a terminal."""
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """The original stream's descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Queues text; never raises what the stream would."""
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes str, not {type(text).__name__}")
        with self._lock:
            self._line += text
            if "\n" in text:
                lines, end, self._line = self._line.rpartition("\n")
                self.output.put(lines + end)
        return len(text)

    def flush(self) -> None:
        """Queues the beginning of an unfinished line; does not wait."""
        with self._lock:
            line, self._line = self._line, ""
        if line:
            self.output.put(line)

    def close(self) -> None:
        """Does nothing: a process keeps its standard streams until it ends."""


def output_of(stream: TextIO) -> Output:
    """The one `Output` of a stream."""
    if isinstance(stream, OutputStream):
        return stream.output
    found = _of_stream.get(stream)
    if found is None:
        found = _of_stream[stream] = Output(stream)
    return found


def descriptor_of(stream: TextIO) -> int | None:
    """The descriptor of a stream; None without one."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def guard_standard_streams() -> None:
    """Puts an `Output` in front of the standard error and output of a serving process.

    Tracebacks, warnings and prints of libraries then go the same way as log lines. Native code that writes to the
    descriptors directly does not.
    """
    open_missing_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, OutputStream):
            setattr(sys, name, OutputStream(stream))


def open_missing_streams() -> None:
    """Opens /dev/null for standard streams that were closed at the start.

    Otherwise the next socket would get their descriptor, and native code's writes to standard error would go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_open(number):
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # to the process's end


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def drain_outputs(timeout_s: float = OUTPUT_DRAIN_S) -> None:
    """Waits until everything queued before is written, a bounded time. Call it before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, OutputStream):
            stream.flush()
    for output in list(_outputs):
        output.drain(timeout_s)


def in_order(other: TextIO) -> None:
    """Waits until another stream's queue is written, so that lines of both stay in order. Waits for a stuck stream only
    once."""
    if isinstance(other, OutputStream):
        other.flush()
        other.output.drain()


def dropped_pieces() -> int:
    """Pieces of this process that were not written, over all streams."""
    return sum(output.dropped for output in list(_outputs))


def _begin_anew() -> None:
    for output in list(_outputs):
        output._begin()


def exit_now(code: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown, after writing what is queued."""
    with contextlib.suppress(Exception):
        drain_outputs()
    os._exit(code)


atexit.register(drain_outputs)
os.register_at_fork(after_in_child=_begin_anew)
