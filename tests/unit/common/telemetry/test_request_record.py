"""Fields of a call's log line; the phases of a request add up to its duration."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidFieldError, NoWorkerError, QueueFullError
from common.telemetry.ledger import Blame
from common.telemetry.names import Stage
from common.telemetry.request_record import RequestRecord, RequestTimes, begin_record, current_record, shown

GENERATE = "fissile.v1.InferenceService/Generate"


@st.composite
def any_times(draw: st.DrawFn) -> RequestTimes:
    """A request that ended in any phase, with an arbitrary worker clock."""
    steps = draw(st.lists(st.floats(0, 1e4), min_size=5, max_size=5))
    arrived, given_at, first, last, ended = (sum(steps[: i + 1]) for i in range(5))
    reached = draw(st.integers(0, 2))
    return RequestTimes(
        arrived,
        ended,
        given=given_at if reached else None,
        first_token=first if reached == 2 else None,
        last_token=last if reached == 2 else None,
        tokens=draw(st.integers(1, 1000)) if reached == 2 else 0,
        prefill=draw(st.floats(-1e5, 1e5)),
    )


@given(any_times())
def test_phases_add_up(times: RequestTimes) -> None:
    """For a request with output, queue, prefill and decode add up to its duration; none is negative."""
    phases = [times.queue_s, times.prefill_s, times.decode_s]
    known = [phase for phase in phases if phase is not None]
    assert all(phase >= 0 for phase in known)
    assert sum(known) <= times.duration_s + 1e-6
    if times.first_token is None:
        assert known == [times.queue_s]
        assert (times.ttft_s, times.tpot_s) == (None, None)
    else:
        assert sum(known) == pytest.approx(times.duration_s, abs=1e-6)
        assert times.ttft_s == pytest.approx(times.queue_s + (times.prefill_s or 0), abs=1e-6)
        assert times.tpot_s is not None
        assert times.tpot_s * max(1, times.tokens - 1) <= (times.decode_s or 0) + 1e-6


def test_time_on_lost_worker_counts_as_queue() -> None:
    """The lost worker computed for 3 s, the next one for 1 s."""
    times = RequestTimes(0.0, 9.0, given=4.0, first_token=6.0, last_token=8.0, tokens=5, prefill=1.0)
    assert (times.queue_s, times.prefill_s, times.decode_s, times.tpot_s) == (5.0, 1.0, 3.0, 0.5)


@pytest.mark.parametrize(("given_at", "queue_s"), [(None, 7.0), (6.0, 4.0)])
def test_request_without_tokens_has_only_queue_time(given_at: float | None, queue_s: float) -> None:
    """Queue time lasts until the current worker received the request, or to its end; the other phases are unknown."""
    times = RequestTimes(2.0, 9.0, given=given_at, prefill=1.0)
    assert (times.queue_s, times.prefill_s, times.decode_s, times.tpot_s) == (queue_s, None, None, None)


@pytest.mark.parametrize(
    ("method", "generates", "code", "level"),
    [
        (GENERATE, True, grpc.StatusCode.OK, "info"),
        (GENERATE, False, grpc.StatusCode.UNAUTHENTICATED, "info"),
        ("fissile.v1.InferenceService/Tokenize", False, grpc.StatusCode.OK, "debug"),
        ("fissile.v1.InferenceService/Tokenize", False, grpc.StatusCode.CANCELLED, "info"),
        (GENERATE, True, grpc.StatusCode.INTERNAL, "error"),
        ("grpc.health.v1.Health/Watch", False, grpc.StatusCode.CANCELLED, "debug"),
        ("fissile.worker.v1.WorkerService/Session", False, grpc.StatusCode.ABORTED, "info"),
        ("fissile.admin.v1.AdminService/WatchLoad", False, grpc.StatusCode.PERMISSION_DENIED, "info"),
    ],
)
def test_levels(method: str, generates: bool, code: grpc.StatusCode, level: str) -> None:
    """Successful answers and all failures are logged; successful probes and other calls are not."""
    record = RequestRecord(method, generates=generates)
    record.succeed() if code is grpc.StatusCode.OK else record.fail(code)
    assert (record.level, record.code) == (level, code)


def test_first_end_is_kept() -> None:
    record = RequestRecord(GENERATE, arrived=1.0)
    record.fail(QueueFullError(3, 1.0))
    record.fail(NoWorkerError("no worker"))
    record.end(asyncio.CancelledError(), 2.0, 0.0)
    assert (record.fields(2.0)["status"], record.fields(2.0)["reason"]) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


@pytest.mark.parametrize(
    ("remaining", "code"),
    [(None, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED"), (0.1, "DEADLINE_EXCEEDED"), (5.0, "CANCELLED")],
)
def test_client_deadline_differs_from_client_cancel(remaining: float | None, code: str) -> None:
    """After ten seconds the deadlines of client and server may differ by 0.1 s, as gRPC rounds them."""
    assert RequestRecord(GENERATE, arrived=0.0).cancel(10.0, remaining).name == code


def test_unknown_record_fields_are_omitted() -> None:
    record = RequestRecord(GENERATE, peer="ipv4:127.0.0.1:7", arrived=1.0)
    record.fail(InvalidFieldError("text", "is empty", "at least one character"))
    assert record.fields(1.5) == {
        "method": GENERATE,
        "status": "INVALID_ARGUMENT",
        "reason": "INVALID_FIELD",
        "fields": ["text"],
        "peer": "ipv4:127.0.0.1:7",
        "duration_ms": 500.0,
    }


@given(st.text(max_size=600))
def test_client_text_is_logged_printable_and_bounded(text: str) -> None:
    """A terminal must not interpret a client's id."""
    assert shown(text).isprintable()
    assert len(shown(text)) <= 512
    assert shown("r-1 ä") == "r-1 ä"
    assert shown("\x1b[31m") == "\\x1b[31m"


def test_unexpected_error_is_unknown_to_client_and_logged() -> None:
    record = RequestRecord(GENERATE)
    error = KeyError("x")
    record.end(error, 1.0, None)
    assert (record.code, record.level, record.crash) == (grpc.StatusCode.UNKNOWN, "error", error)


def test_record_is_reported_once_despite_failure() -> None:
    """A failing observer does not end a request."""
    seen: list[RequestRecord] = []

    def report(record: RequestRecord) -> None:
        seen.append(record)
        raise OSError("disk full")

    record = RequestRecord(GENERATE, report=report)
    record.close()
    record.close()
    assert seen == [record]


async def test_each_task_has_its_own_call() -> None:
    async def call(name: str) -> str:
        begin_record(RequestRecord(name))
        await asyncio.sleep(0)
        return current_record().method

    assert list(await asyncio.gather(call("a"), call("b"))) == ["a", "b"]
    assert current_record().method == ""


def test_parts_of_the_line_have_plain_names_and_blame() -> None:
    record = RequestRecord(GENERATE, arrived=1.0, generates=True)
    record.ledger.enter(Stage.QUEUE, 2.0)
    record.ledger.blame(Stage.QUEUE, Blame("r-7", "acme", 0.5))
    fields = record.fields(4.0)
    assert repr(fields["parts_ms"]) == "{'prepare': 1000.0, 'queue': 2000.0}"
    assert repr(fields["blamed"]) == "{'queue': {'request_id': 'r-7', 'tenant': 'acme', 'ms': 500.0}}"
