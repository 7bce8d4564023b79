"""`fissile keys new`: a new API key, and its line in the file of `fissile router --api-keys`."""

from __future__ import annotations

import json

import click

from common.cli.core.errors import CommandError
from common.cli.core.options import argument, options
from common.cli.group import SuggestingGroup
from common.rpc.api_keys import KeyFileError, Role, new_key


@click.group(cls=SuggestingGroup)
def keys() -> None:
    """Make API keys for the callers of a router."""


@keys.command()
@argument("name")
@options("keys new")
def new(name: str, tenant: str, roles: tuple[str, ...], max_priority: str | None, as_json: bool) -> None:
    """Make a key for NAME and print it once; only its hash is kept.

    Callers pass it with --api-key or FISSILE_API_KEY, or as metadata `authorization: Bearer KEY`. Add the printed line
    to the file of `fissile router --api-keys`: it takes effect within a second. To revoke a key, remove its line.
    """
    try:
        key, kept = new_key(name, tenant, map(Role, roles), max_priority or "")
    except KeyFileError as error:
        raise CommandError(str(error)) from None
    if as_json:
        click.echo(json.dumps({"key": key, "line": kept.line()}))
        return
    click.echo(f"key, for the caller; it is not shown again:\n{key}\n\nline for the file of --api-keys:\n{kept.line()}")
