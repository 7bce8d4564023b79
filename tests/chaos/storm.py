"""A storm over two routers and three unlike workers: many clients that compare every token, and faults at random.

The clients know each answer from an undisturbed run before the storm. A stream that ends with OK must be that answer,
any other one must be its beginning; every call ends, with a status that the contract names; every request that reached
a router whose log could be written has one line there. Faults are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2, status_pb2

from tests.chaos.raw_http2 import PREFACE
from tests.chaos.support import SMALL_WINDOW, open_files, until
from tests.e2e.service import REPOSITORY, Answer, Process, generate

# A call that has not ended so long after its deadline hangs.
HANGS_AFTER_S: Final = 15.0
ENDED: Final = "request ended"
# HTTP/2's REFUSED_STREAM, in gRPC's words.
REFUSED: Final = "RST_STREAM with error code 7"
# What a client may meet in a storm. No INTERNAL and no UNKNOWN: nothing fails but machines.
DOCUMENTED: Final = {
    grpc.StatusCode.OK,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and the answer that it has."""

    request: pb.GenerateRequest
    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Seen:
    """How one call ended: its status, the reason in its ErrorInfo or the field in its BadRequest, and when.

    `router` is the router's process that it was sent to; `cancelled`: by the client.
    """

    request_id: str
    router: StormProcess
    life: int
    began: float
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str = ""
    details: str = ""
    tokens: int = 0
    ended: float = 0.0
    attempts: int = 0
    cancelled: bool = False


@dataclass
class StormProcess(Process):
    """A router or worker whose standard error can break and whose descriptors can be few.

    Attributes:
        life: how often it has been started.
        most_files: RLIMIT_NOFILE, soft and hard; 0 leaves it.
        full_disk: its standard error is /dev/full from the next start on.
        down: periods of time in which it did not run, or was about to end; the last one may go on (infinite).
        crowded: periods of time in which it may have had as many connections as it takes.
        unlogged: lives whose log could not be written to its end.
    """

    life: int = 0
    most_files: int = 0
    full_disk: bool = False
    down: list[list[float]] = field(default_factory=list)
    crowded: list[list[float]] = field(default_factory=list)
    unlogged: set[int] = field(default_factory=set)
    _copier: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process, with a pipe as standard error that another process copies to the log."""
        self.life += 1
        if self.full_disk:
            self.unlogged.add(self.life)
            with Path("/dev/full").open("wb") as full:
                self.child = self._spawn(full.fileno())
        else:
            reader, writer = os.pipe()
            with self.log.open("ab") as log:
                self._copier = subprocess.Popen(["cat"], stdin=reader, stdout=log)
            self.child = self._spawn(writer)
            os.close(reader)
            os.close(writer)

    def _spawn(self, stderr: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *self.arguments]
        if self.most_files:
            command = ["prlimit", f"--nofile={self.most_files}:{self.most_files}", *command]
        environment = {**os.environ, **self.environment}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)

    def break_log(self) -> None:
        """Ends the reader of its standard error: from now on a write of the process fails with EPIPE."""
        if self._copier is not None:
            self.unlogged.add(self.life)
            self._copier.kill()
            self._copier.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; one that ends the process begins a time in which it is down."""
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.down.append([time.monotonic(), math.inf])
        if number is signal.SIGKILL:
            self.unlogged.add(self.life)
        if self.running.poll() is None:
            self.running.send_signal(number)

    def is_back(self) -> None:
        """Ends the time in which it was down."""
        if self.down:
            self.down[-1][1] = time.monotonic()

    def was_down(self, since: float, until: float) -> bool:
        """True if it did not run at some time of a period."""
        return _meets(self.down, since, until)

    def was_crowded(self, since: float, until: float) -> bool:
        """True if it may have refused connections at some time of a period."""
        return _meets(self.crowded, since, until)


def _meets(periods: Sequence[Sequence[float]], since: float, until: float) -> bool:
    return any(begin <= until and since <= end for begin, end in periods)


