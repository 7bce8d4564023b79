"""What placing one request costs: `python -m tests.bench.router.decision`.

Thread time of arrive, decide and report for one request by fleet size and prompt length, prefix_aware, each worker with
something in the index; microseconds.
"""

from __future__ import annotations

import random
import statistics
import time

from common.delay_gate import DelayGate
from router.dispatcher import Dispatcher
from router.fair_queue import QueuedRequest
from router.lane import LoadReport
from router.placement import PrefixAware

REQUESTS = 2000


def load(seen: int = 0) -> LoadReport:
    """A worker that decodes and has room."""
    return LoadReport(0.0, 8, 0, 0, 10**6, 10**4, 0.05, 30_000.0, submit_seen=seen, total_blocks=75_000)


def cost_us(workers: int, granules: int) -> tuple[float, float]:
    """Median and p99 of a request's way through the dispatcher."""
    rnd = random.Random(1)
    dispatcher = Dispatcher(DelayGate(0.0), PrefixAware())
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


def main() -> None:
    """Prints the table."""
    print("| workers | prompts up to | median | p99 |\n| --- | --- | --- | --- |")
    for workers in (1, 8, 100, 1000):
        for granules in (8, 80, 800):
            median, p99 = cost_us(workers, granules)
            print(f"| {workers} | {128 * granules} tokens | {median:.0f} | {p99:.0f} |")


if __name__ == "__main__":
    main()
