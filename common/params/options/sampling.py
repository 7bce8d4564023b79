"""Options of sampling, from the table of sampling parameters: for questions, and for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from common.params.options.bench import BENCHMARKS
from common.params.options.option import Option
from common.params.sampling_params import PARAMETERS


def _of_benchmarks() -> Iterator[Option]:
    """Rows for `fissile bench`, which is greedy by default; its variables have a prefix of their own."""
    for name, row in PARAMETERS.items():
        for option in row.options if row.shapes_distribution else ():
            variable = option.variable.replace("FISSILE_", "FISSILE_BENCH_")
            made = replace(option, variable=variable, commands=BENCHMARKS)
            if name == "temperature":
                made = replace(made, default=0.0, help=option.help.partition(" Default:")[0])
            yield made


SAMPLING: Final = (*(option for row in PARAMETERS.values() for option in row.options), *_of_benchmarks())
"""Rows of this file."""
