"""Options of the commands: each with a default, a help text and an environment variable, all three in its help."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

import click
from click.core import ParameterSource
from fissile.client.connections import is_target

from common.cli.core.client import DEFAULT_ADDRESS

# The shortest timeout that is one: 0 would end everything at once.
SHORTEST_S: Final = 0.001
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|)")
# Numerator and denominator: 35 / 1000 is the nearest number to 0.035, and 35 * 0.001 is not.
_UNITS: Final = {"ms": (1, 1000), "s": (1, 1), "": (1, 1), "m": (60, 1), "h": (3600, 1)}


def seconds(text: str) -> float:
    """Seconds, from `250ms`, `0.25s`, `0.25`, `5m` or `1h`.

    Raises:
        ValueError: it is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; use for example 250ms, 0.25s or 5m")
    times, over = _UNITS[match[2]]
    return float(match[1]) * times / over


class Duration(click.ParamType[float]):
    """Seconds, from `250ms`, `0.25s`, `0.25`, `5m` or `1h`: the one form of all durations of all commands.

    Args:
        least: seconds, the shortest that is valid.
        most: seconds, the longest.
    """

    name = "duration"

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self._least = least
        self._most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads the text of an option."""
        try:
            read = value if isinstance(value, float) else seconds(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= read <= self._most:
            end = "or more" if math.isinf(self._most) else f"to {self._most:g}s"
            self.fail(f"{value} is out of range; use {self._least:g}s {end}", param, ctx)
        return read


class ByteSize(click.ParamType[int]):
    """Bytes, from `2GiB`, `512MiB`, `4096KiB` or a plain number."""

    name = "size"
    _FORM = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|MiB|KiB|)")
    _FACTORS: ClassVar = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the text of an option."""
        if isinstance(value, int):
            return value
        match = self._FORM.fullmatch(str(value).strip())
        size = int(float(match[1]) * self._FACTORS[match[2]]) if match else 0
        if size <= 0:
            self.fail(f"{value!r} is not a size; use for example 2GiB or 512MiB", param, ctx)
        return size


class ByteSizeText(click.ParamType[str]):
    """Bytes as `ByteSize` reads them, kept as they were written for the child process that does."""

    name = ByteSize.name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the text of an option."""
        ByteSize().convert(value, param, ctx)
        return str(value)


class Fraction(click.ParamType[float]):
    """A part of all, from `0.1%` or `0.001`."""

    name = "fraction"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads the text of an option."""
        text = str(value).strip()
        try:
            read = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{value!r} is not a fraction; use for example 0.1% or 0.001", param, ctx)
        if not 0 <= read <= 1:
            self.fail(f"{value} is out of range; use 0% to 100%", param, ctx)
        return read


class FractionText(click.ParamType[str]):
    """A part of all as `Fraction` reads it, kept as it was written for the child process that does."""

    name = Fraction.name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the text of an option."""
        Fraction().convert(value, param, ctx)
        return str(value)


class Sizes(click.ParamType[tuple[int, ...]]):
    """Numbers of at least 1, from `1,2,8`."""

    name = "sizes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Reads the text of an option."""
        if isinstance(value, tuple):
            return value
        numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in str(value).split(","))
        if min(numbers) < 1:
            self.fail(f"{value!r} is not a list of sizes; use for example 1,2,8", param, ctx)
        return numbers


class Bias(click.ParamType[tuple[int, float]]):
    """A token id and what is added to its logit, from `42=-1.5`."""

    name = "bias"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Reads the text of an option."""
        if isinstance(value, tuple):
            return value
        token, _, bias = str(value).partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a bias; use for example 42=-1.5", param, ctx)


class Line(click.ParamType[str]):
    """A text of a repeatable option: in an environment variable there is one on each line, since texts have blanks."""

    name = "text"
    envvar_list_splitter = "\n"


_GIVEN: Final = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def _refuse_empty(param: click.Parameter, context: click.Context, value: Any) -> None:
    """Refuses an empty value of an option or argument, which mostly comes from an empty shell variable.

    An empty environment variable counts as unset.

    Raises:
        BadParameter: `value`, or one of several values, is empty.
    """
    values = value if isinstance(value, tuple | list) else (value,)
    if "" in values and context.get_parameter_source(param.name or "") in _GIVEN:
        raise click.BadParameter("it is empty: give a value, or leave it out", context, param)


class FilledOption(click.Option):
    """An option that refuses empty values."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Processes a value as click does, after refusing an empty one."""
        _refuse_empty(self, ctx, value)
        return super().process_value(ctx, value)


class FilledArgument(click.Argument):
    """An argument that refuses empty values."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Processes a value as click does, after refusing an empty one."""
        _refuse_empty(self, ctx, value)
        return super().process_value(ctx, value)


def option(
    *names: str, envvar: str, may_be_empty: bool = False, **attributes: Any
) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes an option as `click.option` does; its help shows the default and the environment variable.

    Args:
        names: names of the option, as for `click.option`.
        envvar: environment variable.
        may_be_empty: True allows an empty value.
        attributes: further arguments of `click.option`.
    """
    kind = click.Option if may_be_empty else FilledOption
    return click.option(*names, envvar=envvar, show_envvar=True, show_default=True, cls=kind, **attributes)


def argument(name: str, **attributes: Any) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes an argument as `click.argument` does; it refuses empty values."""
    return click.argument(name, cls=FilledArgument, **attributes)


def _address(_: click.Context, __: click.Parameter, text: str) -> str:
    if not is_target(text):
        raise click.BadParameter(f"{text!r} is not an address with a port; use for example 10.0.0.1:50051")
    return text


def _addresses(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Addresses, from `HOST:PORT` or `HOST:PORT,HOST:PORT`."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise click.BadParameter(f"{text!r} is not a list of addresses; use for example 10.0.0.1:50051,10.0.0.2:50051")
    return tuple(_address(context, parameter, one) for one in found)


address_option = option(
    "--address",
    "--router",
    "address",
    envvar="FISSILE_ADDRESS",
    default=DEFAULT_ADDRESS,
    callback=_address,
    metavar="HOST:PORT",
    help="Address of the router.",
)


routers_option = option(
    "--address", "--router", "addresses", envvar="FISSILE_ADDRESS", default=DEFAULT_ADDRESS, callback=_addresses,
    metavar="HOST:PORT[,...]",
    help="Addresses of one router or of several: an answer whose router is lost continues at the next one.",
)  # fmt: skip
json_option = option("--json", "as_json", envvar="FISSILE_JSON", is_flag=True, default=False, help="Print JSON.")
timeout_option = option(
    "--timeout", envvar="FISSILE_TIMEOUT", default="600s", type=Duration(SHORTEST_S), help="Deadline of the whole call."
)
