"""What observing costs: `python -m tests.bench.router.observing [--in-flight 1 8 32] [--parts metrics everything]`.

Services take turns, a load of `--seconds` each. One observes nothing: its ledgers and flight recorder do nothing
(`--blind`). Each of the others observes one of `--parts`:

- `ledgers`: ledgers and flight recorder alone, which are always on;
- `metrics`: with metrics of router and worker, scraped each second as OpenMetrics;
- `sampled`: with a collector that drops what it gets: metrics each minute, and the traces of 1 % of the requests;
- `everything`: with all traces, as without a sampler, and with exemplars.

Answers have 100 to 300 tokens (`--tokens` on average), so that streams do not stay in step. A stream pauses for up to
20 ms before its next request, so that requests do not wait for whole steps. Medians of the rounds; differences are
those of neighbours. `asked` is at most 1 % of tokens/s and 3 % of the router's CPU per token. Collector and scraper run
on the same machine.
"""

from __future__ import annotations

import contextlib
import http.client
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc

from tests.bench.router.bed import Row, Run, bench_model, parser, quantile, run_load, show
from tests.bench.router.load import ROUTER, Plan
from tests.e2e.service import REPOSITORY, Process, free_port, running

_MODULE: Final = "tests.bench.router.observing"
_SCRAPE_S: Final = 1.0
# Some steps of the worker.
_PAUSE_S: Final = 0.02


def blind() -> None:
    """Makes ledgers and the flight recorder of this process do nothing."""
    # Here, because the other modes of this program need neither router nor worker.
    from common.telemetry.ledger import Ledger
    from router.scheduling.lane_waits import LaneWaits, QueueWait
    from worker.engine.sequence_ledger import SequenceLedger, StepAccount
    from worker.engine.step_record import StepRing

    answers: dict[str, Any] = {"parts": dict, "shares": dict, "end_step": float, "fork": None}
    for each in (Ledger, SequenceLedger, StepAccount, LaneWaits, QueueWait, StepRing):
        for name in [name for name, value in vars(each).items() if callable(value) and not name.startswith("_")]:
            made = answers.get(name, type(None))
            if made is not None and name not in ("newest", "newest_of", "phase_start"):
                setattr(each, name, lambda *_, made=made, **__: made())


@dataclass(frozen=True)
class Part:
    """What a service observes; ledgers and flight recorder are on unless `is_blind`.

    `sampled` is the share of requests with a trace, "" for no traces; `is_scraped` for metrics of router and worker.
    """

    is_blind: bool = False
    is_scraped: bool = False
    sampled: str = ""

    def environment(self, collector: str) -> dict[str, str]:
        """OpenTelemetry's variables."""
        if not self.sampled:
            return {}
        sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": self.sampled}
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, **sampler}


_OFF: Final = Part(is_blind=True)
_PARTS: Final = {
    "ledgers": Part(),
    "metrics": Part(is_scraped=True),
    "sampled": Part(is_scraped=True, sampled="0.01"),
    "everything": Part(is_scraped=True, sampled="1.0"),
}


@dataclass
class Side:
    """One service; `runs` by the number of requests in flight."""

    router: Process
    worker: Process
    runs: dict[int, list[Run]] = field(default_factory=dict)

    def load(self, plan: Plan) -> None:
        """Runs a load against it."""
        processes = {"router": [self.router.running.pid], "worker": [self.worker.running.pid]}
        run = run_load(replace(plan, addresses=[self.router.address]), processes)
        self.runs.setdefault(plan.streams, []).append(run)


@contextlib.contextmanager
def side(part: Part, collector: str, model: Path, worker_options: Sequence[str]) -> Iterator[Side]:
    """A router and a worker that observe `part`."""
    prefix = [_MODULE, "--blind"] if part.is_blind else []
    env = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "info", **part.environment(collector)}
    ports = {"router": free_port(), "worker": free_port()}
    scraped = {which: ["--metrics-port", str(free_port())] if part.is_scraped else [] for which in ports}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["worker", "--model", str(model), "--port", str(ports["worker"]), *worker_options]
        log = Path(folder) / "log"
        worker = Process("worker", [*prefix, *arguments, *scraped["worker"]], ports["worker"], log, env)
        arguments = ["router", "--port", str(ports["router"]), "--worker", worker.address]
        router = Process("router", [*prefix, *arguments, *scraped["router"]], ports["router"], log, env)
        with running([worker, router]), scraping([int(options[1]) for options in scraped.values() if options]):
            yield Side(router, worker)


