"""Figures of a run from the records of its requests, and summaries of repeated runs. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from common.cli.bench.records import INTERRUPTED, Record
from common.cli.bench.statistics import Summary

_MS: Final = 1e3
# Metric of an objective -> a request's value in seconds; None without a value, which meets the objective.
_OBJECTIVE_VALUES: Final[dict[str, Callable[[Record], float | None]]] = {
    "ttft": lambda record: record.ttft,
    "tpot": lambda record: record.tpot,
    "itl": lambda record: max(record.itl, default=None),
    "latency": lambda record: record.latency,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Load of a run.

    Attributes:
        concurrency: requests in flight of a closed loop; None for an open loop.
        rate: mean requests per second of an open loop; None for a closed loop.
        burstiness: as in `load.gaps`; None for a closed loop.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float | None = None

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.concurrency is not None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Shares of the time of all cores of this machine during a run, from 0 to 1; None where the machine does not say.

    Attributes:
        client: of this process and its children; the engine's offline.
        service: of the service's processes on this machine; None when they are not known or elsewhere.
        foreign: of all other processes. None when the service runs here and its processes are not known.
        steal: taken by the hypervisor for other machines.
    """

    client: float | None = None
    service: float | None = None
    foreign: float | None = None
    steal: float | None = None


NO_SHARES: Final = CpuShares()


