"""All commands of `fissile`, for tests that check each of them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from common.cli.group import fissile
from worker.cli.warmup import warmup


def _leaves(command: click.Command, context: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path.strip(), command
        return
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, context, f"{path} {name}")


# All commands except groups, by the name after `fissile`.
LEAVES = dict(_leaves(fissile, click.Context(fissile))) | {"worker warmup": warmup}


def names_of(command: click.Command) -> set[str]:
    """The names of a command's options, including their negations."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


KNOWN = frozenset({name for command in (*LEAVES.values(), fissile) for name in names_of(command)} | {"--help", "-h"})
