"""A row added to the table of options or of sampling parameters appears everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.cli.group import fissile
from common.config import Config
from common.params.options.services import CONFIG_FILE
from common.params.options.table import OPTIONS, config_fields, options_of
from common.rpc.api_keys import Role
from router.scheduling.failover import FailoverPolicy
from router.scheduling.placement import PLACEMENTS
from tests.commands import LEAVES, names_of


def printed(module: str, *arguments: str) -> Any:
    """The JSON that a module of this folder prints in a separate process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FISSILE_")}
    command = [sys.executable, "-m", f"tests.unit.common.params.options.{module}", *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_added_option_is_on_command_line_in_environment_file_config_and_page(tmp_path: Path) -> None:
    assert printed("added_option", str(tmp_path)) == {
        "default": ["7", "default"],
        "command line": ["9", "command line"],
        "environment": ["6", "environment FISSILE_MADE_UP"],
        "file": ["8", "--config file"],
        "config": [7, 9],
        "passed on": [False, True],
        "page": True,
    }


def test_added_parameter_is_in_options_validation_both_protos_and_receipts() -> None:
    assert printed("added_parameter") == {
        "sent": 0.25,
        "validated": 0.25,
        "on the wire": 0.25,
        "at the worker": 0.25,
        "default": 0.5,
        "canonical": 0.5,
        "served": True,
        "refusal": "sampling_params.made_up is 2.0; valid: a number from 0 to 1",
        "page": [True, True],
    }


def test_commands_take_exactly_table_options() -> None:
    for name, command in LEAVES.items():
        rows = options_of(name).values()
        wanted = {part for row in rows for word in row.names.split() for part in word.split("/")}
        assert names_of(command) - {"--help", "-h"} == wanted, name
    assert {command for row in OPTIONS for command in row.commands} <= LEAVES.keys()
    assert fissile.name == "fissile"


def test_documented_choices_equal_code() -> None:
    router, keys = options_of("router"), options_of("keys new")
    assert list(router["placement"].type.choices) == list(PLACEMENTS)  # type: ignore[union-attr]
    assert list(router["failover"].type.choices) == [policy.value for policy in FailoverPolicy]  # type: ignore[union-attr]
    assert list(keys["roles"].type.choices) == [role.value for role in Role]  # type: ignore[union-attr]
    assert CONFIG_FILE in OPTIONS


def test_config_defaults_equal_option_defaults() -> None:
    differing = {
        field: (getattr(Config, field), row.default)
        for field, row in config_fields().items()
        if row.library_default is None and getattr(Config, field) != row.default
    }
    assert differing == {}
