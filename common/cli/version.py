"""`fissile version`: what is installed, read from package metadata, so nothing heavy is imported."""

from __future__ import annotations

import json
import platform

import click

from common.cli.core.options import options
from common.version import fissile_version, installed_version

SHOWN = ("grpcio", "protobuf", "opentelemetry-sdk", "tokenizers", "torch")


def versions() -> dict[str, str]:
    """Versions of Fissile, Python and the main dependencies, by name."""
    own = {"fissile": fissile_version(), "python": platform.python_version()}
    return own | {name: installed_version(name) or "not installed" for name in SHOWN}


@click.command()
@options("version")
def version(as_json: bool) -> None:
    """Print the versions of Fissile and its dependencies."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name:<18} {value}")
