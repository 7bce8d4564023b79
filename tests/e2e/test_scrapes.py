"""What Prometheus reads from a router and a worker, while an OTLP collector gets the same figures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import math
import socket
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb

from common.limits import MAX_SCRAPE_CONNECTIONS
from common.telemetry import names
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, Bench, bench, collect, error_of, request, router_process, until
from tests.e2e.service import free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, simulated_model
from tests.otlp_receiver import OtlpReceiver, ReceivedPoint
from tests.scraped import read_openmetrics, read_text

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
# Ends of names by the kind and the unit of a metric, as OpenTelemetry has them for Prometheus.
ENDS = {("sum", ""): "_total", ("histogram", "s"): "_seconds", ("gauge", "s"): "_seconds", ("gauge", "1"): "_ratio"}
# They change while nothing happens.
RESTLESS = (names.ROUTER_LOOP_LAG, names.WORKER_REPORT_AGE)
Series = dict[tuple[str, frozenset[tuple[str, str]]], Any]


def scrape(port: int, accept: str = "") -> tuple[dict[str, str], Series]:
    """Types of the metrics, and the values of their series."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
    families = (read_openmetrics if "openmetrics" in accept else read_text)(text)
    samples = [sample for family in families for sample in family.samples]
    series = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
    assert len(series) == len(samples), "a series comes twice"
    return {family.name: family.type for family in families}, series


def as_series(points: Iterable[ReceivedPoint]) -> Series:
    """What scrapers should see of the points that a collector got: the newest of each series."""
    found: Series = {}
    for point in points:
        if point.name in RESTLESS:
            continue
        unit = "" if point.unit.startswith("{") or (point.kind, point.unit) == ("sum", "1") else point.unit
        name = point.name.replace(".", "_") + ENDS.get((point.kind, unit), "")
        labels = {key.replace(".", "_"): str(value) for key, value in point.attributes.items()}
        if point.kind != "histogram":
            found[name, frozenset(labels.items())] = point.value
            continue
        found[f"{name}_count", frozenset(labels.items())] = point.value
        found[f"{name}_sum", frozenset(labels.items())] = pytest.approx(point.total)
        at_most = 0
        for bound, count in point.buckets:
            at_most += count
            le = "+Inf" if bound == float("inf") else repr(bound)
            found[f"{name}_bucket", frozenset({**labels, "le": le}.items())] = at_most
    return found


def total(series: Series, name: str) -> float:
    return math.fsum(value for (which, _), value in series.items() if which == name)


def has_arrived(receiver: OtlpReceiver, read: int, prefixes: tuple[str, ...]) -> bool:
    """True if an export arrived after the first `read` points."""
    return any(point.name.replace(".", "_").startswith(prefixes) for point in receiver.points[read:])


async def agree(receiver: OtlpReceiver, port: int, *prefixes: str, wanted: Mapping[str, float]) -> Series:
    """Waits until a scrape has exactly what the collector got last, and the process has settled; returns the scrape.

    Args:
        receiver: the collector.
        port: of the metrics.
        prefixes: of the names to compare.
        wanted: by name, the sum of a metric's values once the process has settled.
    """
    end = time.monotonic() + 60
    while True:
        # The collector keeps series that are gone: only the next export counts, which arrives whole.
        read = len(receiver.points)
        await until(functools.partial(has_arrived, receiver, read, prefixes))
        _, found = await asyncio.to_thread(scrape, port)
        sent = {key: value for key, value in as_series(receiver.points[read:]).items() if key[0].startswith(prefixes)}
        restless = tuple(name.replace(".", "_") for name in RESTLESS)
        kept = {
            key: value
            for key, value in found.items()
            if key[0].startswith(prefixes) and not key[0].startswith(restless)
        }
        if sent == kept and {name: total(found, name) for name in wanted} == wanted:
            return found
        assert time.monotonic() < end, {key: (sent.get(key), kept.get(key)) for key in sent.keys() ^ kept.keys()}
        await asyncio.sleep(0.05)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with OtlpReceiver() as opened:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", opened.endpoint)
        yield opened


