"""`fissile bench`: measures a running router (`serve`), or a checkpoint in this process (`offline`:
worker.cli.bench)."""

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

from common.cli.bench import report
from common.cli.bench.figures import Figures, Setting, drafts_between, failures_of, figures_of
from common.cli.bench.machine import cpu_model
from common.cli.bench.plan import Plan
from common.cli.bench.records import Record
from common.cli.bench.target import BenchTarget, RouterTarget
from common.cli.bench.workload import Work, Workload
from common.cli.core.client import Credentials
from common.cli.core.console import Console
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials
from common.cli.group import OFFLINE, SuggestingGroup, find_entry_points, naming_missing_extra
from common.cli.version import versions

SUMMARIES = {
    "serve": "A running router, as its clients see it.",
    "offline": "A checkpoint in this process: the engine alone.",
}
_INTERRUPTED = 130
# Requests that are made before a row, and the tokens of their prompts, of which one takes about 36 bytes.
_PREPARED = 2048
_PREPARED_TOKENS = 1 << 21


@dataclass(slots=True)
class Benchmark:
    """Measures the rows of a plan, one after the other.

    The first SIGINT ends the running row, and the results so far are printed; the second one ends the process.

    Attributes:
        rows: measured so far, the one that was interrupted included.
        interrupted: whether SIGINT ended it.
    """

    plan: Plan
    target: BenchTarget
    workload: Workload
    console: Console = field(default_factory=Console)
    rows: list[Figures] = field(default_factory=list)
    interrupted: bool = False

    def run(self) -> None:
        """Measures all rows, or those before SIGINT."""
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
        """Measures one row after its warm-up; the two have different prompts."""
        plan, target = self.plan, self.target
        label = f"{setting}, {repeat + 1} of {plan.repeat}" if plan.repeat > 1 else str(setting)
        if plan.warmup:
            warm = functools.partial(self.workload.work, -1 - round_)
            self._warn(label, target.run(plan.warm_up(setting), warm, self._progress(f"{label}, warming up")))
        work = self._prepared(round_, plan.requests_of(setting) or _PREPARED)
        if self.interrupted:
            return
        drafts, begin, before = target.draft_counts(), time.perf_counter(), target.meter.read()
        records = target.run(plan.load(setting), work, self._progress(label))
        if self.interrupted and not records:
            return
        cpu = target.meter.shares(before, target.meter.read(), time.perf_counter() - begin)
        found = drafts_between(drafts, target.draft_counts())
        self.rows.append(figures_of(records, setting, repeat, plan.objectives, cpu, found))

    def _warn(self, label: str, warm_up: list[Record]) -> None:
        if failures := failures_of(warm_up):
            failed = sum(each.count for each in failures)
            told = report.failures_told(failures)
            self.console.line(f"warning: {label}: {failed} of {len(warm_up)} requests of the warm-up failed: {told}")

    def _prepared(self, round_: int, requests: int) -> Callable[[int], Work]:
        """Makes the first requests of a round now, within limits, so that making them later delays none."""
        made: list[Work] = []
        tokens = 0
        while len(made) < min(requests, _PREPARED) and tokens < _PREPARED_TOKENS:
            made.append(self.workload.work(round_, len(made)))
            tokens += len(made[-1].token_ids)
        return lambda index: made[index] if index < len(made) else self.workload.work(round_, index)

    def _progress(self, label: str) -> Callable[[list[Record], int], None]:
        def show(records: list[Record], in_flight: int) -> None:
            failed = sum(not record.ok for record in records)
            tokens = sum(record.output_tokens for record in records)
            told = f", {failed} failed" if failed else ""
            self.console.spin(f"{label}: {len(records) - in_flight} done{told}, {in_flight} in flight, {tokens} tokens")

        return show


def tell(benchmark: Benchmark, started: str, options: dict[str, Any]) -> None:
    """Writes the table and the JSON of the measured rows.

    Raises:
        CommandError: the JSON cannot be written (exit code 1).
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


def verdict(benchmark: Benchmark) -> int:
    """Prints failures and interruption. Returns the exit code.

    Raises:
        CommandError: requests failed (exit code 1) without an interruption.
    """
    failed = report.failure_line(benchmark.rows)
    if not benchmark.interrupted:
        if failed:
            raise CommandError(failed, 1)
        return 0
    if failed:
        click.echo(f"warning: {failed}", err=True)
    said = "the last row has only what had ended" if benchmark.rows else "nothing had been measured"
    click.echo(f"interrupted: {said}", err=True)
    return _INTERRUPTED


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
        raise CommandError(f"--json {file} cannot be written: {error.strerror}", 1) from None


def environment() -> dict[str, Any]:
    """Versions and hardware, on which the figures depend besides the options."""
    return {
        "versions": versions(),
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    }


def measure(plan: Plan, target: BenchTarget, options: dict[str, Any]) -> int:
    """Measures a target as planned, closes it and prints the results. Returns the exit code.

    Args:
        plan: what is measured.
        target: will be closed.
        options: of the target, for the JSON.

    Raises:
        CommandError: the target cannot do what is planned (exit code 2), or it or requests failed (1).
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        model = target.model
        workload = plan.workload(model["name"], model["vocab_size"], model["max_model_len"])
        benchmark = Benchmark(plan, target, workload)
        try:
            benchmark.run()
        except CommandError:
            tell(benchmark, started, options)
            raise
        tell(benchmark, started, options)
        return verdict(benchmark)
    finally:
        target.close()


class BenchGroup(SuggestingGroup):
    """Group of `serve` and `offline`. `offline` needs the worker, so its entry point is imported only when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands."""
        return list(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command; None for an unknown name."""
        if cmd_name != "offline":
            return super().get_command(ctx, cmd_name)
        with naming_missing_extra("bench offline"):
            command: click.Command = find_entry_points(OFFLINE)["bench"].load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure throughput and latency: of a running router (serve), or of a checkpoint in this process (offline).

    \b
    fissile bench serve                              closed loops of 1, 8 and 32 requests in flight
    fissile bench serve --rate 2,4 --duration 60s    open loop: 2, then 4 requests per second
    fissile bench offline --model DIR                the engine alone

    docs/how-to/bench.md says how to read the figures.
    """


@bench.command()
@options("bench serve")
@with_credentials
def serve(
    address: str, model: str, timeout: float, service_pids: tuple[int, ...], credentials: Credentials, **given: Any
) -> int:
    """Measure a running router as its clients see it.

    Prompts are random token ids, answers greedy and of a fixed length, unless options say otherwise. A row is measured
    for each load, one after the other. Times are milliseconds: TTFT to the first token, TPOT per token after it, ITL
    between tokens, as medians and 99th percentiles. Requests that failed, or whose answer had another length than asked
    for, are left out. FOREIGN is the share of this machine that other processes took meanwhile; above 5 % the figures
    say little.

    Exit code: 0, 1 if requests failed, 2 if something must be changed, 3 without a router, 130 after Ctrl-C, which ends
    the row and prints what has been measured.
    """
    plan = Plan.of(**given)
    terms = plan.terms(model=model, timeout_s=timeout, metadata=credentials.metadata)
    target = RouterTarget(address, credentials, terms, service_pids)
    return measure(plan, target, {"address": address, "timeout_s": timeout})
