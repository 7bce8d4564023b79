"""The whole table of options: of the services, the clients, the benchmarks and of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from common.params.options.bench import BENCH, BENCHMARKS
from common.params.options.clients import CLIENTS, CREDENTIALS
from common.params.options.engine import ENGINE
from common.params.options.http import FACADE
from common.params.options.option import Option
from common.params.options.services import PLACES, SERVING
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


OPTIONS: Final = (*PLACES, *ENGINE, *FACADE, *SERVING, *BENCH, *CLIENTS, *SAMPLING, *CREDENTIALS)
"""Every option of every command, in the order of their help."""


@cache
def options_of(command: str) -> Mapping[str, Option]:
    """Options of a command, named as after `fissile`, by the names of their values."""
    return {row.value_name: row for row in OPTIONS if command in row.commands}


def default_of(command: str, value_name: str) -> Any:
    """Default of one option of a command."""
    return options_of(command)[value_name].default


@cache
def config_fields() -> Mapping[str, Option]:
    """Options that set a field of `Config`, by the field."""
    return {row.field: row for row in OPTIONS if row.field}


def library_default(field: str) -> Any:
    """Default of a field of `Config` that has an option."""
    row = config_fields()[field]
    return row.default if row.library_default is None else row.library_default