def port_of(b: Bench) -> int:
    assert b.router.scrapes is not None
    return b.router.scrapes.port


def of_model(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset({"model_name": "m", **labels}.items())))


async def test_router_shows_scrapers_what_the_collector_gets(receiver: OtlpReceiver) -> None:
    async with bench(FakeWorker(FILES), metrics_port=0) as b:
        for i in range(3):
            await collect(b.stub.Generate(request(request_id=f"g{i}", params={"max_tokens": 6})))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="say")])
        chat.sampling_params.max_tokens = 4
        await collect(b.stub.Chat(chat))
        await error_of(b.stub.Generate(request(model="no such model")))
        settled = {
            "fissile_router_requests_in_flight": 0,
            "fissile_router_answers_finished_total": 4,
            "fissile_router_requests_failed_total": 1,
            "fissile_router_worker_running": 0,
        }
        found = await agree(receiver, port_of(b), "fissile_", "gen_ai_", wanted=settled)
        assert of_model(found, "vllm:num_requests_waiting") == of_model(found, "vllm:num_requests_running") == 0
        assert of_model(found, "vllm:generation_tokens_total") == 3 * 6 + 4
        assert of_model(found, "vllm:request_success_total", finished_reason="length") == 4
        for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
            assert of_model(found, f"vllm:{name}_seconds_count") == 4
        assert of_model(found, "vllm:prompt_tokens_total") == total(found, "fissile_router_tokens_prompt_total") > 0
        assert "no such model" not in str(found)
        kinds, openmetrics = await asyncio.to_thread(scrape, port_of(b), "application/openmetrics-text")
        assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
        assert kinds["vllm:prompt_tokens"] == "counter"
        assert of_model(openmetrics, "vllm:generation_tokens_total") == 3 * 6 + 4


async def test_metrics_port_works_without_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting and running requests and KV use of the model, which autoscalers and endpoint pickers read."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    # It makes no step until the figures have been seen.
    worker = FakeWorker(FILES, room_seqs=2, busy_ms=1)
    async with bench(worker, metrics_port=0) as b:
        calls = [b.stub.Generate(request(request_id=str(i), params={"max_tokens": 60})) for i in range(5)]

        async def until_load(waiting: int, running: int) -> None:
            wanted = {"vllm:num_requests_waiting": waiting, "vllm:num_requests_running": running}
            while True:
                _, found = await asyncio.to_thread(scrape, port_of(b))
                if {name: of_model(found, name) for name in wanted} == wanted:
                    return

        async with asyncio.timeout(60):
            await until_load(3, 2)
            worker.busy_ms = 0
            await asyncio.gather(*map(collect, calls))
            await until_load(0, 0)
        _, found = await asyncio.to_thread(scrape, port_of(b))
        assert of_model(found, "vllm:kv_cache_usage_perc") is not None
        assert any(name == "vllm:cache_config_info" for name, _ in found)


async def test_series_of_a_worker_that_goes_disappear() -> None:
    going, staying = FakeWorker(FILES, "going"), FakeWorker(FILES, "staying")
    async with bench(going, staying, metrics_port=0) as b:

        def workers() -> set[str]:
            _, found = scrape(port_of(b))
            return {value for _, labels in found for key, value in labels if key == "fissile_worker_id"}

        def workers_up() -> dict[str, float]:
            _, found = scrape(port_of(b))
            return {
                dict(labels)["fissile_worker_id"]: value
                for (name, labels), value in found.items()
                if name == "fissile_router_worker_up"
            }

        for i in range(8):
            await collect(b.stub.Generate(request(request_id=f"g{i}", params={"max_tokens": 6})))
        _, found = await asyncio.to_thread(scrape, port_of(b))
        for latency in ("time_to_first_token", "time_per_output_token"):
            assert total(found, f"fissile_router_worker_{latency}_seconds_count") == 8
        await until_equal(workers_up, {"going": 1, "staying": 1})
        await going.stop()
        # It stays in the list of workers.
        await until_equal(workers_up, {"going": 0, "staying": 1})
        b.router.pool.set_workers([f"127.0.0.1:{staying.port}"])
        await until_equal(workers, {"staying"})


