"""The table of workers."""

from __future__ import annotations

import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb

from common.cli.core.errors import CommandError
from common.rpc.durations import to_duration
from router.cli.workers import as_table


def test_worker_table_shows_state_and_load() -> None:
    workers = [
        apb.Worker(
            worker_id="w0", address="a:1", model="m", running=3, queued=2, decoding_seqs=4, waiting_seqs=1,
            outstanding_tokens=900, prefill_rate=1234.5, report_age=to_duration(0.1), state=apb.WORKER_STATE_SERVING,
            kernels="cpu:avx2",
        ),
        apb.Worker(worker_id="w1", address="b:2", model="m", state=apb.WORKER_STATE_DRAINING),
        apb.Worker(
            worker_id="w2", address="c:3", model="m", report_age=to_duration(60), state=apb.WORKER_STATE_SERVING
        ),
        apb.Worker(address="d:4", state=apb.WORKER_STATE_UNCONNECTED, last_error="UNAVAILABLE: refused"),
    ]  # fmt: skip
    heading, *rows = [line.split() for line in as_table(workers).splitlines()]
    assert heading[:4] == ["WORKER", "ADDRESS", "MODEL", "STATE"]
    assert rows[0] == ["w0", "a:1", "m", "serving", "3", "2", "4", "1", "900", "1234", "cpu:avx2"]
    assert [row[3] for row in rows[:4]] == ["serving", "draining", "silent", "unconnected"]
    assert rows[1][-2:] == ["-", "-"]
    assert rows[3][:2] == ["-", "d:4"]
    assert rows[4] == ["d:4:", "UNAVAILABLE:", "refused"]


def test_worker_table_shows_draft_acceptance() -> None:
    drafts = [pb.DraftCounts(verified=10, accepted=9), pb.DraftCounts(verified=10, accepted=6)]
    workers = [
        apb.Worker(worker_id="w0", draft_method="eagle3", num_speculative_tokens=3, drafts=drafts),
        apb.Worker(worker_id="w1", draft_method="ngram", num_speculative_tokens=4),
        apb.Worker(worker_id="w2"),
    ]
    heading, *rows = as_table(workers).splitlines()
    assert heading.split()[-2:] == ["DRAFTS", "ACCEPTED"]
    assert [row[heading.index("DRAFTS") :] for row in rows] == ["eagle3 3  75% (90% 60%)", "ngram 4   -", "-         -"]


def test_empty_worker_table_is_one_line_error() -> None:
    with pytest.raises(CommandError, match="the router has no worker"):
        as_table([])
