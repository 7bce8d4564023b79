"""Modes of commands, in which some options have no effect: each is refused there, so that none is silently ignored.

A mode counts what the user wrote for this command: its command line, and its section of the file of --config.
Environment variables are shared by all commands of a shell or an image, and often set for another one; a server logs
those that have no effect in its mode (`unused_variables`).
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
    """A way to run a command.

    Attributes:
        name: what brings it about, for messages: `with --simulate`.
        is_on: whether the values of a command's parameters bring it about.
        reason: why the options have no effect, a clause.
        unused: parameters without effect.
        only: instead of `unused`: the parameters with an effect, all others have none.
        holds: values that ask for what is so anyway in this mode, by parameter; these are taken.
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
        """True if the parameter has no effect, and the value asks for something else than what is so anyway."""
        return self.has_no_use_for(parameter) and not (parameter in self.holds and self.holds[parameter] == value)


class ModalCommand(click.Command):
    """A command that refuses options without effect in its mode.

    Args:
        modes: of the command; several may be on at once.
        others: as click's.
    """

    def __init__(self, *others: Any, modes: Sequence[Mode] = (), **named: Any) -> None:
        super().__init__(*others, **named)
        self.modes = tuple(modes)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """As click's; an option that has no effect in its mode is refused.

        Raises:
            CommandError: there is one.
        """
        context = super().make_context(info_name, args, *rest, **extra)
        for mode, param in _without_effect(self, context, _GIVEN):
            raise CommandError(f"{self.written(context, param)} has no effect {mode.name}: {mode.reason}; leave it out")
        return context

    def written(self, context: click.Context, param: click.Option) -> str:
        """The option as the user wrote it: a flag that is off has a name of its own."""
        is_off = param.secondary_opts and context.params[param.name or ""] is False
        return (param.secondary_opts if is_off else param.opts)[0]


def unused_variables(context: click.Context) -> list[str]:
    """Names of the environment variables that are set, belong to an option, and have no effect in the mode."""
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
