"""What each door takes for the same streams: CPU of its processes, time to first token, tokens per second."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import uvloop

from tests.bench.doors.stacks import TITLES, Door, Entry, RunningDoors
from tests.bench.peers import noise
from tests.bench.router import bed
from tests.bench.router.bed import cpu_s, rss_mib
from tests.bench.router.load import COUNTERS, HTTP, PATHS, Plan, bodies, final_tokens
from tests.bench.router.wire import Connection, GrpcConnection, SseConnection
from tests.e2e.service import Service

_PROMPT_TOKENS = 100
_ANSWER_TOKENS = 128
_GRPC_CONNECTIONS = 8
_WARM_S = 1.0


@dataclass(slots=True)
class Figures:
    """One load: answers that all ended, and what they took; times in seconds.

    Attributes:
        ttft: time to first token of each answer.
        tokens: of all whole answers.
        failed: answers that are not whole.
        wall_s: from the first request to the end of the last answer.
        door_s: CPU of the door's processes.
        worker_s: CPU of the worker.
    """

    ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0
    wall_s: float = 0.0
    door_s: float = 0.0
    worker_s: float = 0.0


async def ask(door: Door, streams: int, seconds: float) -> Figures:
    """Keeps `streams` requests in flight for `seconds`, and waits until the last ones have ended."""
    texts = "" if not door.parts else str(bed.prompts(_PROMPT_TOKENS, 16))
    plan = Plan(
        door.protocol,
        door.addresses,
        prompt=_PROMPT_TOKENS,
        output=_ANSWER_TOKENS,
        token_ids=False,
        texts=texts,
        model=door.model,
    )
    made, figures = bodies(plan), Figures()
    kind, count = (SseConnection, streams) if door.protocol == HTTP else (GrpcConnection, _GRPC_CONNECTIONS)
    counter = COUNTERS[door.protocol]
    connections = [await kind.open(door.addresses[i % len(door.addresses)], counter) for i in range(count)]
    begin = time.perf_counter()

    async def keep_busy(i: int) -> None:
        while time.perf_counter() < begin + seconds:
            await _answer(plan, connections[i % count], next(made), figures)

    await asyncio.gather(*map(keep_busy, range(streams)))
    figures.wall_s = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    return figures


async def _answer(plan: Plan, connection: Connection, body: bytes, figures: Figures) -> None:
    reply = connection.start(PATHS[plan.target], body)
    await reply.ended
    tokens = final_tokens(plan, reply)
    if tokens != _ANSWER_TOKENS:
        figures.failed += 1
        return
    figures.tokens += tokens
    figures.ttft.append(reply.times[0] - reply.began)


def measure(door: Door, service: Service, streams: int, seconds: float) -> Figures:
    """Warms up, and measures one load."""
    uvloop.run(ask(door, streams, min(_WARM_S, seconds)))
    workers = [each.running.pid for each in service.workers]
    door_s, worker_s = sum(map(cpu_s, door.pids)), sum(map(cpu_s, workers))
    figures = uvloop.run(ask(door, streams, seconds))
    figures.door_s = sum(map(cpu_s, door.pids)) - door_s
    figures.worker_s = sum(map(cpu_s, workers)) - worker_s
    return figures


def cost_entries(running: RunningDoors, step: str, streams: Sequence[int], seconds: float) -> Iterator[Entry]:
    """Rows of a result: each number of streams through all doors, one after another, over one worker.

    Args:
        running: the doors, and the worker.
        step: of the worker, in words.
        streams: numbers of streams.
        seconds: of each load.
    """
    for count in streams:
        found: dict[str, Figures] = {}
        for name, door in running.doors.items():
            print(f"{count} streams, steps of {step}: {TITLES[name]}", file=sys.stderr)
            before = noise.read(running.pids)
            found[name] = figures = measure(door, running.service, count, seconds)
            cpu = noise.shares(before, noise.read(running.pids))
            labels: Entry = {"streams": count, "step": step, "door": TITLES[name], "counts": noise.is_quiet(cpu)}
            others = 100 * ((cpu.foreign or 0.0) + (cpu.steal or 0.0))
            for metric, unit, value in (*_values(door, figures, found.get("worker")), ("others", "%", round(others))):
                yield {**labels, "metric": metric, "unit": unit, "value": value}


def _values(door: Door, figures: Figures, floor: Figures | None) -> Iterator[tuple[str, str, float | int]]:
    """Metrics of one load with their units; `floor` is that of the worker itself."""
    tokens = max(1, figures.tokens)
    yield "tokens_per_s", "tokens/s", round(figures.tokens / figures.wall_s)
    yield "worker_cpu", "s per 1000 tokens", round(1000 * figures.worker_s / tokens, 4)
    yield "failed", "answers", figures.failed
    if figures.ttft:
        yield "ttft_p50", "ms", round(1000 * statistics.median(figures.ttft), 1)
    if door.parts:
        yield "door_cpu", "s per 1000 tokens", round(1000 * figures.door_s / tokens, 4)
        yield "door_memory", "MiB", round(sum(map(rss_mib, door.pids)))
        if floor is not None and figures.ttft and floor.ttft:
            added = statistics.median(figures.ttft) - statistics.median(floor.ttft)
            yield "added_ttft", "ms", round(1000 * added, 1)
