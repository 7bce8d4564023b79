"""The whole span tree of a request, over real OTLP, for the ways in which a request can end before its answer does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb

from tests.e2e.simulated import request
from tests.e2e.span_site import METHOD, Site, names, running_site
from tests.otlp_receiver import ReceivedSpan

# A step is long enough to cancel a request between its submission and its first token.
STEPS = ["--simulate", "fixed:100ms", "--max-num-seqs", "1"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two workers that run one request each."""
    with running_site(tmp_path_factory.mktemp("trees"), STEPS, workers=2) as running:
        yield running


def test_cancel_in_router_queue_leaves_no_worker_span(site: Site) -> None:
    running = site.fill()
    waiting = site.begin(10)
    site.until(lambda: site.has_state(waiting, apb.REQUEST_STATE_QUEUED))
    # A shorter wait has no culprit.
    time.sleep(0.01)
    waiting.cancel()
    root = site.root(waiting)
    assert names(site.below(root, 2)) == {"tokenize": 1, "queue": 1}
    assert (root.attributes["rpc.response.status_code"], root.status, root.events) == ("CANCELLED", "UNSET", ())
    assert root.attributes["fissile.stage.own_queue_ms"] > 1
    assert root.attributes["fissile.blame.own_queue.request"] in {call.request_id for call in running}
    assert "fissile.stage.decode_ms" not in root.attributes
    site.end(running)


def test_refused_request_has_its_reason_and_no_child(site: Site) -> None:
    asked = request(1)
    asked.model = "unknown"
    with pytest.raises(grpc.RpcError):
        list(site.stub.Generate(asked, timeout=60))

    def refused() -> list[ReceivedSpan]:
        return [span for span in site.receiver.named(METHOD) if "fissile.error.reason" in span.attributes]

    site.until(refused)
    (root,) = refused()
    assert (root.attributes["rpc.response.status_code"], root.attributes["fissile.error.reason"]) == (
        "NOT_FOUND",
        "UNKNOWN_MODEL",
    )
    assert (root.status, root.events) == ("UNSET", ())
    assert [span.name for span in site.receiver.spans if span.parent_id == root.span_id] == []


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
    assert worker.attributes["rpc.response.status_code"] == "CANCELLED"
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
    assert {root.attributes["rpc.response.status_code"], worker.attributes["rpc.response.status_code"]} == {"CANCELLED"}


@pytest.mark.slow
def test_deadline_while_decoding_is_an_error_of_both_spans(site: Site) -> None:
    call = site.begin(1900, timeout_s=15.0)
    with pytest.raises(grpc.RpcError):
        list(call)
    root = site.root(call)
    (worker,) = [span for span in site.below(root, 3) if span.name == "worker.generate"]
    assert (root.attributes["rpc.response.status_code"], root.status) == ("DEADLINE_EXCEEDED", "ERROR")
    # The worker's own timer and the router's cancellation race.
    assert worker.attributes["rpc.response.status_code"] in ("DEADLINE_EXCEEDED", "CANCELLED")


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
