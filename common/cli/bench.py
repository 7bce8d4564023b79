"""`fissile bench`: measures a running router (`serve`), or a checkpoint in this process (`offline`)."""

from __future__ import annotations

import functools
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import click

from common.bench import report
from common.bench.figures import Figures, Setting, figures_of
from common.bench.machine import cpu_model
from common.bench.records import Record
from common.bench.workload import Workload
from common.cli.bench_plan import Plan, plan_options
from common.cli.bench_targets import EngineTarget, RouterTarget, Target
from common.cli.client import Credentials
from common.cli.console import Console
from common.cli.failure import CommandError
from common.cli.options import ByteSize, address_option, option
from common.cli.security import apply, with_credentials
from common.cli.version import versions
from common.config import SCHEDULING_POLICIES, Config
from common.errors import ApiError
from common.limits import CPU_MAX_NUM_BATCHED_TOKENS
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging

_INTERRUPTED = 130


@dataclass(slots=True)
class Benchmark:
    """The rows of a plan, measured one after the other.

    The first SIGINT ends the row that runs, and what has been measured is told; the second one ends the process.

    Attributes:
        rows: measured so far, the one that was interrupted included.
        interrupted: whether SIGINT ended it.
    """

    plan: Plan
    target: Target
    workload: Workload
    console: Console = field(default_factory=Console)
    rows: list[Figures] = field(default_factory=list)
    interrupted: bool = False

    def run(self) -> None:
        """Measures everything, or until SIGINT."""
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            for repeat in range(self.plan.repeat):
                for number, setting in enumerate(self.plan.settings):
                    self._row(setting, repeat, repeat * len(self.plan.settings) + number)
                    if self.interrupted:
                        return
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True
        self.target.stop()

    def _row(self, setting: Setting, repeat: int, round_: int) -> None:
        """One run, after a warm-up; each with prompts of its own."""
        plan, target = self.plan, self.target
        label = f"{setting}, {repeat + 1} of {plan.repeat}" if plan.repeat > 1 else str(setting)
        if plan.warmup:
            warm = functools.partial(self.workload.work, -1 - round_)
            target.run(plan.warm_up(setting), warm, self._progress(f"{label}, warming up"))
        if self.interrupted:
            return
        work = functools.partial(self.workload.work, round_)
        begin, before = time.perf_counter(), target.meter.read()
        records = target.run(plan.load(setting), work, self._progress(label))
        cpu = target.meter.shares(before, target.meter.read(), time.perf_counter() - begin)
        self.rows.append(figures_of(records, setting, repeat, plan.objectives, cpu))

    def _progress(self, label: str) -> Callable[[list[Record], int], None]:
        def show(records: list[Record], in_flight: int) -> None:
            failed = sum(not record.ok for record in records)
            tokens = sum(record.output_tokens for record in records)
            told = f", {failed} failed" if failed else ""
            self.console.spin(f"{label}: {len(records) - in_flight} done{told}, {in_flight} in flight, {tokens} tokens")

        return show


def tell(benchmark: Benchmark, started: str, options: dict[str, Any]) -> int:
    """Writes table and JSON. Returns the exit code.

    Raises:
        CommandError: requests failed (exit code 1), or the JSON can not be written.
    """
    plan, rows = benchmark.plan, benchmark.rows
    benchmark.console.clear()
    to_stderr = plan.json_file == "-"
    if rows:
        click.echo(_text(rows, details=len(rows) == 1 if plan.details is None else plan.details), err=to_stderr)
    for warning in report.warnings(rows):
        click.echo(f"warning: {warning}", err=True)
    if plan.json_file is not None:
        made = report.as_json(
            rows,
            mode=benchmark.target.mode,
            started=started,
            interrupted=benchmark.interrupted,
            model=benchmark.target.model,
            options={**plan.as_dict(), **options},
            environment=environment(),
        )
        _write_json(plan.json_file, made)
    if benchmark.interrupted:
        said = "the last row has only what had ended" if rows else "nothing had been measured"
        click.echo(f"interrupted: {said}", err=True)
        return _INTERRUPTED
    if failed := report.failure_line(rows):
        raise CommandError(failed, 1)
    return 0


