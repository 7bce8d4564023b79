"""Figures of a benchmark as a table and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from common.cli.bench.figures import Failures, Figures, Spread, overviews
from common.cli.bench.statistics import Summary

SCHEMA: Final = "fissile.bench"
# Version of `as_json`; counts up with every change that a reader must know of. docs/how-to/bench.md lists the fields.
VERSION: Final = 1
# Thresholds of a warning: other processes' share of the machine, and how late the client was.
MAX_FOREIGN: Final = 0.05
MAX_SEND_LAG_MS: Final = 10.0
_DECIMALS: Final = 6

_HEADINGS: Final = (
    "LOAD",
    "OK",
    "FAIL",
    "REQ/S",
    "OUT/S",
    "TTFT",
    "P99",
    "TPOT",
    "P99",
    "ITL P99",
    "LATENCY",
    "FOREIGN",
)


def as_json(
    rows: Sequence[Figures], *, mode: str, started: str, interrupted: bool, model: Mapping[str, Any],
    options: Mapping[str, Any], environment: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Converts all results to JSON values.

    Args:
        rows: in the order in which they ran.
        mode: `serve` or `offline`.
        started: the time of day, ISO 8601.
        interrupted: whether Ctrl-C ended it.
        model: what was measured.
        options: as they were in force.
        environment: versions and machine.
    """
    made = {
        "schema": SCHEMA,
        "version": VERSION,
        "mode": mode,
        "started": started,
        "interrupted": interrupted,
        "model": dict(model),
        "options": dict(options),
        "environment": dict(environment),
        "rows": [row.as_dict() for row in rows],
        "overviews": [each.as_dict() for each in overviews(rows)],
    }
    plain: dict[str, Any] = _plain(made)
    return plain


def _plain(value: Any) -> Any:
    """Rounds numbers, and replaces infinities, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return "inf" if math.isinf(value) else round(value, _DECIMALS)
    return value


def table(rows: Sequence[Figures]) -> str:
    """Makes a table with a line for each row; times are p50 in ms unless a heading says otherwise."""
    goodput = any(row.goodput is not None for row in rows)
    headings = (*_HEADINGS, "GOOD") if goodput else _HEADINGS
    return _aligned([headings, *(_cells(row, goodput=goodput) for row in rows)])


def _cells(row: Figures, *, goodput: bool) -> tuple[str, ...]:
    cells = (
        str(row.setting),
        str(row.ok),
        str(row.failed),
        number(row.requests_per_s),
        number(row.output_tokens_per_s),
        *_p50_p99(row.ttft_ms),
        *_p50_p99(row.tpot_ms),
        _p50_p99(row.itl_ms)[1],
        _p50_p99(row.latency_ms)[0],
        percent(row.cpu.foreign),
    )
    return (*cells, percent(None if row.goodput is None else row.goodput.share)) if goodput else cells


def medians(rows: Sequence[Figures]) -> str:
    """Makes a table of the loads that ran more than once: medians of the repetitions and their spread."""
    return "\n".join(
        f"{each.setting}, {each.repeats} times: {_told(each.output_tokens_per_s)} output tokens/s"
        + (f", TTFT {_told(each.ttft_ms_p50)} ms" if each.ttft_ms_p50 else "")
        + (f", TPOT {_told(each.tpot_ms_p50)} ms" if each.tpot_ms_p50 else "")
        for each in overviews(rows)
        if each.repeats > 1
    )


def details(row: Figures) -> str:
    """Formats all figures of one row."""
    times = [(name, *map(number, summary.shown())) for name, summary in _times(row) if summary is not None]
    cpu = row.cpu
    cached = "" if row.cached_tokens is None else f", {row.cached_tokens} of them cached"
    lines = [
        f"{row.setting}: {row.ok} requests in {row.duration_s:.1f} s, at most {row.max_in_flight} in flight",
        f"tokens: {row.input_tokens} in ({number(row.input_tokens_per_s)}/s{cached}), "
        f"{row.output_tokens} out ({number(row.output_tokens_per_s)}/s)",
        f"CPU: client {percent(cpu.client)}, service {percent(cpu.service)}, foreign {percent(cpu.foreign)}, "
        f"stolen {percent(cpu.steal)}",
        *([f"workers: {', '.join(f'{name} {count}' for name, count in row.workers.items())}"] if row.workers else []),
        *([_drafts_told(row)] if row.drafts else []),
        *([f"{row.retried} requests were given to more than one worker"] if row.retried else []),
    ]
    return "\n".join([*lines, _aligned([("ms", "MEAN", "P50", "P90", "P99", "MAX"), *times])])


def _drafts_told(row: Figures) -> str:
    verified, accepted = sum(one.verified for one in row.drafts), sum(one.accepted for one in row.drafts)
    rates = " ".join(percent(one.accepted / one.verified) for one in row.drafts)
    return (
        f"drafts: {verified} verified, {accepted} accepted ({percent(accepted / verified)}; by position {rates}), "
        f"{number(row.tokens_per_verification)} tokens a verification"
    )


def warnings(rows: Sequence[Figures]) -> list[str]:
    """Lists reasons to distrust the figures, a line each."""
    said: list[str] = []
    for row in rows:
        foreign, lag = row.cpu.foreign, row.send_lag_ms
        if foreign is not None and foreign > MAX_FOREIGN:
            said.append(f"{row.setting}: other processes took {percent(foreign)} of this machine; measure again")
        if lag is not None and lag.p99 > MAX_SEND_LAG_MS:
            said.append(f"{row.setting}: this client sent {number(lag.p99)} ms late (p99); it is a bottleneck")
    return said


def failure_line(rows: Sequence[Figures]) -> str:
    """Line with the number of failed requests and the first message of each status; empty when none failed."""
    failed = sum(row.failed for row in rows)
    if not failed:
        return ""
    counts: dict[str, int] = {}
    messages: dict[str, str] = {}
    for failures in (each for row in rows for each in row.failures):
        counts[failures.status] = counts.get(failures.status, 0) + failures.count
        messages.setdefault(failures.status, failures.first_message)
    told = failures_told([Failures(status, count, messages[status]) for status, count in counts.items()])
    return f"{failed} of {sum(row.ok + row.failed for row in rows)} requests failed: {told}"


def failures_told(failures: Sequence[Failures]) -> str:
    """Number of failures of each status, and the first message; on one line."""
    return "; ".join(f"{each.count} {each.status}: {' '.join(each.first_message.split())}" for each in failures)


def number(value: float) -> str:
    """Formats a number with at least three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """Percentage for a share from 0 to 1; `-` when it is not known."""
    return "-" if share is None else f"{100 * share:.0f}%"


def _p50_p99(summary: Summary | None) -> tuple[str, str]:
    return ("-", "-") if summary is None else (number(summary.p50), number(summary.p99))


def _told(spread: Spread) -> str:
    return f"{number(spread.median)} ({number(spread.min)} to {number(spread.max)})"


def _times(row: Figures) -> list[tuple[str, Summary | None]]:
    return [
        ("TTFT", row.ttft_ms),
        ("TPOT", row.tpot_ms),
        ("ITL", row.itl_ms),
        ("latency", row.latency_ms),
        ("queue (service's)", row.queue_ms),
        ("prefill (service's)", row.prefill_ms),
        ("TTFT (service's)", row.service_ttft_ms),
        ("sent late", row.send_lag_ms),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns rows as columns: the first flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
