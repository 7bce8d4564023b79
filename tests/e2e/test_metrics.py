"""A worker's figures at a real collector: what its requests did, and gauges that go back to zero."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fissile.v1 import inference_pb2 as pb

from common.telemetry import names
from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers
from tests.otlp_receiver import OtlpReceiver, ReceivedPoint


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Service]:
    model = simulated_model(tmp_path_factory.mktemp("model"))
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "100"}
    folder = tmp_path_factory.mktemp("metrics")
    with running_service(folder, model, worker_options=OPTIONS, environment=environment) as running:
        wait_workers(running, 1)
        yield running


def test_worker_metrics_match_its_answers(service: Service, receiver: OtlpReceiver) -> None:
    requests = [request(i, max_tokens=40) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: generate(service.stub, one), requests))
    # All of this prompt's full blocks are cached by now.
    longest = max(requests, key=lambda one: len(one.token_ids.ids))
    answers.append(generate(service.stub, longest))
    usage = [answer.finish.usage for answer in answers if answer.finish is not None]
    generated = sum(one.completion_tokens for one in usage)

    def last(name: str, value: float) -> None:
        found = receiver.wait_for_metric(name, lambda points: points[-1].value == value)
        labels = {names.REQUEST_MODEL: "test", names.WORKER_ID: "worker-0"}
        assert labels.items() <= found[-1].attributes.items()
        assert found[-1].service == "fissile-worker"

    last(names.ENGINE_GENERATED_TOKENS, generated)
    last(names.ENGINE_PROMPT_TOKENS, sum(one.prompt_tokens for one in usage))
    last(names.ENGINE_CACHED_TOKENS, sum(one.cached_tokens for one in usage))
    assert usage[-1].cached_tokens > 0
    last(names.ENGINE_ENDED, len(answers))
    for name in (names.ENGINE_RUNNING, names.ENGINE_WAITING, names.ENGINE_KV_USAGE, names.ENGINE_DRAFT_TOKENS):
        last(name, 0)
    last(names.ENGINE_KV_BLOCKS, service.worker_load().total_blocks)
    last(names.ENGINE_KV_BLOCK_SIZE, 16)


def test_cancelled_request_counts_as_cancelled(service: Service, receiver: OtlpReceiver) -> None:
    call = service.stub.Generate(request(1, max_tokens=1500), timeout=60)
    part = next(iter(call))
    assert isinstance(part, pb.GenerateResponse)
    # It runs until the gauges have risen.
    receiver.wait_for_metric(names.ENGINE_RUNNING, lambda points: points[-1].value == 1)
    receiver.wait_for_metric(names.ENGINE_KV_USAGE, lambda points: points[-1].value > 0)
    call.cancel()

    def seen(points: list[ReceivedPoint]) -> bool:
        return any(point.attributes[names.END_REASON] == "cancelled" for point in points)

    receiver.wait_for_metric(names.ENGINE_ENDED, seen)
    for name in (names.ENGINE_RUNNING, names.ENGINE_KV_USAGE):
        receiver.wait_for_metric(name, lambda points: points[-1].value == 0)