def _text(rows: list[Figures], *, details: bool) -> str:
    parts = [report.table(rows), report.medians(rows), *(map(report.details, rows) if details else ())]
    return "\n\n".join(part for part in parts if part)


def _write_json(file: str, made: dict[str, Any]) -> None:
    text = json.dumps(made, ensure_ascii=False, allow_nan=False)
    if file == "-":
        click.echo(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {file} can not be written: {error.strerror}", 1) from None


def environment() -> dict[str, Any]:
    """What a figure depends on besides the options."""
    return {
        "versions": versions(),
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    }


def _measure(plan: Plan, target: Target, options: dict[str, Any]) -> int:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        model = target.model
        workload = plan.workload(model["name"], model["vocab_size"], model["max_model_len"])
        benchmark = Benchmark(plan, target, workload)
        benchmark.run()
        return tell(benchmark, started, options)
    finally:
        target.close()


@click.group()
def bench() -> None:
    """Measure throughput and latency: of a running router (serve), or of a checkpoint in this process (offline).

    \b
    fissile bench serve                              closed loops of 1, 8 and 32 requests in flight
    fissile bench serve --rate 2,4 --duration 60s    open loop: 2, then 4 requests per second
    fissile bench offline --model DIR                the engine alone

    docs/bench.md says how to read the figures.
    """


@bench.command(short_help="A running router, as its clients see it.")
@address_option
@option("--model", envvar="FISSILE_MODEL_NAME", default="", help="Model name; absent: the only one of the router.")
@plan_options
@option(
    "--timeout", envvar="FISSILE_TIMEOUT", type=click.FloatRange(min=0, min_open=True), default=600.0,
    metavar="SECONDS", help="Deadline of each request; one that passes it failed.",
)  # fmt: skip
@option(
    "--service-pid", "service_pids", envvar="FISSILE_BENCH_SERVICE_PID", type=click.IntRange(min=1), multiple=True,
    help="Process of the service on this machine, with its children: what it computes is not foreign. Repeatable. "
    "Found by itself: who listens at a loopback address, and the `fissile serve` that has started it.",
)  # fmt: skip
@with_credentials
def serve(
    address: str, model: str, timeout: float, service_pids: tuple[int, ...], credentials: Credentials, **given: Any
) -> int:
    """Measure a running router, as its clients see it.

    Prompts are random token ids, answers greedy and of a fixed length, unless options say otherwise. A row is measured
    for each load, one after the other. Times are milliseconds: TTFT to the first token, TPOT per token after it, ITL
    between tokens; medians, and what 99 of 100 stay below. Requests that failed, or whose answer had another length
    than asked for, count for nothing. FOREIGN: what other processes took of this machine meanwhile; above 5 % the
    figures say little.

    Exit code: 0; 1 when requests failed; 2 something must be changed; 3 no router; 130 after Ctrl-C, which ends the
    row and prints what has been measured.
    """
    plan = Plan.of(**given)
    terms = plan.terms(model=model, timeout_s=timeout, metadata=credentials.metadata)
    target = RouterTarget(address, credentials, terms, service_pids)
    return _measure(plan, target, {"address": address, "timeout_s": timeout})


# Options of `fissile worker` that say how the engine computes; the same names, variables and defaults.
_ENGINE_OPTIONS = apply(
    option("--dtype", envvar="FISSILE_DTYPE", default="auto", help="auto, float32, bfloat16 or float16."),
    option(
        "--kv-cache-dtype", envvar="FISSILE_KV_CACHE_DTYPE", default="auto",
        help="Of the KV cache: auto (the model's), bfloat16, float16 or fp8.",
    ),
    option(
        "--kernels", envvar="FISSILE_KERNELS", default="auto",
        help="cpu: our native kernels; torch: PyTorch's; auto: native where this machine can.",
    ),
    option(
        "--max-model-len", envvar="FISSILE_MAX_MODEL_LEN", type=click.IntRange(min=2),
        help="Longest prompt plus answer, tokens; absent: the model's own, or what the KV cache holds.",
    ),
    option(
        "--max-num-seqs", envvar="FISSILE_MAX_NUM_SEQS", type=click.IntRange(min=1), default=Config.max_num_seqs,
        help="Most sequences that run at once.",
    ),
    option(
        "--max-num-batched-tokens", envvar="FISSILE_MAX_NUM_BATCHED_TOKENS", type=click.IntRange(min=1),
        default=CPU_MAX_NUM_BATCHED_TOKENS, help="Most tokens computed in one step.",
    ),
    option(
        "--kv-cache-memory", envvar="FISSILE_KV_CACHE_MEMORY", type=ByteSize(),
        help="Memory of the KV cache of each rank, e.g. 2GiB; absent: a quarter of the free memory for all.",
    ),
    option(
        "--scheduling-policy", envvar="FISSILE_SCHEDULING_POLICY", type=click.Choice(SCHEDULING_POLICIES),
        default=Config.scheduling_policy,
        help="prefill_first: prompts go before running answers; mixed: both share each step.",
    ),
    option(
        "--prefix-caching/--no-prefix-caching", envvar="FISSILE_PREFIX_CACHING", default=True, help="Share prefixes.",
    ),
    option(
        "--threads", envvar="FISSILE_THREADS", type=click.IntRange(min=1),
        help="Threads of arithmetic, shared out to the ranks; absent: all cores.",
    ),
    option(
        "--tp-size", envvar="FISSILE_TP_SIZE", type=click.IntRange(min=1), default=1,
        help="Tensor parallel: so many ranks, each a process with its slice of the weights.",
    ),
    option(
        "--enable-expert-parallel/--no-enable-expert-parallel", envvar="FISSILE_ENABLE_EXPERT_PARALLEL", default=False,
        help="Mixtures of experts: each rank holds some experts whole, instead of a part of each.",
    ),
)  # fmt: skip


@bench.command(short_help="A checkpoint in this process: the engine alone.")
@option(
    "--model", envvar="FISSILE_MODEL", required=True, metavar="MODEL",
    help="Hugging Face checkpoint: a folder, or org/name[@revision] on the Hub.",
)  # fmt: skip
@plan_options
@_ENGINE_OPTIONS
def offline(
    model: str,
    dtype: str,
    kv_cache_dtype: str,
    kernels: str,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_memory: int | None,
    scheduling_policy: str,
    prefix_caching: bool,
    threads: int | None,
    tp_size: int,
    enable_expert_parallel: bool,
    **given: Any,
) -> int:
    """Measure the engine with a checkpoint, in this process: no router, no gRPC.

    Loads, figures and exit codes are those of `fissile bench serve`; what a service adds is the difference. The engine
    does not say how long requests queued, and how many prompt tokens were cached.
    """
    plan = Plan.of(**given)
    setup_logging(os.environ.get(LEVEL_VARIABLE, "warning"), service="offline")
    engine: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": prefix_caching,
        "scheduling_policy": scheduling_policy,
        "kv_cache_memory": kv_cache_memory or 0,
        "max_model_len": max_model_len or 0,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "kernels": kernels,
        "tensor_parallel_size": tp_size,
        "enable_expert_parallel": enable_expert_parallel,
    }
    try:
        config = Config(model=model, **engine)
    except ApiError as error:
        raise CommandError(str(error)) from None
    return _measure(plan, EngineTarget(config, threads, plan.terms()), {"engine": {**engine, "threads": threads}})
