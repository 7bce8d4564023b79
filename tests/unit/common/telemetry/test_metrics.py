"""Metrics reach an OTLP collector over the wire; without an endpoint they are off."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import pytest
from opentelemetry.sdk.metrics import Histogram
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes, network_attributes, server_attributes
from structlog.testing import capture_logs

from common.limits import TELEMETRY_SHUTDOWN_S
from common.process.tasks import keep_running
from common.telemetry import exporter, names
from common.telemetry.failures import count_failure, failures
from common.telemetry.metrics import setup_metrics
from common.telemetry.output import Output
from common.telemetry.prometheus import current_traceparent
from common.telemetry.tracing import setup_tracing
from router.telemetry.request_span import request_span
from tests.otlp_receiver import OtlpReceiver, ReceivedPoint
from worker.engine.figures import EngineFigures, observe_engine

# Bound for data that must arrive on any machine: a shutdown gives up after a second.
PATIENT_S = 60.0
LABELS = {names.REQUEST_MODEL: "m", names.WORKER_ID: "w0"}
# A distinct value for each figure.
FIGURES = EngineFigures(
    running=3,
    max_running=32,
    waiting=5,
    free_blocks=30,
    total_blocks=40,
    block_size=16,
    steps=7,
    preemptions=2,
    nan_rows=1,
    prompt_tokens=1000,
    cached_tokens=640,
    generated_tokens=333,
    draft_tokens=90,
    accepted_tokens=61,
    ended={"eos": 4, "cancelled": 1},
)
EXPECTED = {
    ("gauge", names.ENGINE_RUNNING): 3,
    ("gauge", names.ENGINE_MAX_RUNNING): 32,
    ("gauge", names.ENGINE_WAITING): 5,
    ("gauge", names.ENGINE_KV_USAGE): 0.25,
    ("gauge", names.ENGINE_KV_BLOCKS): 40,
    ("gauge", names.ENGINE_KV_BLOCK_SIZE): 16,
    ("sum", names.ENGINE_STEPS): 7,
    ("sum", names.ENGINE_PREEMPTIONS): 2,
    ("sum", names.ENGINE_NAN_ROWS): 1,
    ("sum", names.ENGINE_PROMPT_TOKENS): 1000,
    ("sum", names.ENGINE_CACHED_TOKENS): 640,
    ("sum", names.ENGINE_GENERATED_TOKENS): 333,
    ("sum", names.ENGINE_DRAFT_TOKENS): 90,
    ("sum", names.ENGINE_ACCEPTED_TOKENS): 61,
}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with OtlpReceiver() as opened:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", opened.endpoint)
        yield opened


def newest(receiver: OtlpReceiver) -> dict[tuple[str, str], ReceivedPoint]:
    return {(point.kind, point.name): point for point in of_engine(receiver) if point.name != names.ENGINE_ENDED}


def of_engine(receiver: OtlpReceiver) -> list[ReceivedPoint]:
    return [point for point in receiver.points if point.name.startswith("fissile.engine.")]


def test_every_figure_reaches_the_collector(receiver: OtlpReceiver) -> None:
    metrics = setup_metrics("fissile-worker", "w1")
    assert metrics.enabled
    observe_engine(metrics, lambda: FIGURES, LABELS)
    metrics.shutdown(PATIENT_S)
    points = newest(receiver)
    assert {key: point.value for key, point in points.items()} == EXPECTED
    # Shared: free and total blocks a metric, drafts by position that of all drafts. Tokens of steps are a histogram.
    # Blocks and traffic of tiers have more labels.
    assert len(EXPECTED) + 5 == len(fields(EngineFigures)), "a figure without a metric"
    for point in points.values():
        assert (point.service, point.instance, point.attributes) == ("fissile-worker", "w1", LABELS)
        assert point.unit
    ended = [point for point in receiver.points if point.name == names.ENGINE_ENDED]
    reasons = {point.attributes.pop(names.END_REASON): point.value for point in ended}
    assert reasons == FIGURES.ended
    assert all(point.attributes == LABELS for point in ended)


def test_blocks_of_tiers_go_out_by_tier_and_result(receiver: OtlpReceiver) -> None:
    blocks = {("memory", "hit"): 7, ("files", "damaged"): 2}
    metrics = setup_metrics("fissile-worker", "w1")
    observe_engine(metrics, lambda: EngineFigures(tier_blocks=blocks), LABELS)
    metrics.shutdown(PATIENT_S)
    points = [point for point in receiver.points if point.name == names.ENGINE_TIER_BLOCKS]
    found = {(point.attributes[names.KV_TIER], point.attributes[names.TIER_RESULT]): point.value for point in points}
    assert found == blocks


def test_traffic_of_tiers_goes_out_by_tier_and_operation(receiver: OtlpReceiver) -> None:
    traffic = {("files", "read"): (4096, 0.25), ("memory", "write"): (512, 0.5)}
    metrics = setup_metrics("fissile-worker", "w1")
    observe_engine(metrics, lambda: EngineFigures(tier_traffic=traffic), LABELS)
    metrics.shutdown(PATIENT_S)
    for place, name in enumerate((names.ENGINE_TIER_BYTES, names.ENGINE_TIER_TIME)):
        points = [point for point in receiver.points if point.name == name]
        found = {(p.attributes[names.KV_TIER], p.attributes[names.TIER_OPERATION]): p.value for p in points}
        assert found == {key: done[place] for key, done in traffic.items()}


def test_drafts_go_out_by_method_and_position(receiver: OtlpReceiver) -> None:
    drafts = {("ngram", 0): (60, 41), ("ngram", 1): (30, 20)}
    metrics = setup_metrics("fissile-worker", "w1")
    observe_engine(metrics, lambda: EngineFigures(draft_tokens=90, accepted_tokens=61, drafts=drafts), LABELS)
    metrics.shutdown(PATIENT_S)
    for place, name in enumerate((names.ENGINE_DRAFT_TOKENS, names.ENGINE_ACCEPTED_TOKENS)):
        found = {
            (point.attributes[names.DRAFT_METHOD], int(point.attributes[names.DRAFT_POSITION])): point.value
            for point in receiver.points
            if point.name == name
        }
        assert found == {key: counts[place] for key, counts in drafts.items()}


def test_engine_metrics_export_latest_figures_only(receiver: OtlpReceiver) -> None:
    now: list[EngineFigures | None] = [None]
    metrics = setup_metrics("fissile-worker", "w1")
    observe_engine(metrics, lambda: now[0], LABELS)
    time.sleep(0.15)
    assert of_engine(receiver) == []
    now[0] = EngineFigures(running=1, steps=1)
    receiver.wait_for_metric(names.ENGINE_RUNNING, lambda points: points[-1].value == 1)
    now[0] = EngineFigures(running=0, steps=9)
    receiver.wait_for_metric(names.ENGINE_RUNNING, lambda points: points[-1].value == 0)
    metrics.shutdown(PATIENT_S)
    steps = [point.value for point in receiver.wait_for_metric(names.ENGINE_STEPS)]
    assert sorted(set(steps)) == [1, 9] == sorted(set(steps), key=steps.index)


def test_gauges_of_new_workers_are_exported_after_thousands_left(receiver: OtlpReceiver) -> None:
    """The SDK remembers every label set, and would merge new ones into an overflow series."""
    now = [0]
    metrics = setup_metrics("fissile-router", "r1")
    metrics.gauge("g", "", "x", lambda: [(1, {names.WORKER_ID: f"w{now[0]}-{i}"}) for i in range(600)])

    def has_newest(points: list[ReceivedPoint]) -> bool:
        return str(points[-1].attributes.get(names.WORKER_ID)).startswith(f"w{now[0]}-")

    for _ in range(4):
        receiver.wait_for_metric("g", has_newest)
        now[0] += 1
    metrics.shutdown(PATIENT_S)
    assert all(names.WORKER_ID in point.attributes for point in receiver.points if point.name == "g")


def lose_a_line() -> None:
    with open("/dev/full", "w") as full:
        output = Output(full)
        output.put("lost\n")
        output.drain()


async def test_lost_lines_and_failed_tasks_are_exported(receiver: OtlpReceiver) -> None:
    """Such losses disturb no request, so only metrics show them."""
    fails = iter([True, False])

    async def work() -> None:
        if next(fails):
            raise RuntimeError

    await keep_running("of a test", work)
    lose_a_line()
    count_failure("traces")
    metrics = setup_metrics("fissile-worker", "w1")
    receiver.wait_for_metric(names.PROCESS_LOGS_DROPPED, lambda points: points[-1].value >= 1)
    receiver.wait_for_metric(
        names.PROCESS_TASKS_FAILED, lambda points: any(p.attributes == {names.TASK: "of a test"} for p in points)
    )
    receiver.wait_for_metric(
        names.PROCESS_TELEMETRY_FAILED, lambda points: any(p.attributes == {names.SIGNAL: "traces"} for p in points)
    )
    metrics.shutdown(PATIENT_S)


def test_failed_metric_record_is_counted(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the SDK does not fail the request."""
    metrics = setup_metrics("fissile-worker", "w1")
    before = failures().get("metrics", 0)
    monkeypatch.setattr(Histogram, "record", lambda *_: 1 / 0)
    metrics.histogram("h", "s", "x", [1.0])(1.0, {})
    assert failures()["metrics"] == before + 1
    metrics.shutdown(PATIENT_S)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"},
    ],
)
def test_off(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    metrics = setup_metrics("fissile-worker", "w1")
    assert not metrics.enabled
    observe_engine(metrics, lambda: pytest.fail("nobody asked"), LABELS)
    metrics.shutdown(PATIENT_S)


def test_each_telemetry_signal_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert (exporter.endpoint("traces"), exporter.endpoint("metrics")) == ("", "http://127.0.0.1:9")
    assert not setup_tracing("w", "1").enabled


def test_usage_of_an_engine_without_blocks_is_zero() -> None:
    assert EngineFigures().kv_usage == 0.0


@pytest.mark.slow
def test_dead_collector_costs_one_warning_for_both_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing, metrics = setup_tracing("w", "1"), setup_metrics("w", "1")
        observe_engine(metrics, lambda: FIGURES, LABELS)
        with capture_logs() as lines:
            with request_span(tracing, "s/M"):
                time.sleep(0.2)
            # By default they would wait for an hour.
            start = time.monotonic()
            tracing.shutdown()
            metrics.shutdown()
            took = time.monotonic() - start
            time.sleep(0.1)
    assert took <= 2 * TELEMETRY_SHUTDOWN_S + 60
    assert Counter((line["log_level"], line["endpoint"]) for line in lines) == {("warning", endpoint): 1}


def test_exemplars_are_exported_of_sampled_traces_only(receiver: OtlpReceiver) -> None:
    metrics = setup_metrics("fissile-router", "r1")
    histogram = metrics.histogram(names.SERVER_TTFT, "s", "", [1.0])
    for trace, flags in (("a" * 32, "01"), ("b" * 32, "00")):
        token = current_traceparent.set(f"00-{trace}-{'c' * 16}-{flags}")
        histogram(0.5, LABELS)
        current_traceparent.reset(token)
    found = receiver.wait_for_metric(names.SERVER_TTFT, lambda points: points[-1].value == 2)
    assert found[-1].traces == {"a" * 32}
    metrics.shutdown(PATIENT_S)


def test_series_histogram_is_exported_until_its_labels_leave(receiver: OtlpReceiver) -> None:
    metrics = setup_metrics("fissile-router", "r1")
    histogram = metrics.series_histogram(names.WORKER_TTFT, "s", "", [0.5, 1.0])
    assert histogram is not None
    token = current_traceparent.set(f"00-{'a' * 32}-{'c' * 16}-01")
    for worker, seconds in (("w0", 0.25), ("w0", 3.0), ("w1", 1.0)):
        histogram.record(seconds, {names.WORKER_ID: worker})
    current_traceparent.reset(token)
    found = receiver.wait_for_metric(names.WORKER_TTFT, lambda points: len(points) > 1)
    first = {point.attributes[names.WORKER_ID]: point for point in found[:2]}
    assert (first["w0"].value, first["w0"].total, first["w0"].unit) == (2, 3.25, "s")
    assert first["w0"].buckets == ((0.5, 1), (1.0, 0), (float("inf"), 1))
    assert first["w1"].buckets == ((0.5, 0), (1.0, 1), (float("inf"), 0))
    assert first["w1"].traces == {"a" * 32}
    histogram.keep(names.WORKER_ID, {"w1"})
    # An export that had begun may still come; the second one after it has w1 alone.
    begun = len(receiver.points)
    receiver.wait_for_metric(
        names.WORKER_TTFT, lambda _: sum(p.name == names.WORKER_TTFT for p in receiver.points[begun:]) > 3
    )
    last = [point for point in receiver.points if point.name == names.WORKER_TTFT][-1]
    metrics.shutdown(PATIENT_S)
    assert last.attributes == {names.WORKER_ID: "w1"}


def test_names_outside_of_fissile_are_those_of_the_conventions() -> None:
    modules = gen_ai_attributes, gen_ai_metrics, rpc_attributes, error_attributes, network_attributes, server_attributes
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    used = {value for value in vars(names).values() if isinstance(value, str)}
    conventional = {each for each in used if each.startswith(("gen_ai.", "rpc.", "error.", "network.", "server."))}
    assert len(conventional) > 30
    assert conventional - known == set()
