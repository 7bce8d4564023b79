"""The same load through the peer `smg`: `python -m tests.bench.router.peer`.

`smg` 1.13.0 (Rust; PyPI) in a virtual environment of its own under build/, made at the first run. In turns, on the
same machine: a worker of the peer's kind direct (vllm_double.py, a token per stream and step) and through `smg`, our
simulated worker direct (the same steps) and through our router. Prompts are text for both routers, so both tokenize.

What differs, and cannot be made equal: `smg` speaks HTTP/1.1 with server-sent events to the client, a connection per
stream, and our router gRPC over 8 connections, its answers with token ids besides the text; `smg` has a gRPC stream per
request to its worker, we have one Session; the workers differ (the double has no engine), so only what a router adds
to its own worker's times is compared. The client is the same code on asyncio for all (wire.py). `smg` has threads for
all cores, our router one for its loop and two for tokenizing.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.router import bed
from tests.bench.router.bed import CACHE, Row, Run, quantile
from tests.bench.router.load import HTTP, ROUTER, VLLM, WORKER, Plan
from tests.e2e.service import free_port
from tests.peers.environment import SMG_PACKAGES, peer_environment, peer_variables

DOUBLE = Path(__file__).with_name("vllm_double.py")
START_S = 60.0


@contextlib.contextmanager
def _running(command: Sequence[str | Path], log: Path) -> Iterator[int]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=peer_variables()) as child:
        try:
            yield child.pid
        finally:
            child.kill()


@contextlib.contextmanager
def peer(step_ms: float) -> Iterator[tuple[str, str, dict[str, list[int]]]]:
    """`smg` over the double: their addresses and processes."""
    programs, model = peer_environment("smg", SMG_PACKAGES), str(bed.bench_model())
    worker_port, port, metrics_port = free_port(), free_port(), free_port()
    double: list[str | Path] = [programs / "python", DOUBLE, str(worker_port), str(step_ms / 1000), model]
    launch: list[str | Path] = [
        programs / "smg",
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "warn",
    ]
    launch += ["--prometheus-port", str(metrics_port), "--policy", "round_robin", "--model-path", model]
    launch += ["--worker-urls", f"grpc://127.0.0.1:{worker_port}"]
    with _running(double, CACHE / "double.log") as worker, _running(launch, CACHE / "smg.log") as router:
        _wait_answer(port)
        yield f"127.0.0.1:{worker_port}", f"127.0.0.1:{port}", {"worker": [worker], "router": [router]}


def _wait_answer(port: int) -> None:
    """Waits until the peer has found its worker."""
    body = b'{"model": "bench", "prompt": "hello", "max_tokens": 1}'
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def row(name: str, plan: Plan, step_ms: float, runs: Sequence[Run], direct: Sequence[Run] | None) -> Row:
    """The figures of one way over all rounds; `direct` is the way to its worker without it."""
    tokens, seconds = sum(run.seen.tokens for run in runs), sum(run.seen.seconds for run in runs)
    ttft, gaps = _all(runs, "ttft"), _all(runs, "gaps")
    added = {
        "added TTFT p50 ms": 1000 * (quantile(ttft, 0.5) - quantile(_all(direct, "ttft"), 0.5)) if direct else 0.0,
        "added gap p99 ms": 1000 * (quantile(gaps, 0.99) - quantile(_all(direct, "gaps"), 0.99)) if direct else 0.0,
        "router CPU s/1k tokens": 1000 * sum(run.cpu["router"] for run in runs) / max(1, tokens) if direct else 0.0,
        "router RSS MiB": max(run.rss["router"] for run in runs) if direct else 0.0,
    }
    return {
        "way": name,
        "streams": plan.streams,
        "step ms": step_ms,
        "tokens/s": tokens / seconds,
        "TTFT p50 ms": 1000 * quantile(ttft, 0.5),
        "TTFT p99 ms": 1000 * quantile(ttft, 0.99),
        "gap p50 ms": 1000 * quantile(gaps, 0.5),
        "gap p99 ms": 1000 * quantile(gaps, 0.99),
        **added,
        "worker CPU s/1k tokens": 1000 * sum(run.cpu["worker"] for run in runs) / max(1, tokens),
        "client CPU s/1k tokens": 1000 * sum(run.cpu["client"] for run in runs) / max(1, tokens),
        "failed": sum(run.seen.failed for run in runs),
    }


def _all(runs: Sequence[Run] | None, name: str) -> list[float]:
    return [value for run in runs or () for value in getattr(run.seen, name)]


def measure(step_ms: float, streams: int, seconds: float, rounds: int, prompt: int) -> list[Row]:
    """All four ways, in turns."""
    plan = Plan("", (), streams=streams, warm_s=2.0, measure_s=seconds, prompt=prompt, output=40)
    texts = str(bed.prompts(prompt, 16))
    with peer(step_ms) as (double, smg, theirs), bed.service(f"fixed:{step_ms:g}ms") as running:
        ours: Mapping[str, list[int]] = bed.pids(running)
        ways = {
            "double direct": (replace(plan, target=VLLM, addresses=[double]), theirs),
            "smg": (replace(plan, target=HTTP, addresses=[smg], texts=texts), theirs),
            "worker direct": (replace(plan, target=WORKER, addresses=[running.workers[0].address]), ours),
            "fissile router": (replace(plan, target=ROUTER, addresses=[running.router.address], texts=texts), ours),
        }
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (way, processes) in ways.items():
                runs[name].append(bed.run_load(way, processes))
    direct = {"smg": runs["double direct"], "fissile router": runs["worker direct"]}
    return [row(name, ways[name][0], step_ms, runs[name], direct.get(name)) for name in ways]


def main() -> None:
    options = bed.parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    options.add_argument("--step", type=float, default=50.0, help="of the workers, ms")
    options.add_argument("--prompt", type=int, default=100, help="tokens")
    options.add_argument("--seconds", type=float, default=5.0, help="of each run")
    options.add_argument("--rounds", type=int, default=2)
    args = options.parse_args()
    rows: list[Row] = []
    for streams in args.streams:
        rows += measure(args.step, streams, args.seconds, args.rounds, args.prompt)
    bed.show(rows, as_json=args.json, peer=SMG_PACKAGES[0])


if __name__ == "__main__":
    main()