@dataclass
class Storm:
    """What goes on: processes, the answers that are known, and how every call has ended.

    Attributes:
        routers: the first one is never ended, so its memory and its log tell of the whole storm.
        workers: three of one model, with unlike options.
        known: requests and their answers.
        seen: every call that has ended.
        wrong: what contradicts the promise, in words.
        faults: how often each fault came.
    """

    routers: list[StormProcess]
    workers: list[StormProcess]
    known: list[Known]
    seed: int
    seen: list[Seen] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    _number: int = 0

    async def run(self, seconds: float, clients: int, burst: int) -> None:
        """Lets clients and faults loose on the service for some time, then waits for the last call to end."""
        end = time.monotonic() + seconds
        work = [self._client(i, end) for i in range(clients)]
        work += [self._crowds(end, burst), self._rude_clients(end)]
        work.append(self._faults(end, self._kill_worker, self._freeze_worker, self._end_worker, self._break_log))
        work.append(self._faults(end, self._kill_router, self._freeze_router, self._end_router, self._break_router_log))
        await asyncio.gather(*work)
        await self._calm()

    async def ask(self, router: StormProcess, stub: Any, known: Known, within_s: float, cancel_after: int = 0) -> Seen:
        """Makes one call, and compares what comes with what must come.

        Args:
            router: the router that `stub` calls.
            stub: client of the router.
            known: the request and its answer.
            within_s: deadline of the call, seconds from now.
            cancel_after: the client cancels after so many messages; 0 is never.
        """
        self._number += 1
        request = pb.GenerateRequest()
        request.CopyFrom(known.request)
        request.request_id = f"storm-{self.seed}-{self._number}"
        seen = Seen(request.request_id, router, router.life, time.monotonic())
        answer = Answer()
        call = stub.Generate(request, timeout=within_s)
        try:
            async with asyncio.timeout(within_s + HANGS_AFTER_S):
                await _read(call, answer, seen, cancel_after)
                seen.code = await call.code()
        except TimeoutError:
            self.wrong.append(f"{request.request_id} hangs")
        except grpc.aio.AioRpcError as error:
            _note_error(seen, error)
        except asyncio.CancelledError:
            seen.code = grpc.StatusCode.CANCELLED
        finally:
            call.cancel()
        seen.ended = time.monotonic()
        seen.tokens = len(answer.token_ids)
        self._compare(seen, known, answer)
        self.seen.append(seen)
        return seen

    def _compare(self, seen: Seen, known: Known, answer: Answer) -> None:
        got = tuple(answer.token_ids)
        if seen.code is grpc.StatusCode.OK and not seen.cancelled:
            if answer.finish is None:
                self.wrong.append(f"{seen.request_id} is OK without a finish")
            elif (got, answer.text) != (known.token_ids, known.text):
                self.wrong.append(f"{seen.request_id} has another answer")
            else:
                seen.attempts = answer.finish.attempts
        elif got != known.token_ids[: len(got)] or not known.text.startswith(answer.text):
            self.wrong.append(f"{seen.request_id} is no beginning of its answer")
        if not is_documented(seen):
            self.wrong.append(f"{seen.request_id} ended with {seen.code.name} {seen.reason!r}: {seen.details[:200]}")

    async def _client(self, number: int, end: float) -> None:
        """Asks one request after the other, now and then in a hurry or without patience."""
        draw = random.Random(f"{self.seed} client {number}")
        async with contextlib.AsyncExitStack() as open_channels:
            stubs = [(router, await open_channels.enter_async_context(_stub(router))) for router in self.routers]
            while time.monotonic() < end:
                router, stub = draw.choice(stubs)
                timeout = draw.choice((0.2, 2.0, 60.0, 60.0, 60.0, 60.0))
                cancel_after = draw.randint(1, 20) if draw.random() < 0.1 else 0
                seen = await self.ask(router, stub, draw.choice(self.known), timeout, cancel_after)
                if seen.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    await asyncio.sleep(0.2 + draw.random())

    async def _faults(self, end: float, *kinds: Callable[[random.Random], Awaitable[None]]) -> None:
        """Does one of the faults after the other, each as often as the others, in random order."""
        draw = random.Random(f"{self.seed} {[kind.__name__ for kind in kinds]}")
        while True:
            for kind in draw.sample(kinds, len(kinds)):
                if time.monotonic() > end:
                    return
                await asyncio.sleep(draw.uniform(0.2, 1.0))
                self.faults[kind.__name__.strip("_")] += 1
                await kind(draw)

    async def _kill_worker(self, draw: random.Random) -> None:
        await self._restart(draw.choice(self.workers), signal.SIGKILL, draw)

    async def _end_worker(self, draw: random.Random) -> None:
        await self._restart(draw.choice(self.workers), signal.SIGTERM, draw)

    async def _kill_router(self, draw: random.Random) -> None:
        await self._restart(self.routers[1], signal.SIGKILL, draw)

    async def _end_router(self, draw: random.Random) -> None:
        await self._restart(self.routers[1], signal.SIGTERM, draw)

    async def _freeze_worker(self, draw: random.Random) -> None:
        await _freeze(draw.choice(self.workers), draw.uniform(0.3, 4.0))

    async def _freeze_router(self, draw: random.Random) -> None:
        await _freeze(self.routers[1], draw.uniform(0.3, 3.0))

    async def _break_log(self, draw: random.Random) -> None:
        draw.choice(self.workers).break_log()

    async def _break_router_log(self, draw: random.Random) -> None:
        self.routers[1].break_log()

    async def _restart(self, process: StormProcess, number: signal.Signals, draw: random.Random) -> None:
        process.send(number)
        code = await asyncio.to_thread(process.running.wait, 60)
        if number is signal.SIGTERM and code:
            self.wrong.append(f"{process.name} ended with exit code {code} on SIGTERM")
        await asyncio.sleep(draw.uniform(0.0, 1.0))
        process.full_disk = draw.random() < 0.3
        process.start()
        await asyncio.to_thread(wait_listening, process)
        process.is_back()

    async def _crowds(self, end: float, burst: int) -> None:
        """Sends many calls at once, and calls whose text is far too long."""
        draw = random.Random(f"{self.seed} crowds")
        short = min(self.known, key=lambda known: len(known.token_ids))
        while time.monotonic() < end:
            await asyncio.sleep(draw.uniform(4.0, 10.0))
            router = draw.choice(self.routers)
            self.faults["burst"] += 1
            async with _stub(router) as stub:
                await asyncio.gather(*(self.ask(router, stub, short, 60.0) for _ in range(burst)))
            self.faults["long_text"] += 1
            async with _stub(router) as stub:
                await asyncio.gather(*(self._long_text(router, stub) for _ in range(4)))

    async def _long_text(self, router: StormProcess, stub: Any) -> None:
        request = pb.GenerateRequest(text="1234567890" * 800_000)
        known = Known(request, (), "")
        seen = await self.ask(router, stub, known, 20.0)
        if seen.code is grpc.StatusCode.OK:
            self.wrong.append(f"{seen.request_id}: a text of 8 MB was accepted")

    async def _rude_clients(self, end: float) -> None:
        """Holds connections that say nothing, and streams that nobody reads."""
        draw = random.Random(f"{self.seed} rude")
        longest = max(self.known, key=lambda known: len(known.token_ids))
        while time.monotonic() < end:
            await asyncio.sleep(draw.uniform(3.0, 8.0))
            self.faults["idle_connections"] += 1
            self.routers[0].crowded.append([time.monotonic(), math.inf])
            held = await asyncio.to_thread(lambda: [*_idle(self.routers[0], 400)])
            self.faults["unread_streams"] += 8
            own = [*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1)]
            unread = grpc.insecure_channel(self.routers[0].address, options=own)
            calls = [InferenceServiceStub(unread).Generate(longest.request) for _ in range(8)]
            await asyncio.sleep(draw.uniform(2.0, 6.0))
            for call in calls:
                call.cancel()
            unread.close()
            for connection in held:
                connection.close()
            # A router that is behind closes them later.
            await asyncio.to_thread(until, lambda: open_files(self.routers[0]) < self.routers[0].most_files // 2)
            self.routers[0].crowded[-1][1] = time.monotonic() + 1.0

    async def _calm(self) -> None:
        """Waits until every process runs again and serves."""
        for process in [*self.workers, *self.routers]:
            process.running.send_signal(signal.SIGCONT)
            await asyncio.to_thread(process.wait_serving)

    def unexplained(self) -> list[str]:
        """Requests without exactly one line in the log of their router that says how they ended.

        Left out: calls that a router never had (it was down), and those of a life whose log could not be written.
        """
        problems = []
        for router in self.routers:
            lines: dict[str, list[str]] = {}
            for entry in entries(router.log):
                if entry.get("event") == ENDED:
                    lines.setdefault(str(entry.get("request_id")), []).append(str(entry.get("status")))
            for seen in self.seen:
                if seen.router is not router or not _must_be_logged(seen):
                    continue
                found = lines.get(seen.request_id, [])
                same = seen.code.name in found or seen.cancelled or seen.code is grpc.StatusCode.DEADLINE_EXCEEDED
                if len(found) > 1 or (not (found and same) and not _may_be_unknown(seen, found)):
                    problems.append(f"{seen.request_id} ended with {seen.code.name}, its log lines: {found}")
        return problems

    def codes(self) -> Counter[str]:
        """How many calls ended with each status; those that their client cancelled by themselves."""
        return Counter(
            " ".join(filter(None, (seen.code.name, seen.reason, "by client" if seen.cancelled else "")))
            for seen in self.seen
        )

    def bare(self) -> Counter[str]:
        """What gRPC itself has said of calls that ended without a word of a router, numbers left out."""
        said = (
            f"{seen.code.name} {re.sub('[^A-Za-z ]+', '', seen.details)[:60]}"
            for seen in self.seen
            if seen.code is not grpc.StatusCode.OK and not seen.reason and not seen.cancelled
        )
        return Counter(said)

    def kinds(self) -> Counter[str]:
        """How often the promise was broken in each way."""
        return Counter(problem.partition(" ")[2] for problem in self.wrong)


def is_documented(seen: Seen) -> bool:
    """True if a client may meet this status."""
    if seen.code not in DOCUMENTED:
        return False
    if seen.code in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED) or seen.reason:
        return True
    if seen.code is grpc.StatusCode.CANCELLED:
        return seen.cancelled or (not seen.tokens and _never_came(seen))
    # A call that gRPC has refused for being one too many of its connection is not a call that met a router's end.
    return seen.code is grpc.StatusCode.UNAVAILABLE and REFUSED not in seen.details and _never_came(seen)


