"""Extreme numbers from a worker affect only that worker's Session."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.peers.keda import external_scaler_pb2 as kpb
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import example, given
from hypothesis import strategies as st

from common.delay_gate import DelayGate
from common.rpc.durations import to_duration
from common.wire.peer_numbers import UINT32_MAX, UINT64_MAX, as_uint32, as_uint64, counted, rate
from router.answers.stream_assembly import GapError
from router.answers.stream_chunk import drafts_of
from router.model_registry import TextAssets, WorkerRefusedError, describe
from router.scheduling.failover import stall_bound_s
from router.workers.session_state import ProtocolError, RouterSession
from router.workers.worker_caches import KvEventCursor
from router.workers.worker_intake import load_report
from tests.unit.router.scheduling.dispatching import make_lane
from tests.unit.router.workers.test_session_state import submission
from tests.unit.worker.session.test_extreme_numbers import fill


def assert_fits(kind: Callable[..., object], **numbers: Any) -> None:
    try:
        kind(**numbers)
    except ValueError as error:
        raise AssertionError(f"{numbers}: {error}") from None


@given(st.floats() | st.integers(-(2**70), 2**70))
@example(float("nan"))
@example(UINT64_MAX)
def test_clamped_numbers_fit_their_proto_field(value: float) -> None:
    assert_fits(wpb.Load, waiting_seqs=as_uint32(value), waiting_tokens=as_uint64(value))
    assert rate(value) >= 0
    if isinstance(value, int) and 0 <= value <= UINT32_MAX:
        assert as_uint32(value) == as_uint64(value) == counted(value) == value


@pytest.mark.parametrize("seed", range(60))
def test_extreme_loads_of_workers_can_be_shown_and_added(seed: int) -> None:
    rnd, total = random.Random(seed), 0
    for number in range(3):
        load = wpb.Load()
        fill(load, rnd, depth=1)
        lane = make_lane("w", "m", load_report(load, rnd.choice([0, UINT64_MAX]), 10.0))
        lane.load.take(load_report(load, number, 11.0))
        status = asdict(lane.status(11.0, DelayGate(1.0)))
        age_s = status.pop("report_age_ms") / 1000
        # For the external scaler, whose figures are doubles.
        assert_fits(kpb.MetricValue, metricValueFloat=float(status.pop("elsewhere_tokens")))
        assert_fits(kpb.MetricValue, metricValueFloat=status.pop("fleet_age_s"))
        assert 0 <= status["free_blocks"] <= status["total_blocks"]
        assert_fits(apb.Worker, **status, report_age=to_duration(age_s))
        assert lane.load.waits_s(lane.load.speed(1000.0, 12.0), 7) >= 0
        assert stall_bound_s(30.0, UINT32_MAX, rate(load.prefill_rate)) >= 30.0
        total += lane.load.report.waiting_tokens + lane.load.report.fleet_tokens
    assert_fits(wpb.Lane, tokens=total)


@pytest.mark.parametrize("seed", range(60))
def test_extreme_step_ends_session_or_changes_no_state(seed: int) -> None:
    rnd, state, step = random.Random(seed), RouterSession("r1", lease_s=5.0), wpb.StepOutput()
    state.next_frame(0.0)
    ours = submission(1, 3)
    state.submit(1, [ours])
    fill(step, rnd, depth=1)
    for start in step.starts:
        start.rid = 1
    for end in step.ends:
        end.rid = rnd.choice([1, UINT64_MAX])
    with contextlib.suppress(ProtocolError, GapError):
        state.apply(step, 1.0)
    start_info = ours.sequence.assembly.start
    assert_fits(pb.Usage, cached_tokens=64 * start_info.cached_tokens)
    to_duration(start_info.prefill_s)
    for end in step.ends:
        for verified, accepted in drafts_of(end):
            assert_fits(pb.DraftCounts, verified=1000 * verified, accepted=1000 * accepted)


@pytest.mark.parametrize("seed", range(20))
def test_extreme_cache_events_leave_a_number_that_hello_holds(seed: int) -> None:
    rnd, cursor = random.Random(seed), KvEventCursor("i")
    for _ in range(3):
        events = wpb.KvEvents()
        fill(events, rnd, depth=1)
        cursor.accept(events)
        assert_fits(wpb.Hello, kv_seq=cursor.seq)
        assert_fits(wpb.Lane, kv_epoch=cursor.ask())


@pytest.mark.parametrize("field", ["block_size", "max_model_len"])
@pytest.mark.parametrize("value", [0, UINT32_MAX])
def test_worker_with_impossible_model_limits_is_refused(field: str, value: int) -> None:
    """Regression: blocks of 0 tokens raised a ZeroDivisionError at the first prompt."""
    description = wpb.GetWorkerResponse(model="m", block_size=16, limits=wpb.Limits(max_model_len=100))
    assert describe(description, TextAssets()).block_size == 16
    setattr(description if field == "block_size" else description.limits, field, value)
    with pytest.raises(WorkerRefusedError, match=f"{field} is {value}"):
        describe(description, TextAssets())
