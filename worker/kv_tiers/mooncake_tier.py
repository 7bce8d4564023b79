"""Tier in a Mooncake Store: memory that workers of many machines share.

The client library runs in a process of its own (mooncake_process.py), because it blocks for up to 90 s and is native
code, which can end its process. A call that takes too long raises here. The slot of its value stays taken until the
process answers. A process that answers no call for longer than the library ever waits is replaced.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import IO, Final
from urllib.parse import parse_qs, urlsplit

import structlog

from common.errors import InvalidFieldError
from common.params.options.types import ByteSize
from worker.kv_tiers.mooncake_process import DROP, GET, NUM_SLOTS, PUT, REQUEST, RESULT, MooncakeSettings

log = structlog.get_logger(__name__)

# A block that takes longer than this is computed sooner.
TIMEOUT_S: Final = 1.0
# The library's longest wait, for a master that is missing at its start. One that takes longer hangs for good.
LONGEST_WAIT_S: Final = 90.0
# Longest wait for the end of a killed process: one in a system call on a network card may end later.
END_S: Final = 5.0
# Errors of Mooncake's client that are no fault: no such value, and no room.
_NO_SUCH_VALUE: Final = -704
_NO_ROOM: Final = -200
_VALID: Final = (
    "mooncake://MASTER:PORT?segment=SIZE&protocol=tcp&device=NAME&host=ADDRESS, where all behind the port may be "
    "left out, and protocol is tcp or rdma"
)
_PROTOCOLS: Final = ("tcp", "rdma")
# Lines of the library that the worker logs in a minute, and bytes of each.
LOGGED_LINES: Final = 20
_LINE_BYTES: Final = 1000


class MooncakeError(Exception):
    """Mooncake's client, or the process that holds it, has failed."""


def read_settings(url: str) -> MooncakeSettings:
    """The settings in `mooncake://MASTER:PORT?segment=SIZE&protocol=tcp|rdma&device=NAME&host=ADDRESS`.

    Raises:
        InvalidFieldError: the URL is wrong, or the package is not installed.
    """
    try:
        parts = urlsplit(url)
        given = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        is_place = bool(parts.hostname and parts.port) and parts.path in ("", "/") and "@" not in parts.netloc
        devices = ",".join(given.pop("device", []))
        named = {key: given.pop(key, [""])[-1] for key in ("segment", "protocol", "host")}
        segment_bytes = ByteSize().read(named["segment"]) if named["segment"] else 0
    except ValueError as error:
        raise InvalidFieldError("kv_tiers", f"names a Mooncake store wrongly: {error}", _VALID) from None
    protocol = named["protocol"] or _PROTOCOLS[0]
    if given or not is_place or protocol not in _PROTOCOLS:
        raise InvalidFieldError("kv_tiers", "names a Mooncake store wrongly", _VALID)
    if find_spec("mooncake") is None:
        raise InvalidFieldError(
            "kv_tiers",
            "names a Mooncake store",
            "other tiers: the package mooncake-transfer-engine-non-cuda is not installed",
        )
    return MooncakeSettings(parts.netloc, segment_bytes, protocol, devices, named["host"])


