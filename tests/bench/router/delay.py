"""The delay factor with one router and with several: `python -m tests.bench.router.delay`.

One simulated worker with the speed of a GPU, requests in bursts, all routers over the same worker. The gate holds a
prompt for so many prefill durations, so that more prompts share a prefill: larger batches, a later first token, and
fewer interruptions of the answers that run. First tokens that reach the client within 4 ms of each other count as one
prefill batch, which is less than any prefill takes; on a busy machine a batch may fall apart.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.router.bed import Row, Run, parser, quantile, run_load, service, show
from tests.bench.router.load import ROUTER, Plan
from tests.e2e.service import Process, free_port

SAME_BATCH_S = 0.004


@contextlib.contextmanager
def routers(count: int, worker: str, factor: float) -> Iterator[list[Process]]:
    """Routers over one worker."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = [_router(Path(folder), i, worker, factor) for i in range(count)]
        for each in started:
            each.start()
            stack.callback(each.running.wait)
            stack.callback(each.running.kill)
        for each in started:
            each.wait_serving()
        yield started


def _router(folder: Path, index: int, worker: str, factor: float) -> Process:
    port = free_port()
    arguments = ["router", "--port", str(port), "--worker", worker, "--delay-factor", str(factor)]
    return Process(f"router-{index}", arguments, port, folder / f"{index}.log", {"FISSILE_LOG_LEVEL": "warning"})


def batches(firsts: Sequence[float]) -> list[int]:
    """Sizes of the prefill batches, from the times of first tokens."""
    ordered = sorted(firsts)
    breaks = [i for i, (a, b) in enumerate(itertools.pairwise(ordered), start=1) if b - a > SAME_BATCH_S]
    return [b - a for a, b in itertools.pairwise([0, *breaks, len(ordered)])] if ordered else []


def row(count: int, factor: float, run: Run) -> Row:
    """The figures of one run."""
    seen = run.seen
    return {
        "routers": count,
        "delay factor": factor,
        "prefill batch": statistics.mean(batches(seen.firsts) or [0]),
        "tokens/s": seen.tokens / seen.seconds,
        "requests/s": seen.requests / seen.seconds,
        "TTFT p50 ms": 1000 * quantile(seen.ttft, 0.5),
        "TTFT p99 ms": 1000 * quantile(seen.ttft, 0.99),
        "TPOT p50 ms": 1000 * quantile(seen.tpot, 0.5),
        "TPOT p99 ms": 1000 * quantile(seen.tpot, 0.99),
        "failed": seen.failed,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--preset", default="mi300x-llama-8b", help="speed of the worker")
    options.add_argument("--factors", type=float, nargs="+", default=[0.0, 0.5, 1.0, 2.0])
    options.add_argument("--routers", type=int, nargs="+", default=[1, 4])
    options.add_argument("--burst", type=int, default=8, help="requests of a burst, 4 ms apart")
    options.add_argument("--rate", type=float, default=5.0, help="bursts per second (Poisson)")
    options.add_argument("--prompt", type=int, default=300, help="tokens")
    options.add_argument("--output", type=int, default=24, help="tokens")
    options.add_argument("--seconds", type=float, default=6.0, help="of each run")
    args = options.parse_args()
    rows: list[Row] = []
    # The arrivals are the same in all runs; so are the prompts, which no cache may save.
    with service(args.preset, worker_options=["--max-num-batched-tokens", "8192", "--no-prefix-caching"]) as running:
        worker = running.workers[0]
        for count, factor in itertools.product(args.routers, args.factors):
            with routers(count, worker.address, factor) as started:
                plan = Plan(
                    ROUTER,
                    [each.address for each in started],
                    2 * count,
                    measure_s=args.seconds,
                    burst=args.burst,
                    spacing_s=0.004,
                    bursts_per_s=args.rate,
                    prompt=args.prompt,
                    output=args.output,
                )
                pids = {"router": [each.running.pid for each in started], "worker": [worker.running.pid]}
                rows.append(row(count, factor, run_load(plan, pids)))
    show(rows, as_json=args.json, preset=args.preset, burst=args.burst, rate=args.rate)


if __name__ == "__main__":
    main()
