"""A row of the table of options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from common.params.options.types import Duration, Fraction

FILE: Final = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of one or more commands.

    Its key in the --config file is its first long name without dashes; other long names are accepted there too.

    Attributes:
        names: long names, separated by blanks; `--tls/--no-tls` is a flag with a negation.
        variable: environment variable.
        help: sentences for `--help` and docs/reference/options.md; they say the default if `default` does not.
        commands: names of the commands that take it, as after `fissile`.
        type: of a value; None is text, or True and False for a flag.
        default: value without the option; None is none.
        parameter: name of the value in the code; by default the first name with underscores.
        metavar: placeholder for the value in the help; by default the name of the type.
        is_flag: True if the option without a value means True; implied by a negation.
        is_repeatable: True if the option may be given several times; its value is a tuple.
        is_required: True if the command fails without it.
        may_be_empty: True if an empty text is a value.
        is_passed_on: True if `fissile serve` gives it to its router or workers, and only when the user gives it.
        field: field of `Config` that it sets.
        library_default: default of that field, if the library has another one than the commands.
    """

    names: str
    variable: str
    help: str
    commands: tuple[str, ...]
    type: click.ParamType[Any] | None = None
    default: Any = None
    parameter: str = ""
    metavar: str | None = None
    is_flag: bool = False
    is_repeatable: bool = False
    is_required: bool = False
    may_be_empty: bool = False
    is_passed_on: bool = False
    field: str = ""
    library_default: Any = None

    @property
    def name(self) -> str:
        """First long name without dashes: the key in the --config file."""
        return self.names.split()[0].split("/")[0].removeprefix("--")

    @property
    def value_name(self) -> str:
        """Name of the value in the code."""
        return self.parameter or self.name.replace("-", "_")

    @property
    def default_text(self) -> str:
        """The default as the command line takes it; "" if there is none, or the help says it."""
        if self.default in (None, "", ()):
            return ""
        if isinstance(self.default, bool):
            negation = self.names.partition("/")[2]
            return "" if not negation else (f"--{self.name}" if self.default else negation)
        return written(self.default, self.type)


def written(value: Any, kind: click.ParamType[Any] | None) -> str:
    """A value in the form in which an option of that type takes it."""
    if isinstance(kind, Duration):
        return f"{value:g}s" if value >= 1 or not value else f"{1000 * value:g}ms"
    if isinstance(kind, Fraction):
        return f"{100 * value:g}%"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
