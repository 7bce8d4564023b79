"""`fissile version`: what is installed, read from package metadata, so nothing heavy is imported."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from common.cli.core.options import json_option

SHOWN = ("grpcio", "protobuf", "opentelemetry-sdk", "tokenizers", "torch")


def fissile_version() -> str:
    """Version of Fissile; `checkout` when it runs from a checkout that was not installed."""
    return _version("fissile") or "checkout"


def _version(distribution: str) -> str | None:
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Fissile, Python and the main dependencies, by name."""
    own = {"fissile": fissile_version(), "python": platform.python_version()}
    return own | {name: _version(name) or "not installed" for name in SHOWN}


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Fissile and its dependencies."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name:<18} {value}")
