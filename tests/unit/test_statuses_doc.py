"""docs/reference/statuses.md names every status of the service, and only existing reasons."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from fissile.v1 import errors_pb2

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference" / "statuses.md").read_text("utf-8")
STATUSES = [row.strip() for row in re.findall(r"^\| ([A-Z][A-Z_]+[^|]*) \|", TEXT, re.MULTILINE)]


@pytest.mark.parametrize("code", sorted(set(re.findall(r"StatusCode\.(\w+)", (ROOT / "common/errors.py").read_text()))))
def test_status_of_an_error_has_a_row(code: str) -> None:
    assert any(status.split(",")[0].split()[0] == code for status in STATUSES)


def test_statuses_in_the_table_exist() -> None:
    names = {status.split(",")[0].split()[0] for status in STATUSES}
    assert names <= {code.name for code in grpc.StatusCode}


def test_reasons_in_the_table_exist() -> None:
    reasons = {reason for status in STATUSES for reason in re.findall(r"`([A-Z_]+)`", status)} - {"RST_STREAM"}
    assert len(reasons) > 10
    assert {f"ERROR_REASON_{reason}" for reason in reasons} <= set(errors_pb2.ErrorReason.keys())
