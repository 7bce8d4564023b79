"""The frame of `fissile top`, as a function of two snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from common.rpc.durations import to_duration
from router.cli.top_frame import KEYS, FrameTable, Snapshot, View, frame, press


def worker(name: str, answers: apb.AnswerTotals | None = None, **fields: object) -> apb.Worker:
    made = apb.Worker(
        worker_id=name, address=f"{name}:1", model="m", state=apb.WORKER_STATE_SERVING, version="0.1.0",
        total_blocks=100, free_blocks=75, report_age=to_duration(0.1), answers=answers,
    )  # fmt: skip
    made.MergeFrom(apb.Worker(**fields))  # type: ignore[arg-type]
    return made


def asked(name: str, tenant: str = "", output: int = 0, **fields: object) -> apb.InFlightRequest:
    made = apb.InFlightRequest(
        request_id=name, tenant=tenant, output_tokens=output, model="m", method="Generate", age=to_duration(2.0),
        state=apb.REQUEST_STATE_STREAMING if output else apb.REQUEST_STATE_QUEUED, worker_id="w0" if output else "",
    )  # fmt: skip
    made.MergeFrom(apb.InFlightRequest(**fields))  # type: ignore[arg-type]
    return made


def snapshot(
    at: float, workers: list[apb.Worker], requests: list[apb.InFlightRequest], router: str = "r1", *, more: bool = False
) -> Snapshot:
    queues = [
        apb.QueueLoad(priority=pb.PRIORITY_HIGH),
        apb.QueueLoad(priority=pb.PRIORITY_NORMAL, waiting=2, oldest_age=to_duration(1.25)),
    ]
    load = apb.WatchLoadResponse(workers=workers, queues=queues, in_flight=len(requests))
    routing = apb.Routing(
        placement="prefix_aware", delay_factor=0.5, max_hold=to_duration(0.1),
        tenant_weight={"gold": 4.0}, tenant_concurrency={"": 8, "trial": 2},
    )  # fmt: skip
    info = apb.GetServerInfoResponse(version="0.1.0", router_id=router, address="a:1", uptime=to_duration(7200))
    return Snapshot(at, load, requests, more, routing, info)


def totals(tokens: int, begun: int, ttft_s: float, later: int, decode_s: float) -> apb.AnswerTotals:
    return apb.AnswerTotals(
        output_tokens=tokens, first_tokens=begun, time_to_first_token=to_duration(ttft_s), later_tokens=later,
        decode_time=to_duration(decode_s),
    )  # fmt: skip


def texts(latest: Snapshot, earlier: Snapshot | None = None, view: View | None = None, **others: object) -> list[str]:
    view, now = view or View(), latest.at
    return [line.text for line in frame(latest, earlier, view, now, **others)]  # type: ignore[arg-type]


def row(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.startswith(name))


def test_worker_rates_come_from_two_snapshots() -> None:
    before = snapshot(10.0, [worker("w0", totals(100, 10, 5.0, 90, 9.0))], [])
    after = snapshot(
        12.0, [worker("w0", totals(300, 14, 5.08, 190, 10.0), decoding_seqs=3, waiting_seqs=1, queued=2, held=True)], []
    )
    lines = texts(after, before)
    assert row(lines, "WORKER") == [
        "WORKER*", "STATE", "RUN", "WAIT", "GATE", "KV", "TOK/S", "TTFT", "TPOT", "VERSION",
    ]  # fmt: skip
    assert row(lines, "w0") == ["w0", "serving", "3", "3", "held", "25%", "100", "20ms", "10ms", "0.1.0"]
    assert "100 tokens/s" in lines[1]
    assert "normal 2 (oldest 1.2s)" in lines[1]
    assert "delay factor 0.5, at most 100ms, shut at 1; placement: prefix_aware" in lines[2]


def test_means_without_new_answers_are_of_all_and_in_parentheses() -> None:
    same = totals(100, 10, 5.0, 90, 9.0)
    lines = texts(snapshot(12.0, [worker("w0", same)], []), snapshot(10.0, [worker("w0", same)], []))
    assert row(lines, "w0")[-4:] == ["0", "(500ms)", "(100ms)", "0.1.0"]
    assert row(texts(snapshot(12.0, [worker("w0")], [])), "w0")[-4:] == ["-", "-", "-", "0.1.0"]


def test_rates_ignore_snapshot_of_another_router_process() -> None:
    before = snapshot(10.0, [worker("w0", totals(900, 10, 5.0, 90, 9.0))], [], router="old")
    lines = texts(snapshot(12.0, [worker("w0", totals(30, 2, 0.4, 20, 0.2))], []), before)
    assert row(lines, "w0")[-4:] == ["-", "200ms", "10ms", "0.1.0"]


def test_tenants_add_up_their_requests() -> None:
    before = snapshot(10.0, [], [asked("a", "gold", 10), asked("b", "gold", 50)])
    after = snapshot(12.0, [], [asked("a", "gold", 30), asked("b", "gold", 60), asked("c", "trial")])
    lines = texts(after, before)
    assert row(lines, "gold") == ["gold", "2", "0", "15", "4", "8"]
    assert row(lines, "trial") == ["trial", "1", "1", "0", "1", "2"]
    assert row(lines, "a") == ["a", "gold", "streaming", "2.0s", "0", "30", "10", "w0"]


def test_missing_requests_are_said() -> None:
    assert "(the oldest ones only)" in texts(snapshot(1.0, [], [asked("a")], more=True))
    many = snapshot(1.0, [worker(f"w{i}") for i in range(30)], [asked(f"a{i}") for i in range(30)])
    lines = texts(many, rows=24)
    assert any("more)" in line for line in lines)
    assert "(26 more)" in lines


def test_lost_router_is_said_and_last_state_stays() -> None:
    lost = frame(snapshot(10.0, [worker("w0")], []), None, View(), 13.0, trouble="no router can be reached")
    assert lost[1].text == "router gone for 3.0s, trying again: no router can be reached"
    assert any(line.text.startswith("w0") for line in lost)


@pytest.mark.parametrize("table", FrameTable)
def test_keys_select_rows_and_open_them(table: FrameTable) -> None:
    latest = snapshot(1.0, [worker("w0"), worker("w1")], [asked("a", "gold", 3), asked("b", "trial", 4)])
    view = press(table.value[0], View(), latest, None)
    assert view == View(table)
    moved = press("down", press("down", view, latest, None), latest, None)
    assert moved.selected.startswith({"workers": "w1", "tenants": "trial", "requests": "trial\nb"}[table.value])
    opened = press("enter", moved, latest, None)
    first = texts(latest, None, opened)[4].split()
    assert (
        first
        == {"workers": ["worker", "w1"], "tenants": ["tenant", "trial"], "requests": ["request", "b"]}[table.value]
    )
    assert press("escape", opened, latest, None) == moved
    assert press("up", moved, latest, None).selected != moved.selected


def test_detail_of_worker_has_its_requests_and_the_reason_of_its_state() -> None:
    latest = snapshot(1.0, [worker("w0", last_error="it is silent")], [asked("a", "gold", 3), asked("b")])
    lines = texts(latest, None, View(is_open=True))
    assert "state          serving: it is silent" in lines
    assert [line.split()[0] for line in lines[-1:]] == ["a"]


def test_sort_key_cycles_columns_and_reverses() -> None:
    latest = snapshot(1.0, [worker("w0", decoding_seqs=1), worker("w1", decoding_seqs=5)], [])
    view = View()
    for _ in range(2):
        view = press("s", view, latest, None)
    assert [line[:2] for line in texts(latest, None, view) if line.startswith("w")] == ["w1", "w0"]
    flipped = press("S", view, latest, None)
    assert [line[:2] for line in texts(latest, None, flipped) if line.startswith("w")] == ["w0", "w1"]
    for _ in range(8):
        view = press("s", view, latest, None)
    assert view.column == 0


NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=40)


@given(
    st.lists(NAMES, max_size=8, unique=True),
    st.lists(NAMES, max_size=12, unique=True),
    st.integers(20, 200),
    st.integers(6, 60),
    st.sampled_from(FrameTable),
    st.booleans(),
    st.integers(0, 40),
)
def test_frame_fits_terminal_of_any_size(
    workers: list[str], requests: list[str], columns: int, rows: int, table: FrameTable, is_open: bool, moves: int
) -> None:
    latest = snapshot(1.0, [worker(name) for name in workers], [asked(name, name[:3], 5) for name in requests])
    view = View(table)
    for _ in range(moves):
        view = press("down", view, latest, None)
    lines = frame(latest, None, replace(view, is_open=is_open), 2.0, columns=columns, rows=rows, trouble="gone")
    assert len(lines) == rows
    assert all(get_cwidth(line.text) <= columns for line in lines)
    assert lines[-1].text == KEYS[: len(lines[-1].text) - 1] + lines[-1].text[-1]
    if rows >= 40 and not is_open and latest.load.workers and table is FrameTable.WORKERS:
        assert [line.style for line in lines].count("reverse") == 1
