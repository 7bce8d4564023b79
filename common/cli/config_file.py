"""Options from a YAML file, below the command line and the environment; click does the layering and knows each source.

The file has a section per command, and in it that command's options by their long names, without the dashes:

    router:
      placement: prefix_aware
      worker: [10.0.0.1:50061, 10.0.0.2:50061]
      max-hold: 100ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from common.cli.failure import CommandError
from common.cli.options import option

FILE = "config"


def config_option(section: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """`--config FILE` for a command whose options are in the file's `section`."""

    def read(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            ctx.default_map = defaults(read_sections(value).get(section, {}), section, value, ctx.command)
        return value

    return option(
        "--config", FILE, envvar="FISSILE_CONFIG", default=None, type=click.Path(path_type=Path), metavar="FILE",
        is_eager=True, expose_value=False, callback=read,
        help="YAML file with options: a section per command. Command line and environment win over it.",
    )  # fmt: skip


def read_sections(path: Path) -> Mapping[str, Any]:
    """The sections of a configuration file.

    Raises:
        CommandError: it can not be read, or is no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CommandError(f"--config {path} can not be read: {reason}") from None
    except yaml.YAMLError as error:
        raise CommandError(f"--config {path} is no YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise CommandError(f"--config {path} is no mapping; use a section per command, such as `router:`")
    return content


def defaults(given: object, section: str, path: Path, command: click.Command) -> dict[str, Any]:
    """The options of a section by the names of their parameters.

    Raises:
        CommandError: the section is no mapping, or names an option that the command does not have.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise CommandError(f"--config {path}: {section} is no mapping; use `option: value` lines")
    names = option_names(command)
    unknown = [str(name) for name in given if name not in names]
    if unknown:
        allowed = ", ".join(sorted(names))
        raise CommandError(f"--config {path}: {section}.{unknown[0]} is no option of `{section}`; allowed: {allowed}")
    return {names[name]: _plain(value) for name, value in given.items() if value is not None}


def option_names(command: click.Command) -> dict[str, str]:
    """Long name, without dashes, of each option that a file may hold -> name of its parameter."""
    return {
        name.removeprefix("--"): param.name
        for param in command.params
        if isinstance(param, click.Option) and param.name is not None and not param.is_eager
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("--") and name not in param.secondary_opts
    }


def _plain(value: Any) -> Any:
    """As on the command line: what is no flag is text, so that every option reads it in one way."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else str(value)
