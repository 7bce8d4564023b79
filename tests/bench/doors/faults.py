"""What happens to streams behind each door: kill -9 of a process, overload, and a client that stops reading."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from tests.bench.doors.clients import DoorClient, Outcome, StreamEnd, client_of
from tests.bench.doors.stacks import FAULTED, TITLES, Door, Entry, RunningDoors, running_doors
from tests.bench.router.bed import cpu_s, rss_mib
from tests.e2e.service import Service

STREAMS: Final = 16
_STEP: Final = "fixed:20ms"
# One may lose its sidecar and another one be killed, and streams still have a place.
_WORKERS: Final = 3
_TOKENS: Final = 100
# Overload: this many requests at once for the places of three workers, and how long each client waits.
_PLACES: Final = 16
_CROWD: Final = 256
_PATIENCE_S: Final = 5.0
# The long answer of a client that stops reading, with logprobs so that it is larger than the kernel's buffers; for how
# long it stops, and the short answers beside it.
_LONG: Final = 6_000
_LOGPROBS: Final = 5
_PAUSE_S: Final = 6.0
_BESIDE: Final = 8
_SHORT: Final = 128


def fault_entries(names: Sequence[str]) -> Iterator[Entry]:
    """Rows of a result: each door in turn, over workers of its own."""
    for name in names:
        options = ["--max-num-seqs", str(_PLACES)]
        with running_doors([name], _STEP, workers=_WORKERS, routers=2, options=options) as running:
            found = asyncio.run(_faults(TITLES[name], running.doors[name], running.service))
        yield from found


async def _faults(title: str, door: Door, service: Service) -> list[Entry]:
    """All faults of one door; those that end a process come last."""
    async with client_of(door) as client:
        texts = await _texts(client)
        found = await _overload(title, client, service, texts[0])
        # From the workers to the client, so that each fault finds the processes before it alive.
        parts = {"worker": [each.running.pid for each in service.workers], **dict(reversed([*door.parts.items()]))}
        for part, pids in parts.items():
            print(f"kill -9 of a {part}: {title}", file=sys.stderr)
            outcome = await _kill(client, pids, texts)
            found += _entries(f"kill -9 of a {part}", title, outcome, outcome.seen)
    return found


async def _texts(client: DoorClient) -> list[str]:
    """The answers without a fault."""
    ends = [StreamEnd() for _ in range(STREAMS)]
    await asyncio.gather(*(client.read(end, seed, _TOKENS) for seed, end in enumerate(ends)))
    if errors := {end.error for end in ends if end.error}:
        raise RuntimeError(f"answers without a fault failed: {', '.join(errors)}")
    return [end.text for end in ends]


async def _overload(title: str, client: DoorClient, service: Service, text: str) -> list[Entry]:
    """Far more requests than places, whose clients leave in the end; then one more request."""
    print(f"overload: {title}", file=sys.stderr)
    ends = [StreamEnd() for _ in range(_CROWD)]
    await asyncio.gather(*(client.read(end, 0, _TOKENS, timeout_s=_PATIENCE_S) for end in ends))
    outcome = Outcome.from_ends(ends, [text] * _CROWD)
    began, late = time.monotonic(), StreamEnd()
    await client.read(late, 0, 1)
    waited_s = time.monotonic() - began
    for index in range(len(service.workers)):
        await asyncio.to_thread(service.wait_idle, index)
    said = late.error or f"an answer after {waited_s:.1f} s"
    return _entries("overload", title, outcome, f"{outcome.seen}; the next request: {said}")


async def _kill(client: DoorClient, pids: Sequence[int], texts: Sequence[str]) -> Outcome:
    """Kills the busiest of these processes when each stream has begun."""
    cpu = {pid: cpu_s(pid) for pid in pids}
    ends = [StreamEnd() for _ in texts]
    async with asyncio.TaskGroup() as group:
        for seed, end in enumerate(ends):
            group.create_task(client.read(end, seed, _TOKENS))
        for end in ends:
            await end.begun.wait()
        os.kill(max(pids, key=lambda pid: cpu_s(pid) - cpu[pid]), signal.SIGKILL)
    return Outcome.from_ends(ends, texts)


def slow_reader_entries(running: RunningDoors) -> Iterator[Entry]:
    """Rows of a result: a client stops reading a long answer while others read short ones."""
    for name, door in running.doors.items():
        if name in FAULTED:
            print(f"a reader that stops: {TITLES[name]}", file=sys.stderr)
            yield from asyncio.run(_slow_reader(TITLES[name], door))


async def _slow_reader(title: str, door: Door) -> list[Entry]:
    async with client_of(door) as client:
        known = [StreamEnd() for _ in range(_BESIDE)]
        await asyncio.gather(*(client.read(end, seed, _SHORT) for seed, end in enumerate(known)))
        whole, slow = StreamEnd(), StreamEnd()
        await client.read(whole, _BESIDE, _LONG, logprobs=_LOGPROBS)
        before = sum(map(rss_mib, door.pids))
        paused = asyncio.create_task(client.read(slow, _BESIDE, _LONG, logprobs=_LOGPROBS, pause_s=_PAUSE_S))
        ends: list[StreamEnd] = []
        last = time.monotonic() + _PAUSE_S - 1.0
        while time.monotonic() < last:
            turn = [StreamEnd() for _ in known]
            await asyncio.gather(*(client.read(end, seed, _SHORT) for seed, end in enumerate(turn)))
            ends += turn
        grown = sum(map(rss_mib, door.pids)) - before
        await paused
    outcome = Outcome.from_ends(ends, [end.text for end in known] * (len(ends) // _BESIDE))
    own = Outcome.from_ends([slow], [whole.text])
    said = own.seen if own.failed else "another text" if own.changed else "its whole answer"
    return _entries("a reader that stops", title, outcome, f"{outcome.seen}; the reader got {said}; {grown:+.0f} MiB")


def _entries(fault: str, title: str, outcome: Outcome, seen: str) -> list[Entry]:
    labels = {"fault": fault, "door": title, "seen": seen, "unit": "answers"}
    counts = {"survived": outcome.whole, "changed": outcome.changed, "failed": outcome.failed}
    return [{**labels, "metric": metric, "value": value} for metric, value in counts.items()]