async def until_equal(read: Any, wanted: object) -> None:
    async with asyncio.timeout(60):
        # Each reading waits for the port.
        while await asyncio.to_thread(read) != wanted:
            pass


async def test_hanging_scrapers_hold_up_no_stream() -> None:
    """As many as there can be, of each kind, and hostile bytes; a stream beside them ends, and so does the router."""
    hostile = (b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n" * 1000, b"\x00" * 1000)
    async with bench(FakeWorker(FILES, answer=short), metrics_port=0) as b:
        with contextlib.ExitStack() as stack:
            for i in range(MAX_SCRAPE_CONNECTIONS):
                hanging = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(b))))
                with contextlib.suppress(OSError):
                    hanging.sendall(hostile[i % len(hostile)])
            for i in range(20):
                assert (await collect(b.stub.Generate(request(request_id=str(i)))))[-1].finish.usage.completion_tokens
            _, found = await asyncio.to_thread(scrape, port_of(b))
            assert found


async def test_exemplar_names_the_trace_of_a_sampled_request() -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with bench(FakeWorker(FILES, answer=short), metrics_port=0) as b:
        for flags, of in (("01", trace_id), ("00", "0" * 31 + "1")):
            metadata = (("traceparent", f"00-{of}-00f067aa0ba902b7-{flags}"),)
            await collect(b.stub.Generate(request(request_id=flags), metadata=metadata))
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port_of(b)}/metrics", headers={"Accept": "application/openmetrics-text"}
        )
        read = await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=60).read().decode())
        found = {
            (family.name, sample.exemplar.labels["trace_id"])
            for family in read_openmetrics(read)
            for sample in family.samples
            if sample.exemplar is not None
        }
        for name in ("gen_ai_server_time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
            assert (name, trace_id) in found
        assert {each for _, each in found} == {trace_id}


async def test_health_follows_the_routers_workers() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, metrics_port=0) as b:

        def health() -> int:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(b), timeout=60)) as client:
                client.request("GET", "/health")
                return client.getresponse().status

        await until_equal(health, 200)
        await worker.stop()
        await until_equal(health, 503)


@pytest.mark.parametrize("simulated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_worker_shows_scrapers_what_the_collector_gets(tmp_path: Path, simulated: bool) -> None:
    """A worker as a process that takes the option: simulated, or with the demo model."""
    port = free_port()
    model = simulated_model(tmp_path / "model") if simulated else DEMO
    with OtlpReceiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "100"}
        options = ["--metrics-port", str(port), *(OPTIONS if simulated else ())]
        with running_service(tmp_path, model, worker_options=options, environment=environment) as service:
            asked = pb.GenerateRequest(
                text="Once upon a time there was", sampling_params=pb.SamplingParams(max_tokens=24)
            )
            answers = [generate(service.stub, asked) for _ in range(2)]
            usages = [answer.finish.usage for answer in answers if answer.finish is not None]
            settled = {"fissile_engine_sequences_ended_total": 2, "fissile_engine_sequences_running": 0}
            found = asyncio.run(agree(receiver, port, "fissile_engine_", wanted=settled))
            of_test = {name: value for (name, labels), value in found.items() if ("model_name", "test") in labels}
            assert of_test["vllm:generation_tokens_total"] == sum(usage.completion_tokens for usage in usages)
            assert of_test["vllm:prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
            assert of_test["vllm:prefix_cache_hits_total"] == sum(usage.cached_tokens for usage in usages)
            assert of_test["vllm:num_requests_running"] == of_test["vllm:num_requests_waiting"] == 0
            config = next(dict(labels) for name, labels in found if name == "vllm:cache_config_info")
            assert int(config["num_gpu_blocks"]) == service.worker_load().total_blocks


async def test_port_is_off_without_the_option() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        assert b.router.scrapes is None
        assert not b.router._metrics.enabled


def test_taken_metrics_port_is_refused_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = router_process(
            "--worker", "127.0.0.1:1", "--port", "0", "--metrics-port", str(taken.getsockname()[1])
        )
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--metrics-port" in said.splitlines()[-1]
