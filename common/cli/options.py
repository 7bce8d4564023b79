"""Options of the commands: each with a default, a help text and an environment variable, all three in its help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from common.cli.client import DEFAULT_ADDRESS


def option(*names: str, envvar: str, **attributes: Any) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """`click.option` with its default and its environment variable shown in the help."""
    return click.option(*names, envvar=envvar, show_envvar=True, show_default=True, **attributes)


address_option = option(
    "--address", envvar="FISSILE_ADDRESS", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="The router to call."
)
json_option = option("--json", "as_json", envvar="FISSILE_JSON", is_flag=True, default=False, help="Print JSON.")
timeout_option = option(
    "--timeout", envvar="FISSILE_TIMEOUT", default=600.0, metavar="SECONDS", help="Deadline of the whole call."
)
