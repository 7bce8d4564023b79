"""What the HTTP facade costs: `python -m tests.bench.router.facade`.

The same load in turns: by gRPC to the router, and by HTTP to a facade in front of it (completions of token ids, with
the ids of the answer, as by gRPC). First streams at a low rate, where every token is a message. Then at a high rate:
tokens that arrive while a stream is written are merged. Then one request of one token at a time: the difference of
TTFT is the cost of the facade. Ratios are of one run; a core carries 1 / (CPU per token) tokens per second.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.bench.router.bed import Row, Run, parser, pids, quantile, run_load, service, show
from tests.bench.router.load import HTTP, ROUTER, Plan
from tests.e2e.facade_process import running_facade

_QUIET = {"FISSILE_LOG_LEVEL": "warning"}


@dataclass(slots=True)
class DoorRuns:
    """The runs of one load through one door."""

    door: str
    plan: Plan
    runs: list[Run] = field(default_factory=list)

    def total(self, name: str) -> float:
        """A count or duration over all runs."""
        return float(sum(getattr(run.seen, name) for run in self.runs))

    def cpu_us(self, process: str) -> float:
        """CPU of a process per token."""
        return 1e6 * sum(run.cpu[process] for run in self.runs) / max(1.0, self.total("tokens"))

    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return 1000 * quantile([value for run in self.runs for value in run.seen.ttft], 0.5)

    def row(self, step: str) -> Row:
        """The figures."""
        return {
            "streams": self.plan.streams,
            "step": step,
            "door": self.door,
            "tokens/s": self.total("tokens") / self.total("seconds"),
            "tokens/message": self.total("tokens") / max(1.0, self.total("messages")),
            "TTFT p50 ms": self.ttft_ms(),
            "facade us/token": self.cpu_us("facade") if self.door == "HTTP" else 0.0,
            "router us/token": self.cpu_us("router"),
            "client us/token": self.cpu_us("client"),
            "failed": self.total("failed"),
        }


def measure(step: str, plan: Plan, rounds: int) -> list[DoorRuns]:
    """A load by gRPC and by HTTP, in turns."""
    with (
        tempfile.TemporaryDirectory() as folder,
        service(f"fixed:{step}") as running,
        running_facade([running.router.address], Path(folder), _QUIET) as facade,
    ):
        processes = {**pids(running), "facade": [facade.running.pid]}
        doors = [
            DoorRuns("gRPC", replace(plan, target=ROUTER, addresses=[running.router.address])),
            DoorRuns("HTTP", replace(plan, target=HTTP, addresses=[facade.address], model="")),
        ]
        for _ in range(rounds):
            for door in doors:
                door.runs.append(run_load(door.plan, processes))
        return doors


def figures(loads: Sequence[tuple[str, Sequence[DoorRuns]]]) -> Iterator[Row]:
    for step, doors in loads:
        yield from (door.row(step) for door in doors)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--low", default="100ms", help="step of the low rate")
    options.add_argument("--high", default="1ms", help="step of the high rate")
    options.add_argument("--seconds", type=float, default=5.0, help="of each run")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    streams = Plan("", (), streams=args.streams, warm_s=2.0, measure_s=args.seconds, output=100_000)
    one = Plan("", (), 1, 1, warm_s=0.5, measure_s=args.seconds, output=1)
    loads = [
        (args.low, measure(args.low, streams, args.rounds)),
        (args.high, measure(args.high, streams, args.rounds)),
        (args.low, measure(args.low, one, args.rounds)),
    ]
    (_, (_, low)), (_, (by_grpc, high)), (_, (direct, alone)) = loads
    show(
        list(figures(loads)),
        as_json=args.json,
        facade_of_router_cpu_low=round(low.cpu_us("facade") / low.cpu_us("router"), 2),
        facade_of_router_cpu_high=round(high.cpu_us("facade") / high.cpu_us("router"), 2),
        http_of_grpc_tokens_high=round(
            high.total("tokens") / high.total("seconds") / (by_grpc.total("tokens") / by_grpc.total("seconds")), 2
        ),
        tokens_per_core_s_high=round(1e6 / high.cpu_us("facade")),
        added_ttft_ms=round(alone.ttft_ms() - direct.ttft_ms(), 3),
    )


if __name__ == "__main__":
    main()
