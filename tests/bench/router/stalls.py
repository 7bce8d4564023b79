"""How long the router's event loop stands still for one decision: `python -m tests.bench.router.stalls`.

Thread time, in milliseconds: of the longest decision while workers come and go and many requests wait, of the longest
report of a worker's cache while the prefix index grows; the median decision after one worker has said something.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from array import array
from collections.abc import Callable

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.params.sampling_params import SamplingParams
from common.rpc.tls import Dialer
from common.text.answer_text import AnswerText
from router.answers.stream_assembly import StreamAssembly
from router.model_registry import ModelRegistry, ServedModel, TextAssets
from router.prompts.tokenizer_store import TokenizerStore
from router.requests.request_router import RequestRouter
from router.requests.stream import RoutedRequest
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.placement import PrefixAware
from router.scheduling.prefix_index import PrefixIndex
from router.scheduling.queued_request import HIGH, LOW, NORMAL, QueuedRequest
from router.scheduling.worker_load import LoadReport
from router.workers.orphans import OrphanTable
from router.workers.session import Session
from router.workers.worker_pool import WorkerPool
from tests.unit.router.scheduling.dispatching import make_dispatcher

TURNS = 1000
MODEL = ServedModel("m", "A", 4096, 300, "", "w", 16, 0, TextAssets(), "n")


def took_ms(call: Callable[[], object]) -> float:
    """Thread time of a call."""
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1e6


def full(time: float, tokens: int) -> LoadReport:
    """A worker without room."""
    return LoadReport(time, 8, 4, tokens, 0, 0, 0.05, 30_000.0, prefill_samples=1)


def spread_ms(workers: int, classes: tuple[int, ...]) -> dict[str, float]:
    """The longest call, by event."""
    rnd = random.Random(1)
    dispatcher = make_dispatcher(DelayGate(0.0), PrefixAware())
    for i in range(workers):
        dispatcher.lane_up(f"w{i}", "m", full(0.0, 1000 * i), 0.0)
    key = 0
    for priority in classes:
        for _ in range(4096):
            key += 1
            granules = [rnd.getrandbits(64) for _ in range(20)]
            request = QueuedRequest(key, "m", 2560, 0.0, priority=priority, granules=granules, granule_tokens=128)
            dispatcher.arrive(request, 0.0)
    dispatcher.decide(0.0)
    return {
        "drains": _longest_ms(dispatcher, lambda: dispatcher.lane_draining("w0", 1.0), 1.0),
        "goes": _longest_ms(dispatcher, lambda: dispatcher.lane_down("w1", 2.0), 2.0),
        "comes": _longest_ms(dispatcher, lambda: dispatcher.lane_up("new", "m", full(3.0, 0), 3.0), 3.0),
    }


def _longest_ms(dispatcher: Dispatcher, event: Callable[[], object], now: float) -> float:
    """Of the event and the decisions after it."""
    taken = [took_ms(event)]
    for turn in range(TURNS):
        at = now + turn / TURNS
        taken.append(took_ms(lambda at=at: (dispatcher.decide(at), dispatcher.next_timer(at))))  # type: ignore[misc]
    return max(taken)


def growth_ms() -> list[tuple[int, float]]:
    """Entries of the index, and the longest report of 1024 granules on the way there."""
    index, rnd = PrefixIndex(), random.Random(1)
    index.add_worker("w")
    longest, rows = 0.0, []
    for number in range(1, 1025):
        granules = [rnd.getrandbits(64) for _ in range(1024)]
        longest = max(longest, took_ms(lambda granules=granules: index.store("w", granules)))  # type: ignore[misc]
        if number & (number - 1) == 0 and number >= 64:
            rows.append((number * 1024, longest))
            longest = 0.0
    return rows


async def decision_ms(workers: int) -> float:
    """Median decision for a fleet in which one request waits for each worker, held by the gate."""
    dispatcher, registry = make_dispatcher(DelayGate(4.0), PrefixAware()), ModelRegistry()
    orphans = OrphanTable(time.monotonic)
    requests = RequestRouter(dispatcher, registry, orphans)
    pool = WorkerPool(dispatcher, registry, TokenizerStore(), requests.running, orphans, Dialer(), lambda: None)
    load = wpb.Load(decoding_seqs=8, room_tokens=10**6, room_seqs=100, last_prompt_latency_us=10**7, prefill_rate=1000)
    sessions: list[Session] = []
    for i in range(workers):
        session = Session(f"w{i}", "r", time.monotonic, Dialer())
        session.instance_id, session.model = str(i), MODEL
        pool.session_opening(session)
        pool.session_up(session, wpb.Welcome(load=load, kv_events=True))
        sessions.append(session)
    params = SamplingParams(max_tokens=10)
    for _ in range(workers):
        request = RoutedRequest("m", MODEL.identity, array("I", [1] * 10), params, 0, 0, time.monotonic())
        requests.open(request, StreamAssembly(10, text=AnswerText(None)), lambda worker, choice: None)
    requests.dispatch_now()
    taken = []
    for turn in range(200):
        pool.heartbeat(sessions[turn % workers], wpb.Heartbeat(load=load))
        taken.append(took_ms(requests.dispatch_now))
    requests.stop()
    return statistics.median(taken)


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print("| workers | waiting | a worker drains | goes | comes |\n| --- | --- | --- | --- | --- |")
    for workers in (8, 64):
        for classes in ((NORMAL,), (HIGH, NORMAL, LOW)):
            found = " | ".join(f"{ms:.1f}" for ms in spread_ms(workers, classes).values())
            print(f"| {workers} | {4096 * len(classes)} | {found} |")
    print("\n| index grows to | longest report of 1024 granules |\n| --- | --- |")
    for entries, ms in growth_ms():
        print(f"| {entries} | {ms:.1f} |")
    print("\n| workers | a decision |\n| --- | --- |")
    for workers in (10, 100, 1000):
        print(f"| {workers} | {asyncio.run(decision_ms(workers)):.2f} |")


if __name__ == "__main__":
    main()
