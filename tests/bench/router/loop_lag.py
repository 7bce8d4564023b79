"""The router's event loop beside long prompts: `python -m tests.bench.router.loop_lag [--tokens 100000]`.

Streams run; then clients send prompts of 100,000 tokens as text, one after another, to be tokenized by the router in
its threads and sent to the worker. How late the event loop is, alone and with them, is measured in the router's process
(`router/telemetry/loop_lag.py`): the share of moments at which it is late by so much. How late this machine lets any
process be says a second router that has nothing to do (`idle`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from tests.bench.router.bed import Row, RunningLoad, cpu_s, parser, prompts, quantile, service, show
from tests.bench.router.lag_histogram import LagHistogram
from tests.bench.router.load import ROUTER, Plan, Seen
from tests.bench.router.watched import WatchedRouter
from tests.e2e.service import Service


def row(
    what: str, lag: LagHistogram, idle: LagHistogram, seen: Seen, long: Seen | None, tokens: int, cpu_share: float
) -> Row:
    """The figures of one part."""
    return {
        "beside the streams": what,
        "lag p50 ms": 1000 * lag.quantile(0.5),
        "lag p99 ms": 1000 * lag.quantile(0.99),
        "lag p99.9 ms": 1000 * lag.quantile(0.999),
        "idle p50 ms": 1000 * idle.quantile(0.5),
        "idle p99 ms": 1000 * idle.quantile(0.99),
        "prompt tokens/s": len(long.ttft) * tokens / long.seconds if long else 0.0,
        "prompt TTFT p50 ms": 1000 * quantile(long.ttft, 0.5) if long else 0.0,
        "stream tokens/s": seen.tokens / seen.seconds,
        "stream gap p99 ms": 1000 * quantile(seen.gaps, 0.99),
        "router CPU %": 100 * cpu_share,
        "failed": seen.failed + (long.failed if long else 0),
    }


def measure(running: Service, streams: int, tokens: int, clients: int, seconds: float) -> list[Row]:
    """The loop's lag without and with long prompts."""
    workers = [worker.address for worker in running.workers]
    router, idle = WatchedRouter(workers), WatchedRouter(workers)
    plan = Plan(ROUTER, [router.address], streams=streams, warm_s=2.0, measure_s=seconds, output=100_000)
    long_plan = Plan(
        ROUTER, [router.address], clients, clients, seconds / 2, seconds, output=1, texts=str(prompts(tokens))
    )
    rows: list[Row] = []
    try:
        for what, extra in (("nothing", None), (f"{clients} clients with prompts of {tokens}", long_plan)):
            load = RunningLoad(plan if extra is None else replace(plan, warm_s=2 + seconds / 2))
            long = None if extra is None else RunningLoad(extra)
            load.wait_mark()
            before, idle_before, cpu, at = router.lag(), idle.lag(), cpu_s(router.pid), time.monotonic()
            load.wait_mark()
            idle_lag = idle.lag().since(idle_before)
            lag, cpu = router.lag().since(before), cpu_s(router.pid) - cpu
            share = cpu / (time.monotonic() - at)
            seen = load.result()
            if long is not None:
                long.wait_mark()
                long.wait_mark()
            rows.append(row(what, lag, idle_lag, seen, long.result() if long else None, tokens, share))
    finally:
        router.stop()
        idle.stop()
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--step", default="100ms", help="of the worker: time between two tokens of a stream")
    options.add_argument("--tokens", type=int, default=100_000, help="of a long prompt")
    options.add_argument("--clients", type=int, default=2, help="that send long prompts, one after another")
    options.add_argument("--seconds", type=float, default=10.0)
    args = options.parse_args()
    # A prompt is one step of the worker: this benchmark does not measure how workers share steps between prompts and
    # streams.
    with service(f"fixed:{args.step}", worker_options=["--max-num-batched-tokens", "262144"]) as running:
        rows = measure(running, args.streams, args.tokens, args.clients, args.seconds)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
