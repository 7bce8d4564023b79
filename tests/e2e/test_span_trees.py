"""The whole span tree of a request, over real OTLP, for the ways in which a request can end before its answer does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub

from tests.e2e.service import Service, free_port, running_service
from tests.e2e.simulated import request, simulated_model, wait_workers
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

METHOD = "fissile.v1.InferenceService/Generate"
# A step is long enough to cancel a request between its submission and its first token.
STEPS = ["--simulate", "fixed:100ms", "--max-num-seqs", "1"]


class Site:
    """Two workers that run one request each, their router, and the collector of all."""

    def __init__(self, service: Service, receiver: OtlpReceiver, admin: AdminServiceStub) -> None:
        self.stub = service.stub
        self.service = service
        self.receiver = receiver
        self.admin = admin
        self._number = 0

    def begin(self, max_tokens: int, timeout_s: float = 300.0, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        """A call with a request id of its own, `call.request_id`."""
        self._number += 1
        asked = request(self._number, max_tokens)
        asked.request_id = f"tree-{self._number}"
        call: Any = self.stub.Generate(asked, timeout=timeout_s, metadata=metadata)
        call.request_id = asked.request_id
        return call

    def listed(self, call: Any) -> apb.InFlightRequest:
        """A call as the router lists it; empty if the router does not have it."""
        listed = self.admin.ListRequests(apb.ListRequestsRequest(), timeout=60).requests
        return next((one for one in listed if one.request_id == call.request_id), apb.InFlightRequest())

    def has_state(self, call: Any, *states: apb.RequestState.ValueType) -> bool:
        """True if a call in flight is in one of the states."""
        return self.listed(call).state in states

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def root(self, call: Any) -> ReceivedSpan:
        """The router's span of a call that has ended."""

        def found() -> list[ReceivedSpan]:
            named = self.receiver.named(METHOD)
            return [span for span in named if span.attributes.get("gen_ai.response.id") == call.request_id]

        self.until(found)
        (span,) = found()
        return span

    def below(self, span: ReceivedSpan, count: int) -> list[ReceivedSpan]:
        """The `count` children of a span."""

        def found() -> list[ReceivedSpan]:
            return [each for each in self.receiver.spans if each.parent_id == span.span_id]

        self.until(lambda: len(found()) >= count)
        return found()

    def sequence(self, root: ReceivedSpan) -> ReceivedSpan | None:
        """The worker's span below a root; None if none comes in ten seconds."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for span in self.receiver.spans:
                if span.parent_id == root.span_id and span.name == "worker.generate":
                    return span
            time.sleep(0.05)
        return None

    def fill(self) -> list[Any]:
        """Calls that run on both workers for as long as a test takes."""
        calls = [self.begin(1900) for _ in range(2)]
        self.until(lambda: all(self.has_state(call, apb.REQUEST_STATE_STREAMING) for call in calls))
        return calls

    def end(self, calls: list[Any]) -> None:
        """Cancels calls, and waits until both workers are idle."""
        for call in calls:
            call.cancel()
        self.until(lambda: not sum(one.running for one in self.admin.ListWorkers(apb.ListWorkersRequest()).workers))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port = free_port()
    model = simulated_model(tmp_path_factory.mktemp("model"))
    with OtlpReceiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with running_service(
            tmp_path_factory.mktemp("trees"), model, workers=2, worker_options=STEPS,
            router_options=["--admin-port", str(port)], environment=environment,
        ) as service:  # fmt: skip
            wait_workers(service, 2)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Site(service, receiver, AdminServiceStub(channel))


def names(spans: list[ReceivedSpan]) -> Counter[str]:
    return Counter(span.name for span in spans)


def test_cancel_in_router_queue_leaves_no_worker_span(site: Site) -> None:
    running = site.fill()
    waiting = site.begin(10)
    site.until(lambda: site.has_state(waiting, apb.REQUEST_STATE_QUEUED))
    waiting.cancel()
    root = site.root(waiting)
    assert names(site.below(root, 2)) == {"tokenize": 1, "queue": 1}
    assert (root.attributes["rpc.status_code"], root.status, root.events) == ("CANCELLED", "UNSET", ())
    stages = {name for name in root.attributes if name.startswith("fissile.stage.")}
    assert stages & {"fissile.stage.queue_ms", "fissile.stage.own_queue_ms"}, stages
    assert "fissile.stage.decode_ms" not in stages
    site.end(running)


def test_cancel_before_first_token_ends_worker_span_with_its_stage(site: Site) -> None:
    while True:
        call = site.begin(1900)
        site.until(partial(site.has_state, call, apb.REQUEST_STATE_SUBMITTED, apb.REQUEST_STATE_STREAMING))
        call.cancel()
        root = site.root(call)
        # On a busy machine the first token may come before the cancellation, or the cancellation before the worker
        # has the request.
        if root.events == ("submitted",) and (worker := site.sequence(root)) is not None:
            break
    assert worker.attributes["rpc.status_code"] == "CANCELLED"
    # The step that ran meanwhile may have made the first token at the worker.
    stages = sorted(site.below(worker, 1), key=lambda span: span.start_ns)
    assert [span.name for span in stages] == ["queue", "prefill", "decode"][: len(stages)]


def test_cancel_while_decoding_has_all_stages(site: Site) -> None:
    call = site.begin(1900)
    next(iter(call))
    call.cancel()
    root = site.root(call)
    (worker,) = [span for span in site.below(root, 3) if span.name == "worker.generate"]
    assert names(site.below(worker, 3)) == {"queue": 1, "prefill": 1, "decode": 1}
    assert root.events == ("submitted", "first_token")
    assert {root.attributes["rpc.status_code"], worker.attributes["rpc.status_code"]} == {"CANCELLED"}


@pytest.mark.slow
def test_deadline_while_decoding_is_an_error_of_both_spans(site: Site) -> None:
    call = site.begin(1900, timeout_s=15.0)
    with pytest.raises(grpc.RpcError):
        list(call)
    root = site.root(call)
    (worker,) = [span for span in site.below(root, 3) if span.name == "worker.generate"]
    assert (root.attributes["rpc.status_code"], root.status) == ("DEADLINE_EXCEEDED", "ERROR")
    # The worker's own timer and the router's cancellation race.
    assert worker.attributes["rpc.status_code"] in ("DEADLINE_EXCEEDED", "CANCELLED")


def test_eviction_shows_both_attempts_linked_and_both_sequences(site: Site) -> None:
    call = site.begin(1900)
    next(iter(call))
    first = site.listed(call).worker_id
    site.admin.CordonWorker(apb.CordonWorkerRequest(worker_id=first, evict=True))
    site.until(lambda: site.listed(call).attempts == 2)
    tokens = site.listed(call).output_tokens
    site.until(lambda: site.listed(call).output_tokens > tokens + 1)
    call.cancel()
    site.admin.UncordonWorker(apb.UncordonWorkerRequest(worker_id=first))
    root = site.root(call)
    below = site.below(root, 7)
    assert names(below) == {"tokenize": 1, "queue": 1, "attempt": 2, "wait for worker": 1, "worker.generate": 2}
    one, other = sorted((span for span in below if span.name == "attempt"), key=lambda span: span.start_ns)
    assert (one.links, other.links) == ((), (one.span_id,))
    assert (one.attributes["fissile.attempt.loss"], one.status) == ("drained", "ERROR")
    assert root.attributes["fissile.attempts"] == 2


def test_each_request_has_one_root_and_every_span_a_parent(site: Site) -> None:
    calls = [site.begin(1) for _ in range(30)]
    for call in calls:
        list(call)
    roots = [site.root(call) for call in calls]
    for root in roots:
        assert names(site.below(root, 3)) == {"tokenize": 1, "queue": 1, "worker.generate": 1}
    traces = {root.trace_id for root in roots}
    assert len(traces) == len(calls)
    spans = [span for span in site.receiver.spans if span.trace_id in traces]
    ids = {span.span_id for span in spans}
    assert all(span.parent_id in ids for span in spans if span.name != METHOD)


def test_steps_of_a_request_are_in_its_trace_on_demand(site: Site) -> None:
    call = site.begin(6, metadata=(("x-fissile-trace-steps", "1"),))
    list(call)
    worker = site.sequence(site.root(call))
    assert worker is not None
    steps = [span for span in site.below(worker, 9) if span.name == "step"]
    assert len(steps) == 6
    numbers = sorted(int(step.attributes["fissile.step.number"]) for step in steps)
    assert numbers == list(range(numbers[0], numbers[0] + 6))
    assert all(step.attributes["fissile.step.sequences"] == 1 for step in steps)
    assert all(worker.start_ns <= step.start_ns <= step.end_ns <= worker.end_ns + 5_000_000 for step in steps)
    assert sum(int(step.attributes["fissile.step.prefills"]) for step in steps) == 1
