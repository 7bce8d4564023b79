"""Options of `fissile bench`, read and checked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from common.cli.bench.dataset import DatasetError, read_dataset
from common.cli.bench.figures import OBJECTIVES, Setting
from common.cli.bench.load import ClosedLoop, Extent, Load, OpenLoop, gaps
from common.cli.bench.service import Terms
from common.cli.bench.workload import GivenWorkload, Lengths, RandomWorkload
from common.cli.client.generate import given
from common.cli.core.errors import CommandError
from common.cli.core.options import Duration, option, seconds
from common.cli.core.tls_options import apply
from common.params.sampling_params import DISTRIBUTION_FIELDS

DEFAULT_CONCURRENCY: Final = (1, 8, 32)
DEFAULT_INPUT: Final = Lengths(32, 256)
MIN_REQUESTS: Final = 10
# Requests of a closed loop, for each in flight; time that the requests of an open loop are sent in.
REQUESTS_PER_PLACE: Final = 4
OPEN_LOOP_S: Final = 30.0


class LengthRange(click.ParamType[Lengths]):
    """Tokens: `LOW:HIGH`, or one number."""

    name = "lengths"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """Reads the text of an option."""
        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers above 0, separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Reads the text of an option."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < each < math.inf for each in numbers):
            whole = "whole numbers" if self._kind is int else "numbers"
            self.fail(f"{value!r} is not a list of {whole} above 0; use for example 1,8,32", param, ctx)
        if len(set(numbers)) != len(numbers):
            self.fail(f"{value!r} names a number twice; --repeat measures all of them again", param, ctx)
        return numbers


class Objectives(click.ParamType[dict[str, float]]):
    """`METRIC=TIME,...`."""

    name = "objectives"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, float]:
        """Reads the text of an option."""
        if isinstance(value, dict):
            return value
        found: dict[str, float] = {}
        for part in str(value).split(","):
            name, _, limit = part.partition("=")
            if name.strip() not in OBJECTIVES or name.strip() in found:
                self.fail(f"{part!r} is not an objective; use {', '.join(OBJECTIVES)}, each once: ttft=200ms,tpot=50ms")
            try:
                found[name.strip()] = seconds(limit)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return found


_COUNT: Final = click.IntRange(min=1)

plan_options = apply(
    option(
        "--concurrency", envvar="FISSILE_BENCH_CONCURRENCY", type=Numbers(int), metavar="N[,N...]",
        help="Closed loop: number of requests in flight; a row for each number. Default: 1,8,32.",
    ),
    option(
        "--rate", envvar="FISSILE_BENCH_RATE", type=Numbers(float), metavar="R[,R...]",
        help="Open loop instead: requests per second on average, whatever the service does; a row for each number. "
        "Times count from when a request was to be sent.",
    ),
    option(
        "--burstiness", envvar="FISSILE_BENCH_BURSTINESS", type=float, default=None, metavar="SHAPE",
        help="Shape of the arrivals of --rate: 1 is a Poisson process, less is burstier, more is more regular, inf "
        "evenly spaced. Default: 1.",
    ),
    option(
        "--requests", envvar="FISSILE_BENCH_REQUESTS", type=_COUNT,
        help=f"Number of requests of each row. Default without --duration: {REQUESTS_PER_PLACE} for each in flight, or "
        f"what --rate sends in {OPEN_LOOP_S:g} s; at least {MIN_REQUESTS}.",
    ),
    option(
        "--duration", envvar="FISSILE_BENCH_DURATION", type=Duration(), metavar="TIME",
        help="Duration of each row, for example 60s: after it no request is sent, and those in flight are waited for. "
        "With --requests, whichever is first. Default: no limit.",
    ),
    option(
        "--warmup", envvar="FISSILE_BENCH_WARMUP", type=click.IntRange(min=0), default=2,
        help="Number of requests before each row that do not count, with prompts of their own.",
    ),
    option(
        "--repeat", envvar="FISSILE_BENCH_REPEAT", type=_COUNT, default=1,
        help="Number of times that all rows are measured, in turn, so that drift affects all of them alike.",
    ),
    option(
        "--input-len", envvar="FISSILE_BENCH_INPUT_LEN", type=LengthRange(), metavar="LOW:HIGH",
        help=f"Tokens of a prompt, uniform in a range, or one number. Prompts are random token ids. Default: "
        f"{DEFAULT_INPUT}.",
    ),
    option(
        "--output-len", envvar="FISSILE_BENCH_OUTPUT_LEN", type=LengthRange(), default="64", metavar="LOW:HIGH",
        help="Tokens of an answer, uniform in a range, or one number.",
    ),
    option(
        "--prefix-len", envvar="FISSILE_BENCH_PREFIX_LEN", type=click.IntRange(min=0), default=None,
        help="Number of tokens that all prompts of a row begin with, before those of --input-len: for prefix caches. "
        "Default: 0.",
    ),
    option(
        "--dataset", envvar="FISSILE_BENCH_DATASET", type=click.Path(path_type=Path), metavar="FILE",
        help='Prompts from a file instead: a JSON object a line, {"prompt": TEXT}, {"messages": [...]} or '
        '{"token_ids": [...]}, with "max_tokens" where it is not --output-len.',
    ),
    option(
        "--seed", envvar="FISSILE_BENCH_SEED", type=click.IntRange(0, 2**64 - 1), default=0,
        help="Seed of prompts, lengths, arrival times and sampling: the same seed and the same list of loads give the "
        "same work everywhere; lengths are the same in every row.",
    ),
    option(
        "--ignore-eos/--no-ignore-eos", envvar="FISSILE_BENCH_IGNORE_EOS", default=True,
        help="Continue past the model's end-of-sequence tokens, so that every answer has the length asked for; "
        "another length is a failure.",
    ),
    option(
        "--temperature", envvar="FISSILE_BENCH_TEMPERATURE", type=float, default=0.0,
        help="Sampling temperature; 0 is greedy.",
    ),
    option(
        "--top-k", envvar="FISSILE_BENCH_TOP_K", type=int,
        help="Sample among the K most likely tokens; 0 is off. Default: the model's, or off.",
    ),
    option(
        "--top-p", envvar="FISSILE_BENCH_TOP_P", type=float,
        help="Sample among the most likely tokens whose probabilities sum to P, in (0, 1]. Default: the model's, or 1 "
        "(off).",
    ),
    option(
        "--min-p", envvar="FISSILE_BENCH_MIN_P", type=float,
        help="Drop tokens less likely than P times the most likely one, in [0, 1]. Default: the model's, or 0 (off).",
    ),
    option(
        "--repetition-penalty", envvar="FISSILE_BENCH_REPETITION_PENALTY", type=float,
        help="Divide the logits of tokens in prompt and answer. Default: the model's, or 1 (off).",
    ),
    option(
        "--presence-penalty", envvar="FISSILE_BENCH_PRESENCE_PENALTY", type=float,
        help="Subtract once from the logits of tokens in the answer. Default: 0 (off).",
    ),
    option(
        "--frequency-penalty", envvar="FISSILE_BENCH_FREQUENCY_PENALTY", type=float,
        help="Subtract per occurrence from the logits of tokens in the answer. Default: 0 (off).",
    ),
    option(
        "--slo", envvar="FISSILE_BENCH_SLO", type=Objectives(), metavar="METRIC=TIME[,...]",
        help=f"Objectives, such as ttft=200ms,tpot=50ms; requests that meet them all are counted as goodput. Metrics: "
        f"{', '.join(OBJECTIVES)}. Default: none.",
    ),
    option(
        "--json", "json_file", envvar="FISSILE_BENCH_JSON", metavar="FILE|-",
        help="Write everything as JSON to this file; - is standard output, and the table then goes to standard error. "
        "Default: no file.",
    ),
    option(
        "--details/--no-details", envvar="FISSILE_BENCH_DETAILS", default=None,
        help="Print all figures of every row below the table. Default: only when there is one row.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a benchmark: what is measured, and how it is reported.

    Attributes:
        settings: the loads, each a row in every repetition.
        requests: of a row; None: by `duration_s`, or the default.
        duration_s: of a row; None is no limit.
        warmup: requests before each row.
        repeat: repetitions.
        input_len: of random prompts.
        output_len: of answers.
        prefix_len: of random prompts.
        dataset: file of prompts; None: they are random.
        entries: of the data set.
        seed: of everything random.
        ignore_eos: whether answers go on past the model's end.
        sampling: parameters that were given.
        objectives: of goodput, in seconds; None: not asked for.
        json_file: where JSON goes; `-` is standard output, None nowhere.
        details: whether all figures are printed; None: when there is one row.
    """

    settings: tuple[Setting, ...]
    requests: int | None
    duration_s: float | None
    warmup: int
    repeat: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int
    dataset: Path | None
    seed: int
    ignore_eos: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    objectives: Mapping[str, float] | None = None
    json_file: str | None = None
    details: bool | None = None
    entries: GivenWorkload | None = None

    @classmethod
    def of(
        cls,
        *,
        concurrency: tuple[int, ...] | None,
        rate: tuple[float, ...] | None,
        burstiness: float | None,
        duration: float | None,
        input_len: Lengths | None,
        prefix_len: int | None,
        dataset: Path | None,
        slo: dict[str, float] | None,
        json_file: str | None,
        output_len: Lengths,
        seed: int,
        **others: Any,
    ) -> Plan:
        """The options of `plan_options`.

        Raises:
            CommandError: they do not fit together, one is out of range, or the data set cannot be used (exit code 2).
        """
        sampling = given({name: others.pop(name) for name in DISTRIBUTION_FIELDS})
        if dataset is not None and (input_len is not None or prefix_len is not None):
            named = "--prefix-len" if input_len is None else "--input-len"
            raise CommandError(f"{named} is of random prompts: leave it away with --dataset")
        if json_file is not None:
            _require_writable(json_file)
        plan = cls(
            settings=_settings(concurrency, rate, burstiness),
            duration_s=duration,
            input_len=input_len or DEFAULT_INPUT,
            prefix_len=prefix_len or 0,
            dataset=dataset,
            output_len=output_len,
            seed=seed,
            sampling=sampling,
            objectives=slo,
            json_file=json_file,
            entries=None if dataset is None else read_file(dataset, output_len, seed),
            **others,
        )
        for setting in plan.settings:
            plan.load(setting)
        return plan

    def load(self, setting: Setting) -> Load:
        """The load of a row, from its begin.

        Raises:
            CommandError: a number is out of range.
        """
        try:
            extent = Extent(self.requests_of(setting), self.duration_s)
            if setting.concurrency is not None:
                return ClosedLoop(setting.concurrency, extent)
            return OpenLoop(gaps(setting.rate or 0.0, setting.burstiness or 0.0, self.seed), extent)
        except ValueError as error:
            raise CommandError(str(error)) from None

    def warm_up(self, setting: Setting) -> Load:
        """Load that goes before a row."""
        return ClosedLoop(setting.concurrency or self.warmup, Extent(self.warmup))

    def requests_of(self, setting: Setting) -> int | None:
        """Requests of a row; None: the duration decides."""
        if self.requests is not None or self.duration_s is not None:
            return self.requests
        wanted = REQUESTS_PER_PLACE * (setting.concurrency or 0) + OPEN_LOOP_S * (setting.rate or 0.0)
        return max(MIN_REQUESTS, math.ceil(wanted))

    def workload(self, model: str, vocab_size: int, max_model_len: int) -> RandomWorkload | GivenWorkload:
        """Workload of a model.

        Raises:
            CommandError: the model is too short for it.
        """
        if self.entries is not None:
            return self.entries
        made = RandomWorkload(self.seed, vocab_size, self.input_len, self.output_len, self.prefix_len)
        if made.longest > max_model_len:
            prefix = f", --prefix-len {self.prefix_len}" if self.prefix_len else ""
            raise CommandError(
                f"--input-len {self.input_len}{prefix} and --output-len {self.output_len} come to {made.longest} "
                f"tokens; valid: at most {max_model_len}, the length of {model}"
            )
        return made

    def terms(self, **others: Any) -> Terms:
        """Terms that all requests have in common."""
        return Terms(sampling=self.sampling, ignore_eos=self.ignore_eos, seed=self.seed, **others)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is in force."""
        return {
            "concurrency": [each.concurrency for each in self.settings if each.concurrency is not None],
            "rate": [each.rate for each in self.settings if each.rate is not None],
            "burstiness": self.settings[0].burstiness,
            "requests": [self.requests_of(each) for each in self.settings],
            "duration_s": self.duration_s,
            "warmup": self.warmup,
            "repeat": self.repeat,
            "input_len": None if self.dataset else str(self.input_len),
            "output_len": str(self.output_len),
            "prefix_len": self.prefix_len,
            "dataset": None if self.dataset is None else str(self.dataset),
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "sampling": dict(self.sampling),
            "slo_ms": None if self.objectives is None else {k: v * 1e3 for k, v in self.objectives.items()},
        }


def _settings(
    concurrency: tuple[int, ...] | None, rates: Iterable[float] | None, burstiness: float | None
) -> tuple[Setting, ...]:
    if rates is None:
        if burstiness is not None:
            raise CommandError("--burstiness is of an open loop: give --rate too")
        return tuple(Setting(concurrency=each) for each in concurrency or DEFAULT_CONCURRENCY)
    if concurrency is not None:
        raise CommandError("--concurrency is a closed loop and --rate an open one: give one of them")
    return tuple(Setting(rate=rate, burstiness=1.0 if burstiness is None else burstiness) for rate in rates)


def _require_writable(json_file: str) -> None:
    """Before the first request: a measurement is not to be lost at its end."""
    if json_file == "-":
        return
    path = Path(json_file)
    folder = path.parent if path.parent.is_dir() else None
    if path.is_dir() or folder is None or not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"--json {json_file} cannot be written: valid is a file in a folder that is there, or -")


def read_file(path: Path, output_len: Lengths, seed: int) -> GivenWorkload:
    """The requests of a data set's file.

    Raises:
        CommandError: it cannot be read, or a line is not a request.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            return read_dataset(lines, output_len, seed)
    except OSError as error:
        raise CommandError(f"--dataset {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--dataset {path} cannot be read: it is not UTF-8") from None
    except DatasetError as error:
        raise CommandError(f"--dataset {path}: {error}") from None