def _never_came(seen: Seen) -> bool:
    """True if the router was not there for the call: it had gone, or it took no more connections."""
    # A channel that could not connect says so for a while without trying again.
    since = seen.began - (10.0 if seen.details.startswith("failed to connect") else 1.0)
    return seen.router.was_down(since, seen.ended) or seen.router.was_crowded(since, seen.ended)


def _must_be_logged(seen: Seen) -> bool:
    """True if the router had the call, and a log that could be written."""
    if seen.life in seen.router.unlogged or seen.router.was_down(seen.began - 1.0, seen.ended):
        return False
    return bool(seen.reason) or seen.code is not grpc.StatusCode.UNAVAILABLE


def _may_be_unknown(seen: Seen, found: list[str]) -> bool:
    """True for a call that may have ended before its request was read: past its deadline, or cancelled at once."""
    return not found and (seen.cancelled or seen.code is grpc.StatusCode.DEADLINE_EXCEEDED) and not seen.tokens


async def _read(call: Any, answer: Answer, seen: Seen, cancel_after: int) -> None:
    async for part in call:
        answer.add(part)
        if answer.messages == cancel_after and answer.finish is None:
            seen.cancelled = True
            call.cancel()


def _note_error(seen: Seen, error: grpc.aio.AioRpcError) -> None:
    seen.code, seen.details = error.code(), error.details() or ""
    # The same details as `rpc_status.from_call` reads, which takes synchronous calls only.
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            for packed in status.details:
                if packed.Unpack(info):
                    seen.reason = info.reason
                elif packed.Unpack(bad):
                    seen.reason = seen.reason or "/".join(each.field for each in bad.field_violations)


