"""Tokens per second and CPU per token of the router: `python -m tests.bench.router.streams [--streams 64 256 1024]`.

A simulated worker makes a token per stream and step. At a low rate every token is a message of its own. At a high one
the router gets more than it can write one by one: what has come meanwhile is merged, and its CPU per token falls.
Beside the low rate stands the least that a server with gRPC for Python takes (`floor`: constant messages, no work).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.bench.router.bed import Row, Run, parser, pids, quantile, run_load, service, show
from tests.bench.router.load import ROUTER, Plan
from tests.e2e.service import REPOSITORY, free_port


@contextlib.contextmanager
def floor_server(step_ms: float) -> Iterator[tuple[str, int]]:
    """A server that only writes; its address and pid."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.router.floor", str(port), str(step_ms / 1000)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield f"127.0.0.1:{port}", child.pid
        finally:
            child.kill()


def row(server: str, step_ms: float, streams: int, run: Run) -> Row:
    """The figures of one load."""
    seen = run.seen
    return {
        "server": server,
        "step ms": step_ms,
        "streams": streams,
        "tokens/s": seen.tokens / seen.seconds,
        "tokens/message": seen.tokens / max(1, seen.messages),
        "us/token": run.per_token_us("server"),
        "us/message": 1e6 * run.cpu["server"] / max(1, seen.messages),
        "CPU %": 100 * run.cpu["server"] / seen.seconds,
        "worker us/token": run.per_token_us("worker"),
        "client us/token": run.per_token_us("client"),
        "gap p50 ms": 1000 * quantile(seen.gaps, 0.5),
        "gap p99 ms": 1000 * quantile(seen.gaps, 0.99),
        "failed": seen.failed,
    }


def measure(step_ms: float, plans: list[Plan], *, floor: bool) -> list[Row]:
    """The router under all plans, each followed by the floor."""
    rows: list[Row] = []
    with service(f"fixed:{step_ms:g}ms") as running, floor_server(step_ms) as (address, pid):
        processes = pids(running)
        processes["server"] = processes.pop("router")
        for plan in (replace(each, addresses=[running.router.address]) for each in plans):
            rows.append(row("router", step_ms, plan.streams, run_load(plan, processes)))
            if floor:
                run = run_load(replace(plan, addresses=[address]), {"server": [pid], "worker": []})
                rows.append(row("floor", step_ms, plan.streams, run))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    options.add_argument("--low", type=float, default=100.0, help="step of the low rate, ms")
    options.add_argument("--high", type=float, default=1.0, help="step of the high rate, ms")
    options.add_argument("--seconds", type=float, default=5.0, help="of each load")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--connections", type=int, default=8, help="that the streams are spread over")
    args = options.parse_args()
    plans = [
        Plan(ROUTER, (), args.connections, streams, warm_s=2.0, measure_s=args.seconds, output=100_000)
        for streams in args.streams
    ]
    rows = measure(args.low, plans * args.rounds, floor=True) + measure(args.high, plans * args.rounds, floor=False)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
