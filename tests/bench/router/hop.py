"""What the hop costs: `python -m tests.bench.router.hop`.

The same load in turns: direct to the worker (WorkerService.Generate, a stream per request) and through the router, that
has all streams on one Session. The worker is simulated; what differs is the router. First streams with short prompts:
CPU of router and worker per token, and times. Then answers of one token: CPU per request. Then one request at a time
with a prompt of 1000 tokens: as token ids, so that what is added to the time to the first token is the hop alone, and
as text, beside the time that tokenizing takes by itself.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from common.text.tokenizer import Tokenizer
from tests.bench.router.bed import Row, Run, bench_model, parser, pids, prompts, quantile, run_load, service, show
from tests.bench.router.load import ROUTER, WORKER, Plan
from tests.e2e.service import Service


@dataclass(slots=True)
class Way:
    """The runs of one way to the worker."""

    name: str
    plan: Plan
    runs: list[Run] = field(default_factory=list)

    def all(self, name: str) -> list[float]:
        """One list of figures over all runs."""
        return [value for run in self.runs for value in getattr(run.seen, name)]

    def total(self, name: str) -> int:
        """One count over all runs."""
        return sum(getattr(run.seen, name) for run in self.runs)

    def cpu_us_per(self, process: str, count: str) -> float:
        """CPU of a process per token or request."""
        return 1e6 * sum(run.cpu[process] for run in self.runs) / max(1, self.total(count))


def interleaved(ways: Sequence[Way], running: Service, rounds: int) -> None:
    """Runs all ways in turns, so that a change of the machine's mood meets all of them."""
    for _ in range(rounds):
        for way in ways:
            way.runs.append(run_load(way.plan, pids(running)))


def both(running: Service, plan: Plan) -> list[Way]:
    """A plan direct and through the router."""
    direct = replace(plan, target=WORKER, addresses=[running.workers[0].address])
    return [Way("direct", direct), Way("router", replace(plan, target=ROUTER, addresses=[running.router.address]))]


def row(what: str, way: Way) -> Row:
    """The figures of one way."""
    ttft, tpot = way.all("ttft"), way.all("tpot")
    return {
        "load": what,
        "way": way.name,
        "TTFT p50 ms": 1000 * quantile(ttft, 0.5),
        "TTFT p99 ms": 1000 * quantile(ttft, 0.99),
        "TPOT p50 ms": 1000 * quantile(tpot, 0.5),
        "TPOT p99 ms": 1000 * quantile(tpot, 0.99),
        "gap p99 ms": 1000 * quantile(way.all("gaps"), 0.99),
        "tokens": way.total("tokens"),
        "requests": way.total("requests"),
        "router us/token": way.cpu_us_per("router", "tokens") if way.name != "direct" else 0.0,
        "worker us/token": way.cpu_us_per("worker", "tokens"),
        "failed": way.total("failed"),
    }


def tokenize_ms(tokens: int) -> float:
    """Median time to tokenize one of the prompts."""
    tokenizer = Tokenizer.from_folder(bench_model())
    taken: list[float] = []
    for text in json.loads(prompts(tokens).read_text("utf-8")) * 8:
        began = time.perf_counter()
        tokenizer.encode(text)
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken)


def measure(running: Service, streams: int, tokens: int, seconds: float, rounds: int) -> Iterator[Row]:
    for what, plan in (
        (f"{streams} streams", Plan("", (), streams=streams, measure_s=seconds, output=40, prompt=32)),
        (f"{streams} streams of 1 token", Plan("", (), streams=streams, measure_s=seconds, output=1, prompt=32)),
    ):
        ways = both(running, plan)
        interleaved(ways, running, rounds)
        yield from (row(what, way) for way in ways)
    plan = Plan("", (), 1, 1, warm_s=0.5, measure_s=seconds, output=1, prompt=tokens)
    ways = both(running, plan)
    ways.append(Way("router, text", replace(ways[1].plan, texts=str(prompts(tokens)))))
    interleaved(ways, running, rounds)
    yield from (row(f"1 stream, prompts of {tokens}", way) for way in ways)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--step", default="25ms", help="of the worker: time between two tokens of a stream")
    options.add_argument("--tokens", type=int, default=1000, help="of the prompts of the last part")
    options.add_argument("--seconds", type=float, default=4.0, help="of each run")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    with service(f"fixed:{args.step}") as running:
        rows = list(measure(running, args.streams, args.tokens, args.seconds, args.rounds))
    ids = {str(each["way"]): float(str(each["TTFT p50 ms"])) for each in rows[-3:]}
    show(
        rows,
        as_json=args.json,
        tokenize_ms=round(tokenize_ms(args.tokens), 3),
        added_ttft_p50_ms=round(ids["router"] - ids["direct"], 3),
        added_ttft_p50_ms_text=round(ids["router, text"] - ids["direct"], 3),
    )


if __name__ == "__main__":
    main()