@dataclass(frozen=True, slots=True)
class Failures:
    """Number of requests that failed with one status, and the message of the first."""

    status: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective: per second, and as a share of all that ended, failed ones included."""

    requests_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts at one position behind a token: how many were verified, and how many were the model's own tokens."""

    verified: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. Only requests that succeeded count for tokens, rates and times.

    Attributes:
        setting: the load.
        repeat: which repetition, from 0.
        ok: requests that succeeded.
        failed: requests that failed.
        interrupted: requests that Ctrl-C ended; neither of the two.
        failures: by status, most frequent first.
        duration_s: from the run's begin to the end of its last request.
        input_tokens: of prompts.
        cached_tokens: of these, found in a prefix cache; None where nothing says so.
        output_tokens: of answers.
        requests_per_s: `ok` / `duration_s`, and likewise for tokens.
        ttft_ms: time to first token.
        tpot_ms: mean time per output token after the first, a value per request.
        itl_ms: time between messages with tokens, all requests together.
        latency_ms: to the end of the answer.
        queue_ms: as the service measured it: from arrival to the first step.
        prefill_ms: likewise, from the first step to the first token.
        service_ttft_ms: likewise, from arrival to the first token. What `ttft_ms` has above it is network and client.
        send_lag_ms: how late the client sent.
        max_in_flight: most requests that were in flight at once.
        workers: requests by the worker that finished them.
        retried: requests that were given to more than one worker.
        goodput: None without objectives.
        cpu: who used this machine meanwhile.
        drafts: of speculation, by position: those directly behind a token, the next ones, and so on; empty without any,
            or where nothing says so.
    """

    setting: Setting
    repeat: int
    ok: int
    failed: int
    interrupted: int
    failures: tuple[Failures, ...]
    duration_s: float
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    latency_ms: Summary | None
    queue_ms: Summary | None
    prefill_ms: Summary | None
    service_ttft_ms: Summary | None
    send_lag_ms: Summary | None
    max_in_flight: int
    workers: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    goodput: Goodput | None = None
    cpu: CpuShares = NO_SHARES
    drafts: tuple[DraftCounts, ...] = ()

    @property
    def tokens_per_verification(self) -> float:
        """Mean number of tokens from one verification of drafts: the accepted ones and one more."""
        return 1 + sum(each.accepted for each in self.drafts) / max(1, self.drafts[0].verified if self.drafts else 0)

    def as_dict(self) -> dict[str, Any]:
        """Converts the figures to JSON values."""
        return asdict(self)


def figures_of(
    records: Sequence[Record],
    setting: Setting,
    repeat: int = 0,
    objectives: Mapping[str, float] | None = None,
    cpu: CpuShares = NO_SHARES,
    drafts: Sequence[DraftCounts] = (),
) -> Figures:
    """Computes the figures of a run from the records of all its requests.

    Args:
        records: of requests that have ended, in any order.
        setting: the load.
        repeat: which repetition.
        objectives: most seconds by the names of OBJECTIVES; what meets all of them is goodput. None: not asked for.
        cpu: who used this machine meanwhile.
        drafts: by position.
    """
    good = [record for record in records if record.ok]
    duration = max((record.ended for record in records), default=0.0)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    inputs, outputs = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    interrupted = sum(record.status == INTERRUPTED for record in records)
    return Figures(
        setting=setting,
        repeat=repeat,
        ok=len(good),
        failed=len(records) - len(good) - interrupted,
        interrupted=interrupted,
        failures=failures_of(records),
        duration_s=duration,
        input_tokens=inputs,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=outputs,
        requests_per_s=_rate(len(good), duration),
        input_tokens_per_s=_rate(inputs, duration),
        output_tokens_per_s=_rate(outputs, duration),
        ttft_ms=_in_ms(record.ttft for record in good),
        tpot_ms=_in_ms(record.tpot for record in good),
        itl_ms=_in_ms(gap for record in good for gap in record.itl),
        latency_ms=_in_ms(record.latency for record in good),
        queue_ms=_in_ms(record.queue_s for record in good),
        prefill_ms=_in_ms(record.prefill_s for record in good),
        service_ttft_ms=_in_ms(record.service_ttft_s for record in good),
        send_lag_ms=_in_ms(record.sent - record.intended for record in records),
        max_in_flight=max_in_flight(records),
        workers=dict(sorted(Counter(record.worker_id for record in good if record.worker_id).items())),
        retried=sum(record.attempts > 1 for record in good),
        goodput=None if objectives is None else _goodput(records, objectives, duration),
        cpu=cpu,
        drafts=tuple(drafts),
    )


def drafts_between(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> list[DraftCounts]:
    """Drafts of a run, from the counts (verified, accepted) by position before and after it."""
    begins = [*before, *[(0, 0)] * (len(after) - len(before))]
    counts = [DraftCounts(v - v0, a - a0) for (v, a), (v0, a0) in zip(after, begins, strict=True)]
    return [each for each in counts if each.verified]


def failures_of(records: Iterable[Record]) -> tuple[Failures, ...]:
    """Failed requests by status, the most frequent first; ties are in the order of the first failure."""
    failed = sorted((r for r in records if not r.ok and r.status != INTERRUPTED), key=lambda record: record.ended)
    first: dict[str, str] = {}
    for record in failed:
        first.setdefault(record.status, record.message)
    counts = Counter(record.status for record in failed)
    return tuple(Failures(status, count, first[status]) for status, count in counts.most_common())


def max_in_flight(records: Iterable[Record]) -> int:
    """Most requests in flight at a time. A request that ends as another is sent does not overlap with it."""
    changes = sorted(change for record in records for change in ((record.sent, 1), (record.ended, -1)))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def meets(record: Record, objectives: Mapping[str, float]) -> bool:
    """True if a request that succeeded is within every objective, in seconds."""
    values = ((_OBJECTIVE_VALUES[name](record), limit) for name, limit in objectives.items())
    return all(value is None or value <= limit for value, limit in values)


def _goodput(records: Sequence[Record], objectives: Mapping[str, float], duration: float) -> Goodput:
    ended = [record for record in records if record.status != INTERRUPTED]
    met = sum(record.ok and meets(record, objectives) for record in ended)
    return Goodput(_rate(met, duration), met / len(ended) if ended else 0.0)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _in_ms(seconds: Iterable[float | None]) -> Summary | None:
    return Summary.of([value for value in seconds if value is not None], _MS)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the repetitions of a load."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Spread of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class Overview:
    """Summary of the repetitions of one load: the median of each figure, and how far they lie apart.

    Attributes:
        setting: the load.
        repeats: runs.
        requests_per_s: of `Figures`, and likewise the others; times are the runs' own p50 or p99.
    """

    setting: Setting
    repeats: int
    requests_per_s: Spread
    output_tokens_per_s: Spread
    ttft_ms_p50: Spread | None
    ttft_ms_p99: Spread | None
    tpot_ms_p50: Spread | None
    tpot_ms_p99: Spread | None

    def as_dict(self) -> dict[str, Any]:
        """Converts the figures to JSON values."""
        return asdict(self)


def overviews(rows: Sequence[Figures]) -> list[Overview]:
    """Makes a summary of each load, in the order of their first runs."""
    by_setting: dict[Setting, list[Figures]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    return [_overview(setting, runs) for setting, runs in by_setting.items()]


def _overview(setting: Setting, runs: Sequence[Figures]) -> Overview:
    ttft = [run.ttft_ms for run in runs if run.ttft_ms is not None]
    tpot = [run.tpot_ms for run in runs if run.tpot_ms is not None]
    return Overview(
        setting=setting,
        repeats=len(runs),
        requests_per_s=Spread.of(run.requests_per_s for run in runs),
        output_tokens_per_s=Spread.of(run.output_tokens_per_s for run in runs),
        ttft_ms_p50=Spread.of(summary.p50 for summary in ttft) if ttft else None,
        ttft_ms_p99=Spread.of(summary.p99 for summary in ttft) if ttft else None,
        tpot_ms_p50=Spread.of(summary.p50 for summary in tpot) if tpot else None,
        tpot_ms_p99=Spread.of(summary.p99 for summary in tpot) if tpot else None,
    )