@contextlib.contextmanager
def scraping(ports: Sequence[int]) -> Iterator[None]:
    """Reads the metrics of each port every second: as OpenMetrics, and over one connection, like Prometheus."""
    is_over, wanted = threading.Event(), {"accept": "application/openmetrics-text;version=1.0.0"}
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for port in ports]

    def scrape() -> None:
        while not is_over.wait(_SCRAPE_S):
            for each in connections:
                each.request("GET", "/metrics", headers=wanted)
                each.getresponse().read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for each in connections:
            each.close()


@contextlib.contextmanager
def sink() -> Iterator[str]:
    """The address of a collector in a process of its own, which answers without reading."""
    with subprocess.Popen([sys.executable, "-m", _MODULE, "--sink"], cwd=REPOSITORY, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


def serve_sink() -> None:
    """Serves the collector until it is killed."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")

    server = grpc.server(futures.ThreadPoolExecutor(2), [Handler()], options=[("grpc.max_receive_message_length", -1)])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


def row(name: str, in_flight: int, on: Sequence[Run], off: Sequence[Run]) -> Row:
    """Figures of both sides, and what observing costs."""
    speeds = [[run.seen.tokens / run.seen.seconds for run in runs] for runs in (off, on)]
    cpu = {which: [[run.per_token_us(which) for run in runs] for runs in (off, on)] for which in ("router", "worker")}
    return {
        "observed": name,
        "in flight": in_flight,
        "tokens/s off": statistics.median(speeds[0]),
        "tokens/s on": statistics.median(speeds[1]),
        "tokens/s lost %": _more(speeds[1], speeds[0]),
        "router us/token off": statistics.median(cpu["router"][0]),
        "router us/token on": statistics.median(cpu["router"][1]),
        "router more %": _more(*cpu["router"]),
        "worker us/token off": statistics.median(cpu["worker"][0]),
        "worker more %": _more(*cpu["worker"]),
        "TTFT p50 ms off": 1000 * quantile([value for run in off for value in run.seen.ttft], 0.5),
        "TTFT p50 ms on": 1000 * quantile([value for run in on for value in run.seen.ttft], 0.5),
        "failed": sum(run.seen.failed for run in (*on, *off)),
    }


def _more(less: Sequence[float], more: Sequence[float]) -> float:
    """Median of the per cent by which `more` exceeds `less`, round by round."""
    return 100 * statistics.median(b / a - 1 for a, b in zip(less, more, strict=True))


def main() -> None:
    """Prints a row for each number of requests in flight."""
    if sys.argv[1:2] == ["--sink"]:
        serve_sink()
        return
    if sys.argv[1:2] == ["--blind"]:
        blind()
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    options = parser(__doc__)
    options.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=["metrics", "everything"])
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--seconds", type=float, default=5.0, help="of each load")
    options.add_argument("--tokens", type=int, default=200, help="of an answer, on average")
    options.add_argument("--simulate", default="mi300x-llama-8b", help="preset of the worker")
    options.add_argument("--model", type=Path, help="a checkpoint that the worker computes in place of --simulate")
    args = options.parse_args()
    simulated = ["--simulate", args.simulate, "--kv-cache-memory", "1GiB"]
    model, worker = (args.model, ["--threads", "1"]) if args.model else (bench_model(), simulated)
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(sink())
        parts = [_OFF, *(_PARTS[name] for name in args.parts)]
        off, *on = sides = [stack.enter_context(side(part, collector, model, worker)) for part in parts]
        for number in range(args.rounds):
            for in_flight in args.in_flight:
                plan = Plan(
                    ROUTER, (), streams=in_flight, measure_s=args.seconds, output=args.tokens, spread=0.5, seed=number,
                    pause_s=_PAUSE_S,
                )  # fmt: skip
                for one in sides[:: 1 if number % 2 else -1]:
                    one.load(plan)
    rows = [
        row(name, in_flight, one.runs[in_flight], off.runs[in_flight])
        for name, one in zip(args.parts, on, strict=True)
        for in_flight in args.in_flight
    ]
    show(rows, as_json=args.json, rounds=args.rounds, worker=str(args.model or args.simulate))


if __name__ == "__main__":
    main()
