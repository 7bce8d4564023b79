"""Plots of docs/reference/performance.md: engines on each kind of processor, and the router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tests.bench.peers.floors import Machine, Shape, closed_loop_bound, decode_floor, prefill_floor
from tests.bench.plots import results as data
from tests.bench.plots.results import Result, Row
from tests.bench.plots.svg import Panel, Point, Style, render
from tests.shapes import QWEN3_0_6B

KINDS: Final = {
    "amx": "AMX",
    "zen5": "AVX512-BF16, Zen 5",
    "zen4": "AVX512-BF16, Zen 4",
    "avx2": "AVX2",
}
CONCURRENCIES: Final = (1, 8, 32)
SHAPE: Final = Shape.of(QWEN3_0_6B)
# Means of the benchmark's prompts and answers, and bytes of a weight in bfloat16.
PROMPT, OUTPUT, WEIGHT_BYTES = 144, 64, 2.0
LIMIT: Final = "limit"
STYLES: Final = {
    "fissile": Style("Fissile", "#12408f"),
    "fissile-offline": Style("Fissile, the engine alone", "#5b93dd", "2 3"),
    "fissile-int8": Style("Fissile, weights in 8 bits", "#12408f", "7 4"),
    "vllm": Style("vLLM", "#d9541e"),
    "llamacpp-bf16": Style("llama.cpp, bf16", "#2c8a4b"),
    "llamacpp-f16": Style("llama.cpp, f16", "#2c8a4b", "2 3"),
    "llamacpp-q8": Style("llama.cpp, Q8_0", "#2c8a4b", "7 4"),
    "transformers": Style("transformers", "#8d5aa8"),
    LIMIT: Style("the machine's limit, 16-bit weights", "#000000", "4 3", marker=False),
}
_SERVER_STYLES: Final = {
    "router, 100": Style("router, a message per token", "#12408f"),
    "floor, 100": Style("gRPC for Python alone", "#000000", "4 3"),
    "router, 1": Style("router under pressure, tokens merged", "#5b93dd"),
}


def service(results: Sequence[Result], kind: str) -> str:
    """The engines on a kind of processor: tokens/s, TTFT and TPOT over requests in flight, and the machine's limit."""
    runs = data.of(results, "peers", kind)
    machine = limits(limits_run(results, kind))
    panels = [
        _service_panel(
            "output tokens per second", "output_tokens_per_s", runs, [bound(machine, c) for c in CONCURRENCIES]
        ),
        _service_panel("TTFT p50, ms", "ttft_p50", runs, [ttft_floor(machine)] * len(CONCURRENCIES)),
        _service_panel("TPOT p50, ms", "tpot_p50", runs, [tpot_floor(machine, c) for c in CONCURRENCIES]),
    ]
    title = f"{KINDS[kind]}: Qwen3-0.6B's shape on {runs[0].machine.cores} cores"
    return render(title, "requests in flight", [str(c) for c in CONCURRENCIES], panels, STYLES)


def limits_run(results: Sequence[Result], kind: str) -> Result:
    """The run with the machine's limits: the newest beside peers with both limits, else the steps' run."""
    runs = (*data.of(results, "peers", kind), *data.of(results, "decode_step", kind))
    return next(run for run in runs if run.limit("memory_read") and run.limit("arithmetic"))


def limits(run: Result) -> Machine:
    """What the machine reached in a run. ValueError if it was not measured."""
    read, flops = run.limit("memory_read"), run.limit("arithmetic")
    if read is None or flops is None:
        raise ValueError(f"{run.name} has no rates of the machine")
    return Machine(read * 1e9, flops * 1e9)


def bound(machine: Machine, concurrency: int) -> float:
    """Output tokens per second that the machine allows, prefills and decode steps one after the other."""
    return closed_loop_bound(SHAPE, machine, concurrency, PROMPT, OUTPUT, WEIGHT_BYTES).in_series


def ttft_floor(machine: Machine) -> float:
    """Milliseconds that a prompt of mean length takes at least, alone."""
    return 1000 * prefill_floor(SHAPE, machine, PROMPT, WEIGHT_BYTES)


def tpot_floor(machine: Machine, concurrency: int) -> float:
    """Milliseconds that a decode step of all requests in flight takes at least."""
    return 1000 * decode_floor(SHAPE, machine, concurrency, PROMPT + OUTPUT // 2, WEIGHT_BYTES)


def newest(runs: Iterable[Result], metric: str, peer: str, concurrency: int) -> list[Row]:
    """Rows of the newest run that has any; one for each repetition, or their median."""
    found = (run.find(metric, peer=peer, concurrency=concurrency) for run in runs)
    return next((rows for rows in found if rows), [])


def _service_panel(title: str, metric: str, runs: Sequence[Result], floor: Sequence[float]) -> Panel:
    lines = {peer: list(_points(runs, metric, peer)) for peer in STYLES if peer != LIMIT}
    lines[LIMIT] = [Point(i, value) for i, value in enumerate(floor)]
    # Equal distances are equal ratios, and all lines are distinct at 1 in flight, too.
    return Panel(title, True, {peer: points for peer, points in lines.items() if points})


def _points(runs: Sequence[Result], metric: str, peer: str) -> Iterator[Point]:
    for i, concurrency in enumerate(CONCURRENCIES):
        rows = newest(runs, metric, peer, concurrency)
        value = data.median(rows)
        if value is not None:
            yield Point(i, value, all(row.counts for row in rows))


def router(results: Sequence[Result]) -> str:
    """CPU per token of the router over streams, beside the least that gRPC takes."""
    run = data.of(results, "router.streams", "avx2")[0]
    streams = sorted({int(row.labels["streams"]) for row in run.find("router_cpu")})
    panels = [
        _router_panel("CPU of the server, us per token", "router_cpu", run, streams),
        _router_panel("tokens per second", "tokens_per_s", run, streams),
    ]
    title = "Router: one worker, a token per stream and step"
    return render(title, "streams", [f"{n:,}" for n in streams], panels, _SERVER_STYLES)


def _router_panel(title: str, metric: str, run: Result, streams: Sequence[int]) -> Panel:
    lines: dict[str, list[Point]] = {}
    for row in run.find(metric):
        key = f"{row.labels['server']}, {row.labels['step_ms']}"
        lines.setdefault(key, []).append(Point(streams.index(int(row.labels["streams"])), float(row.value)))
    return Panel(title, False, lines)
