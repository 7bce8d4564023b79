"""Options from a YAML file. The command line and the environment override it; click records the source of each value.

The file has a section per command, and in it that command's options by their long names, without the dashes:

    router:
      placement: prefix_aware
      worker: [10.0.0.1:50061, 10.0.0.2:50061]
      max-hold: 100ms

A command whose class is `ConfigurableCommand` says in which line of the file a bad value stands, and remembers what it
was called with, so that its configuration can be read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from click.core import ParameterSource

from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand
from common.cli.core.options import option
from common.files import UnreadableFileError, read_file
from common.limits import MAX_OPTIONS_FILE_BYTES, MAX_OPTIONS_VALUES
from common.params.options.services import CONFIG_FILE

_PLACE = "fissile.config.place"
_ARGUMENTS = "fissile.config.arguments"


class _Loader(yaml.SafeLoader):
    """YAML loader with the booleans of YAML 1.2 only, because `off` and `no` are values of options."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def config_option(section: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Makes `--config FILE` for a command whose options are in the file's `section`."""

    def read(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            text = read_text(value)
            place = FilePlace(value, section, option_lines(text, section))
            ctx.meta[_PLACE] = place
            ctx.default_map = defaults(sections(text, value).get(section, {}), place, ctx.command)
        return value

    return option(CONFIG_FILE, is_eager=True, expose_value=False, callback=read)


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A section of a file, and the line of each of its options."""

    path: Path
    section: str
    lines: Mapping[str, int]

    def of(self, name: str) -> str:
        """Formats the place of an option in the file and its full name, for messages."""
        line = f", line {self.lines[name]}" if name in self.lines else ""
        return f"--config {self.path}{line}: {self.section}.{name}"


class ConfigurableCommand(ModalCommand):
    """A command with `config_option`."""

    def written(self, context: click.Context, param: click.Option) -> str:
        """Names an option as the user wrote it; an option of the --config file with its path and line."""
        if context.get_parameter_source(param.name or "") is ParameterSource.DEFAULT_MAP:
            place: FilePlace = context.meta[_PLACE]
            return place.of(param.opts[0].removeprefix("--"))
        return super().written(context, param)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Makes the context as click does; refuses an invalid value of the file with its place.

        Raises:
            CommandError: a value of the file is not allowed.
        """
        given = tuple(args)
        try:
            context = super().make_context(info_name, args, *rest, **extra)
        except click.BadParameter as error:
            if (placed := _placed(error)) is None:
                raise
            raise CommandError(placed) from None
        context.meta[_ARGUMENTS] = given
        return context


def arguments_of(context: click.Context) -> tuple[str, ...]:
    """Arguments that a ConfigurableCommand was called with."""
    given: tuple[str, ...] = context.meta[_ARGUMENTS]
    return given


def file_of(context: click.Context) -> Path | None:
    """The file of --config, if there is one."""
    place: FilePlace | None = context.meta.get(_PLACE)
    return None if place is None else place.path


def _placed(error: click.BadParameter) -> str | None:
    """Describes a wrong value of a file with its place."""
    context, param = error.ctx, error.param
    if context is None or param is None or param.name is None or _PLACE not in context.meta:
        return None
    if context.get_parameter_source(param.name) is not ParameterSource.DEFAULT_MAP:
        return None
    place: FilePlace = context.meta[_PLACE]
    return f"{place.of(param.opts[0].removeprefix('--'))}: {error.message}"


def read_text(path: Path) -> str:
    """Reads a configuration file.

    Raises:
        CommandError: it cannot be read.
    """
    try:
        return read_file(path, MAX_OPTIONS_FILE_BYTES).decode("utf-8")
    except UnreadableFileError as error:
        raise CommandError(f"--config {error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--config {path} cannot be read: it is not UTF-8") from None


def option_lines(text: str, section: str) -> dict[str, int]:
    """Finds the line, from 1, of each option of a section; none if the text is not YAML."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    found = next((value for key, value in entries if key.value == section), None)
    options = found.value if isinstance(found, yaml.MappingNode) else []
    return {str(key.value): key.start_mark.line + 1 for key, _ in options}


def sections(text: str, path: Path) -> Mapping[str, Any]:
    """Parses the sections of a configuration file.

    Raises:
        CommandError: it is not a mapping.
    """
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise CommandError(f"--config {path} is not YAML: {error}") from None
    except RecursionError:
        raise CommandError(f"--config {path} is nested too deeply") from None
    _check_size(content, path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise CommandError(f"--config {path} is not a mapping; use a section per command, such as `router:`")
    return content


def _check_size(content: object, path: Path) -> None:
    """Limits the number of values with aliases expanded, since a short file can expand to any number.

    Raises:
        CommandError: there are more than MAX_OPTIONS_VALUES.
    """
    left, count = [content], 0
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        if count + len(left) > MAX_OPTIONS_VALUES:
            raise CommandError(f"--config {path} has more than {MAX_OPTIONS_VALUES} values, with its aliases")


def defaults(given: object, place: FilePlace, command: click.Command) -> dict[str, Any]:
    """The options of a section by the names of their parameters.

    Raises:
        CommandError: the section is not a mapping, or names an option that the command does not have.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise CommandError(f"--config {place.path}: {place.section} is not a mapping; use `option: value` lines")
    names = option_names(command)
    unknown = [str(name) for name in given if name not in names]
    if unknown:
        allowed = ", ".join(sorted(names))
        raise CommandError(f"{place.of(unknown[0])} is not an option of `{place.section}`; allowed: {allowed}")
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
    """Converts values other than flags to text, so that options read them as on the command line."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else str(value)
