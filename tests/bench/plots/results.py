"""Results of benchmark runs as data: the files of tests/bench/results.

A file is one run:

    bench     the module under tests/bench that was run, or what else was measured (`peers` is tests/bench/peers/run)
    machine   kind, processor, instruction set and number of cores; `unrecorded` where nobody wrote down which
    commit    null where nobody wrote it down
    date      of the run, with its time where there are several of a day
    command   null where it is not known, or was a script that was not kept
    workload  null where it is the benchmark's own
    about     what else ran, how many runs there were, what does not count
    rows      the figures

A row is one figure: `metric`, `unit` and `value`, with `value_max` where several runs gave a range; `counts: false`
where too much else ran beside it; `repetition` where each repetition has a row of its own, `repetitions` where the
value is a median of so many. Everything else (`peer`, `concurrency`, `step`, ...) says what was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "results"
# Milliseconds of a unit.
_MILLISECONDS: Final = {"us": 0.001, "ms": 1.0, "s": 1000.0}
_GIGA: Final = {"GB/s": 1.0, "GFLOP/s": 1.0, "TFLOP/s": 1000.0}
Label = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run.

    Attributes:
        kind: machines of one kind share a section of the page.
        processor: in words; None where nobody wrote it down, and so `instruction_set`, that of the kernels.
        cores: which the benchmark had.
    """

    kind: str
    processor: str | None
    instruction_set: str | None
    cores: int


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; the module's docstring has the fields. `labels` name the measured quantity."""

    metric: str
    unit: str
    value: Decimal | int
    value_max: Decimal | int | None
    counts: bool
    repetition: int | None
    repetitions: int | None
    labels: Mapping[str, Label]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Row:
        """Of a file's entry. KeyError if metric, unit or value is missing, ValueError if the value is not a number."""
        labels = dict(entry)
        metric, unit, value = (labels.pop(name) for name in ("metric", "unit", "value"))
        if not isinstance(value, Decimal | int) or isinstance(value, bool):
            raise ValueError(f"{metric}: {value!r} is not a number")
        optional = (labels.pop(name, None) for name in ("value_max", "repetition", "repetitions"))
        value_max, repetition, repetitions = optional
        return cls(metric, unit, value, value_max, labels.pop("counts", True), repetition, repetitions, labels)

    @property
    def text(self) -> str:
        """The figure as the file writes it, a range as two."""
        low = f"{self.value:,}"
        return low if self.value_max is None else f"{low} to {self.value_max:,}"

    def fits(self, metric: str, labels: Mapping[str, Label]) -> bool:
        """True if the row is of `metric` and has all of `labels`."""
        return self.metric == metric and all(self.labels.get(name) == value for name, value in labels.items())


@dataclass(frozen=True, slots=True)
class Result:
    """One run; `name` is its file's, without the suffix."""

    name: str
    bench: str
    machine: Machine
    commit: str | None
    date: str
    command: str | None
    workload: str | None
    about: str
    rows: Sequence[Row]

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> Result:
        """Of a file's content. KeyError, TypeError or ValueError if it is not as the module's docstring says."""
        datetime.fromisoformat(entry["date"])
        rest = {field: entry[field] for field in ("bench", "commit", "date", "command", "workload", "about")}
        rows = tuple(Row.of(row) for row in entry["rows"])
        return cls(name=name, machine=Machine(**entry["machine"]), rows=rows, **rest)

    def find(self, metric: str, **labels: Label) -> list[Row]:
        """Rows of `metric` with all of `labels`, in the file's order."""
        return [row for row in self.rows if row.fits(metric, labels)]

    def limit(self, metric: str) -> float | None:
        """Rate of the machine in this run, in 1e9 bytes or operations per second; None if it was not measured."""
        return next((float(row.value) * _GIGA[row.unit] for row in self.find(metric)), None)


def load(folder: Path = FOLDER) -> list[Result]:
    """All results, newest first; of one day in the order of their names."""
    texts = {path.stem: path.read_text() for path in folder.glob("*.json")}
    # Decimal keeps the figures as they are written, zeros at the end included.
    results = [Result.of(name, json.loads(text, parse_float=Decimal)) for name, text in sorted(texts.items())]
    return sorted(results, key=lambda result: result.date, reverse=True)


def of(results: Iterable[Result], bench: str, kind: str | None = None) -> list[Result]:
    """Results of a benchmark, of one kind of machine if it is given."""
    return [result for result in results if result.bench == bench and kind in (None, result.machine.kind)]


def median(rows: Sequence[Row]) -> float | None:
    """Median over the repetitions, times in milliseconds; None without rows."""
    values = [float(row.value) * _MILLISECONDS.get(row.unit, 1.0) for row in rows]
    return statistics.median(values) if values else None
