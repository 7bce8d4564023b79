"""Options and arguments of commands; the options come from the table in `common/params/options`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import click
from click.core import ParameterSource
from fissile.client.connections import is_target

from common.params.options.engine import SERVE
from common.params.options.option import Option, written
from common.params.options.services import CONFIG_FILE
from common.params.options.table import options_of
from common.params.options.types import AsWritten, ByteSize, Duration, Fraction, LengthRange, Names, Speculation

_GIVEN: Final = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
# Types whose defaults are shown in the help as the command line takes them.
_WRITTEN: Final = (Duration, Fraction, LengthRange)
# Types whose values `fissile serve` passes on as text.
_PASSED_AS_TEXT: Final = (ByteSize, Fraction, Names, Speculation)


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


def argument(name: str, **attributes: Any) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes an argument as `click.argument` does; it refuses empty values."""
    return click.argument(name, cls=FilledArgument, **attributes)


def option(row: Option, command: str = "", **more: Any) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes the decorator that adds one option to a command.

    Args:
        row: of the table.
        command: name after `fissile`.
        more: further arguments of `click.option`.
    """
    kind, default = row.type, row.default
    show_default: bool | str = bool(row.default_text)
    if command == SERVE and row.is_passed_on:
        # A value that the user does not give is left to the router or the worker, whose default is shown.
        default, show_default = None, row.default_text or False
        if isinstance(kind, _PASSED_AS_TEXT):
            kind = AsWritten(kind)
    attributes: dict[str, Any] = {
        "envvar": row.variable,
        "show_envvar": True,
        "show_default": show_default,
        "help": row.help,
        "type": kind,
        "metavar": row.metavar,
        "multiple": row.is_repeatable,
        "required": row.is_required,
        "callback": _CALLBACKS.get(row.value_name),
        "cls": click.Option if row.may_be_empty else FilledOption,
    }
    if default is not None or row.is_flag or "/" in row.names:
        attributes["default"] = written(default, kind) if isinstance(kind, _WRITTEN) else default
    if row.is_flag:
        attributes["is_flag"] = True
    return click.option(*row.names.split(), row.value_name, **(attributes | more))


def options(command: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes the decorator that adds all options of a command, named as after `fissile`, in the order of the table."""
    rows = [row for row in options_of(command).values() if row is not CONFIG_FILE]

    def add(decorated: click.decorators.FC) -> click.decorators.FC:
        return functools.reduce(lambda made, row: option(row, command)(made), reversed(rows), decorated)

    return add


def _address(_: click.Context, __: click.Parameter, text: str) -> str:
    """Checks an address, `HOST:PORT`."""
    if not is_target(text):
        raise click.BadParameter(f"{text!r} is not an address with a port; use for example 10.0.0.1:50051")
    return text


def _addresses(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Reads addresses, from `HOST:PORT` or `HOST:PORT,HOST:PORT`."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise click.BadParameter(f"{text!r} is not a list of addresses; use for example 10.0.0.1:50051,10.0.0.2:50051")
    return tuple(_address(context, parameter, one) for one in found)


def _each_address(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Checks addresses of servers that are not gRPC's, which know no schemes such as `dns:///`."""
    if odd := next((text for text in texts if "/" in text), None):
        raise click.BadParameter(f"{odd!r} is not an address; use for example 10.0.0.1:9464")
    return tuple(_address(context, parameter, text) for text in texts)


_CALLBACKS: Final[Mapping[str, Callable[[click.Context, click.Parameter, Any], Any]]] = {
    "address": _address,
    "addresses": _addresses,
    "router_metrics": _each_address,
}
