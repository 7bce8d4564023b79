"""docs/operating.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fissile.admin.v1 import admin_pb2

from common.cli.group import SUMMARIES
from common.telemetry import names

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
METRICS = [
    value
    for name, value in vars(names).items()
    if name.startswith(("ROUTER_", "SERVER_", "ENGINE_", "PROCESS_")) or name in ("WORKER_RUNNING", "WORKER_QUEUED")
]


def documented() -> set[str]:
    """Names of metrics in the tables; `.suffix` stands for the name before it with another end."""
    found: set[str] = set()
    for row in re.findall(r"^\| (`[^|]+) \|", TEXT, re.MULTILINE):
        cells = re.findall(r"`([^`]+)`", row)
        found.update(cells)
        for suffix in (cell for cell in cells if cell.startswith(".")):
            parts = cells[0].split(".")
            found.update(".".join(parts[:i]) + suffix for i in range(1, len(parts)))
    return found


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_in_a_table(metric: str) -> None:
    assert metric in documented()


@pytest.mark.parametrize("rpc", [m.name for m in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods])
def test_every_rpc_of_operators_is_described(rpc: str) -> None:
    assert rpc in TEXT


@pytest.mark.parametrize("command", ["workers", "cordon", "uncordon", "drain", "flush", "routing", "reload"])
def test_every_command_of_operators_is_described(command: str) -> None:
    assert command in SUMMARIES
    assert f"`fissile {command}" in TEXT
