"""The table of workers."""

from __future__ import annotations

import pytest
from fissile.admin.v1 import admin_pb2 as apb

from common.cli.failure import CommandError
from common.cli.workers import as_table


def test_table_says_state_and_load() -> None:
    workers = [
        apb.Worker(
            worker_id="w0", address="a:1", model="m", running=3, queued=2, decoding_seqs=4, waiting_seqs=1,
            outstanding_tokens=900, prefill_rate=1234.5, report_age_ms=100,
        ),
        apb.Worker(worker_id="w1", address="b:2", model="m", draining=True),
        apb.Worker(worker_id="w2", address="c:3", model="m", report_age_ms=60_000),
    ]  # fmt: skip
    heading, *rows = [line.split() for line in as_table(workers).splitlines()]
    assert heading[:4] == ["WORKER", "ADDRESS", "MODEL", "STATE"]
    assert rows[0] == ["w0", "a:1", "m", "serving", "3", "2", "4", "1", "900", "1234"]
    assert [row[3] for row in rows] == ["serving", "draining", "silent"]
    assert rows[1][-1] == "-"


def test_no_workers_is_said_in_one_line() -> None:
    with pytest.raises(CommandError, match="connected to no worker"):
        as_table([])
