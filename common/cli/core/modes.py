"""Refuses options that have no effect in a command's mode, so that none is silently ignored.

Options of the command line and of the command's section in the --config file are refused. Environment variables are
not: all commands of a shell or an image share them, and they are often set for another command. A server logs the
variables that have no effect in its mode (`unused_variables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click
from click.core import ParameterSource

from common.cli.core.errors import CommandError

_GIVEN: Final = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of a command, and the options that have no effect in it.

    Attributes:
        name: how the user selects it, for messages: `with --simulate`.
        is_on: returns True if the values of the command's parameters select it.
        reason: why the options have no effect; a clause.
        unused: parameters without effect.
        only: the only parameters with an effect; replaces `unused`.
        holds: by parameter, the value that the mode implies anyway; the user may give it.
    """

    name: str
    is_on: Callable[[Mapping[str, Any]], bool]
    reason: str
    unused: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    holds: Mapping[str, Any] = field(default_factory=dict)

    def has_no_use_for(self, parameter: str) -> bool:
        """True if the parameter has no effect in this mode."""
        return parameter not in self.only if self.only is not None else parameter in self.unused

    def ignores(self, parameter: str, value: Any) -> bool:
        """True if the parameter has no effect in this mode, and `value` is not the one that the mode implies."""
        return self.has_no_use_for(parameter) and not (parameter in self.holds and self.holds[parameter] == value)


class ModalCommand(click.Command):
    """A command that refuses options without effect in its mode.

    Args:
        modes: all modes of the command; several may be on at once.
        others: arguments of `click.Command`.
    """

    def __init__(self, *others: Any, modes: Sequence[Mode] = (), **named: Any) -> None:
        super().__init__(*others, **named)
        self.modes = tuple(modes)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Parses the arguments as click does, and refuses options that have no effect in the command's mode.

        Raises:
            CommandError: an option has no effect.
        """
        context = super().make_context(info_name, args, *rest, **extra)
        for mode, param in _without_effect(self, context, _GIVEN):
            raise CommandError(f"{self.written(context, param)} has no effect {mode.name}: {mode.reason}; leave it out")
        return context

    def written(self, context: click.Context, param: click.Option) -> str:
        """Names an option as the user wrote it; a flag that is off by its negation, such as `--no-ask`."""
        is_off = param.secondary_opts and context.params[param.name or ""] is False
        return (param.secondary_opts if is_off else param.opts)[0]


def unused_variables(context: click.Context) -> list[str]:
    """Names of the environment variables that set an option without effect in the command's mode."""
    command = context.command
    if not isinstance(command, ModalCommand):
        return []
    return sorted({str(param.envvar) for _, param in _without_effect(command, context, (ParameterSource.ENVIRONMENT,))})


def _without_effect(
    command: ModalCommand, context: click.Context, sources: Sequence[ParameterSource]
) -> Iterator[tuple[Mode, click.Option]]:
    for mode in command.modes:
        if not mode.is_on(context.params):
            continue
        for param in command.params:
            name = param.name or ""
            if not isinstance(param, click.Option) or name not in context.params:
                continue
            if mode.ignores(name, context.params[name]) and context.get_parameter_source(name) in sources:
                yield mode, param
