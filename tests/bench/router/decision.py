"""What placing requests costs: `python -m tests.bench.router.decision`.

Thread time of arrive, decide and report for one request by fleet size and prompt length, prefix_aware, each worker with
something in the index; then of decide alone while many requests wait, which are placed anew now and then. Microseconds.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from common.delay_gate import DelayGate
from router.scheduling.placement import CacheChange, PrefixAware
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_dispatcher

REQUESTS = 2000


def load(seen: int = 0) -> LoadReport:
    """A worker that decodes and has room."""
    return LoadReport(0.0, 8, 0, 0, 10**6, 10**4, 0.05, 30_000.0, submit_seen=seen)


def cost_us(workers: int, granules: int) -> tuple[float, float]:
    """Median and p99 of a request's way through the dispatcher."""
    rnd = random.Random(1)
    dispatcher = make_dispatcher(DelayGate(0.0), PrefixAware())
    for i in range(workers):
        dispatcher.lane_up(f"w{i}", "m", load(), 0.0)
    prefixes = [[rnd.getrandbits(64) for _ in range(granules)] for _ in range(200)]
    taken: list[float] = []
    for key in range(REQUESTS):
        prompt = [*rnd.choice(prefixes)[: rnd.randrange(granules + 1)], rnd.getrandbits(64)]
        request = QueuedRequest(key, "m", 128 * len(prompt), 0.0, granules=prompt, granule_tokens=128)
        began = time.thread_time_ns()
        dispatcher.arrive(request, 0.0)
        (release,) = dispatcher.decide(0.0)
        dispatcher.report(release.worker, load(release.serial))
        taken.append((time.thread_time_ns() - began) / 1000)
    return statistics.median(taken), statistics.quantiles(taken, n=100)[98]


def replacing_us(workers: int, waiting: int) -> tuple[float, float]:
    """Mean and largest time of a decision, at 400 a second while no request can be released."""
    rnd = random.Random(1)
    policy = PrefixAware()
    dispatcher = make_dispatcher(DelayGate(0.0), policy)
    full = [LoadReport(0.0, 8, 4, 1000 * i, 0, 0, 0.05, 30_000.0, prefill_samples=1) for i in range(workers)]
    for i, report in enumerate(full):
        dispatcher.lane_up(f"w{i}", "m", report, 0.0)
    prefixes = [[rnd.getrandbits(64) for _ in range(80)] for _ in range(50)]
    for i, prefix in enumerate(prefixes):
        dispatcher.assignment.placement.cache_changed(f"w{i % workers}", CacheChange(stored=prefix))
    for key in range(waiting):
        prompt = [*prefixes[key % 50], rnd.getrandbits(64)]
        dispatcher.arrive(QueuedRequest(key, "m", 128 * len(prompt), 0.0, granules=prompt, granule_tokens=128), 0.0)
    taken: list[float] = []
    for turn in range(400):
        now = 0.001 + turn / 400
        worker = rnd.randrange(workers)
        dispatcher.report(f"w{worker}", replace(full[worker], time=now, waiting_tokens=rnd.randrange(4000)))
        began = time.thread_time_ns()
        assert not dispatcher.decide(now)
        taken.append((time.thread_time_ns() - began) / 1000)
    return statistics.mean(taken), max(taken)


def main() -> None:
    print("| workers | prompts up to | median | p99 |\n| --- | --- | --- | --- |")
    for workers in (1, 8, 100, 1000):
        for granules in (8, 80, 800):
            median, p99 = cost_us(workers, granules)
            print(f"| {workers} | {128 * granules} tokens | {median:.0f} | {p99:.0f} |")
    print("\n| workers | waiting | mean of 400 decisions in a second | most |\n| --- | --- | --- | --- |")
    for workers in (8, 1000):
        for waiting in (16, 256, 2000):
            mean, most = replacing_us(workers, waiting)
            print(f"| {workers} | {waiting} | {mean:.0f} | {most:.0f} |")


if __name__ == "__main__":
    main()
