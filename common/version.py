"""Version of Fissile, from the metadata of what is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of


def installed_version(distribution: str) -> str | None:
    """Version of a distribution; None where it is not installed."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return None


def fissile_version() -> str:
    """Version of Fissile; `checkout` when it runs from a checkout that was not installed."""
    return installed_version("fissile") or "checkout"
