"""`fissile config show`: the options in force for a command, and where each value comes from."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.cli.core.output import aligned
from common.cli.group import COMMANDS, SuggestingGroup, find_entry_points
from common.params.options.types import Duration, Fraction

# The commands that take --config.
CONFIGURABLE = ("router", "worker", "serve")


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Show the configuration."""


@config.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("command", type=click.Choice(CONFIGURABLE))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@options("config show")
def show(as_json: bool, command: str, arguments: tuple[str, ...]) -> None:
    """Show the options in force for COMMAND with ARGUMENTS, and the source of each. Starts nothing.

    The environment and the file of --config or FISSILE_CONFIG count as they would for COMMAND itself.
    """
    rows = in_force(find_entry_points(COMMANDS)[command].load(), command, arguments)
    if as_json:
        click.echo(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}))
        return
    click.echo(aligned(rows))


def in_force(command: click.Command, name: str, arguments: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Lists options with their values and sources, in the order of the command's help.

    Raises:
        CommandError: a value is not allowed.
    """
    try:
        context = command.make_context(name, list(arguments))
    except click.UsageError as error:
        raise CommandError(error.format_message()) from None
    options = [param for param in command.params if isinstance(param, click.Option) and param.name in context.params]
    return [
        (param.opts[0].removeprefix("--"), _text(context.params[param.name or ""], param.type), _source(context, param))
        for param in options
    ]


def _source(context: click.Context, param: click.Option) -> str:
    match context.get_parameter_source(param.name or ""):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return f"environment {param.envvar}"
        case ParameterSource.DEFAULT_MAP:
            return "--config file"
        case _:
            return "default"


def _text(value: Any, kind: click.ParamType[Any]) -> str:
    """Formats a value as the command line takes it."""
    if isinstance(kind, Duration) and value is not None:
        return f"{value:g}s"
    if isinstance(kind, Fraction) and value is not None:
        return f"{100 * value:g}%"
    if isinstance(value, tuple):
        return ",".join("=".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value) or "-"
    return "-" if value is None else str(value)