@contextlib.asynccontextmanager
async def _stub(router: StormProcess) -> AsyncIterator[Any]:
    """A client with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
    async with grpc.aio.insecure_channel(router.address, options=options) as channel:
        yield InferenceServiceStub(channel)


async def _freeze(process: StormProcess, seconds: float) -> None:
    process.running.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    process.running.send_signal(signal.SIGCONT)


def _idle(router: StormProcess, count: int) -> Iterator[socket.socket]:
    """Connections that begin HTTP/2 and say nothing more; fewer when the router takes no more."""
    for _ in range(count):
        try:
            connection = socket.create_connection(("127.0.0.1", router.port), timeout=1)
        except OSError:
            return
        with contextlib.suppress(OSError):
            connection.sendall(PREFACE + bytes.fromhex("000000040000000000"))
        yield connection


def wait_listening(process: StormProcess, within_s: float = 60.0) -> None:
    """Waits until a process takes connections.

    Raises:
        AssertionError: it has ended, or does not listen in time.
    """
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", process.port), timeout=1):
            return
        assert process.running.poll() is None, f"{process.name} has ended with exit code {process.running.poll()}"
        assert time.monotonic() < end, f"{process.name} does not listen"
        time.sleep(0.05)


def entries(log: Path) -> list[dict[str, Any]]:
    """Log lines of a file, without those that are cut or none of ours."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            found += [entry] if isinstance(entry, dict) else []
    return found


def known_answers(router: Process, requests: Sequence[pb.GenerateRequest]) -> list[Known]:
    """Asks the requests one by one, before the storm."""
    with grpc.insecure_channel(router.address) as channel:
        answers = [generate(InferenceServiceStub(channel), request) for request in requests]
    return [
        Known(request, tuple(answer.token_ids), answer.text) for request, answer in zip(requests, answers, strict=True)
    ]