class MooncakeTier:
    """Values by name in a Mooncake Store, whose master alone chooses values to evict.

    The next call replaces a process that has ended, or that hangs.

    Args:
        settings: of the store.
        value_bytes: of a value.
        clock: monotonic seconds.
    """

    def __init__(
        self, settings: MooncakeSettings, value_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._value_bytes = value_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._client = MooncakeClient(settings, value_bytes, clock)
        self._is_closed = False

    @property
    def pid(self) -> int:
        """Id of the process that holds the client."""
        return self._client.pid

    def get(self, name: bytes) -> bytes | None:
        """The value, None without one. Raises MooncakeError."""
        code, value = self._call(GET, name, self._value_bytes)
        return None if code == _NO_SUCH_VALUE else value

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps a value, unless the name has one. False if the store has no room now. Raises MooncakeError."""
        del parent
        return self._call(PUT, name, value)[0] != _NO_ROOM

    def drop(self, name: bytes) -> None:
        """Forgets a value. Raises MooncakeError."""
        self._call(DROP, name, 0)

    def close(self) -> None:
        """Ends the process, and with it the memory that the store had from here."""
        with self._lock:
            self._is_closed = True
            self._client.close()

    def _call(self, operation: int, name: bytes, value: bytes | int) -> tuple[int, bytes]:
        with self._lock:
            if (self._client.has_ended or self._client.is_hung) and not self._is_closed:
                if self._client.is_hung:
                    log.warning("Mooncake's client hangs and is started again", silent_s=LONGEST_WAIT_S)
                self._client.close()
                self._client = MooncakeClient(self._settings, self._value_bytes, self._clock)
            client = self._client
        code, read = client.call(operation, name, value)
        if code < 0 and code not in (_NO_SUCH_VALUE, _NO_ROOM):
            raise MooncakeError(f"the client reports error {code}")
        return code, read


class MooncakeClient:
    """A process that holds Mooncake's client, its slots, and the calls that it has yet to answer.

    Args:
        settings: of the store.
        value_bytes: most bytes of a value.
        clock: monotonic seconds.

    Attributes:
        has_ended: True once the process has ended, after which no call succeeds.
    """

    def __init__(self, settings: MooncakeSettings, value_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When the last slot was taken.
        self._taken = clock()
        # Values start at pages, so that network cards can read them.
        self._width = -(-value_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(NUM_SLOTS):
            self._slots.put(slot)
        # By slot; None once the caller does not wait any more.
        self._calls: dict[int, Future[int] | None] = {}
        self._lock = threading.Lock()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("kv-tier")
        try:
            os.ftruncate(memory, NUM_SLOTS * self._width)
            self._memory = mmap.mmap(memory, 0)
            self._process = _start(theirs.fileno(), memory, settings)
        finally:
            os.close(memory)
            theirs.close()
        self.has_ended = False
        threading.Thread(target=self._receive, name="mooncake", daemon=True).start()
        assert self._process.stdout is not None
        printed = (self._process.stdout, self.pid)
        threading.Thread(target=_log_lines, args=printed, name="mooncake-log", daemon=True).start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_hung(self) -> bool:
        """True if all slots have been taken for longer than LONGEST_WAIT_S."""
        with self._lock:
            return self._slots.empty() and self._clock() - self._taken > LONGEST_WAIT_S

    def call(self, operation: int, name: bytes, value: bytes | int) -> tuple[int, bytes]:
        """Has the library do something. Returns its result, and the value that it read.

        Args:
            operation: of the process.
            name: of the value.
            value: to write, or the size of the one to read.

        Raises:
            MooncakeError: no slot is free, or the process has ended or takes too long.
        """
        try:
            with self._lock:
                slot = self._slots.get_nowait()
                self._taken = self._clock()
        except queue.Empty:
            raise MooncakeError(f"the client has not answered the last {NUM_SLOTS} calls") from None
        start, size = slot * self._width, value if isinstance(value, int) else len(value)
        if not isinstance(value, int):
            self._memory[start : start + size] = value
        answer = self._calls[slot] = Future()
        try:
            self._sock.send(REQUEST.pack(operation, slot, size, name))
        except OSError as error:
            raise MooncakeError(f"the client's process has ended: {error.strerror}") from None
        result = self._wait(slot, answer)
        read = self._memory[start : start + min(result, size)] if operation == GET and result > 0 else b""
        self._slots.put(slot)
        return result, read

    def close(self) -> None:
        """Kills the process, and waits END_S at most for its end. May be called twice."""
        self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("Mooncake's client was killed and still runs", pid=self.pid, waited_s=END_S)

    def _wait(self, slot: int, answer: Future[int]) -> int:
        """The result of a call. Leaves the slot to the process if it is late."""
        try:
            return answer.result(TIMEOUT_S)
        except TimeoutError:
            with self._lock:
                if slot in self._calls:
                    self._calls[slot] = None
                    raise MooncakeError(f"the client has not answered within {TIMEOUT_S:g} s") from None
        return answer.result()

    def _receive(self) -> None:
        """Reads results until the process ends; all calls then fail."""
        with contextlib.suppress(OSError):
            while message := self._sock.recv(RESULT.size):
                slot, result = RESULT.unpack(message)
                with self._lock:
                    answer = self._calls.pop(slot)
                if answer is None:
                    self._slots.put(slot)
                else:
                    answer.set_result(result)
        self.has_ended = True
        self._sock.close()
        with self._lock:
            left, self._calls = self._calls, {}
        for answer in filter(None, left.values()):
            answer.set_exception(MooncakeError("the client's process has ended"))


def _start(sock: int, memory: int, settings: MooncakeSettings) -> subprocess.Popen[bytes]:
    """Starts the process, which ends with this thread."""
    module, own = "worker.kv_tiers.mooncake_process", str(os.getpid())
    command = [sys.executable, "-m", "common.process.exec_child", own, module, str(sock), str(memory)]
    # The library logs each refused call, which is counted here.
    environment = {"MC_LOG_LEVEL": "ERROR", **os.environ}
    return subprocess.Popen(
        [*command, settings.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(sock, memory),
        env=environment,
    )


def _log_lines(printed: IO[bytes], pid: int) -> None:
    """Logs the lines that the process prints, and reads those over the limit too, so that printing never blocks it."""
    minute, number = 0.0, 0
    with printed:
        while line := printed.readline(_LINE_BYTES):
            now = time.monotonic() // 60
            minute, number = now, number + 1 if now == minute else 1
            if number <= LOGGED_LINES:
                log.warning("Mooncake's client printed a line", pid=pid, line=line.decode(errors="replace").strip())
