"""The plan of a benchmark, from the options of `fissile bench`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.cli.bench.dataset import DatasetError, read_dataset
from common.cli.bench.figures import Setting
from common.cli.bench.load import ClosedLoop, Extent, Load, OpenLoop, gaps
from common.cli.bench.service import Terms
from common.cli.bench.workload import GivenWorkload, RandomWorkload
from common.cli.client.generate import given
from common.cli.core.errors import CommandError
from common.params.options.bench import (
    DEFAULT_CONCURRENCY,
    DEFAULT_INPUT,
    MIN_REQUESTS,
    OPEN_LOOP_S,
    REQUESTS_PER_PLACE,
)
from common.params.options.types import Lengths
from common.params.sampling_params import DISTRIBUTION_FIELDS


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
        """Makes the plan from the values of the options.

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
        """Makes the load of a row.

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
        """Makes the load of the warm-up before a row."""
        return ClosedLoop(setting.concurrency or self.warmup, Extent(self.warmup))

    def requests_of(self, setting: Setting) -> int | None:
        """Number of requests of a row; None if the duration decides."""
        if self.requests is not None or self.duration_s is not None:
            return self.requests
        wanted = REQUESTS_PER_PLACE * (setting.concurrency or 0) + OPEN_LOOP_S * (setting.rate or 0.0)
        return max(MIN_REQUESTS, math.ceil(wanted))

    def workload(self, model: str, vocab_size: int, max_model_len: int) -> RandomWorkload | GivenWorkload:
        """Makes the requests for a model.

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
        """Makes the terms that all requests share."""
        return Terms(sampling=self.sampling, ignore_eos=self.ignore_eos, seed=self.seed, **others)

    def as_dict(self) -> dict[str, Any]:
        """Converts the plan to JSON values."""
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
    """Refuses a file that cannot be written before anything is measured."""
    if json_file == "-":
        return
    path = Path(json_file)
    folder = path.parent if path.parent.is_dir() else None
    if path.is_dir() or folder is None or not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"--json {json_file} cannot be written: valid is a file in a folder that is there, or -")


def read_file(path: Path, output_len: Lengths, seed: int) -> GivenWorkload:
    """Reads the requests of a data set from its file.

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
