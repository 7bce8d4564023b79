"""Span trees, over real OTLP, of requests that lose workers, are preempted or speculate; and that none is left open."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from common.telemetry.names import PREEMPTED_EVENT, RESPONSE_ID
from tests.e2e.service import free_port, generate
from tests.e2e.simulated import request, wait_workers
from tests.e2e.span_site import METHOD, Site, names, running_site, span_counts
from tests.otlp_receiver import ReceivedSpan

MODEL_LEN = 400
# 30 blocks of 16 tokens: two answers of full length do not fit at once.
SMALL_POOL = ["--simulate", "fixed:5ms", "--max-model-len", str(MODEL_LEN), "--kv-cache-memory", "240KiB"]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
ATTEMPTS = 30


def attempts_of(tree: list[Any]) -> list[Any]:
    """The attempts of a request in their order, each checked to link to the one before."""
    found = sorted((span for span in tree if span.name == "attempt"), key=lambda span: span.start_ns)
    assert [span.attributes["fissile.attempt.number"] for span in found] == [*range(1, len(found) + 1)]
    assert [span.links for span in found] == [(), *((before.span_id,) for before in found[:-1])]
    return found


@pytest.mark.slow
def test_drained_and_killed_workers_are_linked_attempts(tmp_path: Path) -> None:
    with running_site(tmp_path, ["--simulate", "fixed:20ms"], workers=3) as site:
        call = site.begin(1900)
        next(iter(call))
        losing: list[str] = []
        for end in (signal.SIGTERM, signal.SIGKILL):
            losing.append(site.listed(call).worker_id)
            index = int(losing[-1].removeprefix("worker-"))
            site.service.workers[index].running.send_signal(end)
            site.until(lambda: site.listed(call).attempts > len(losing))
            tokens = site.listed(call).output_tokens
            site.until(partial(has_more, site, call, tokens))
        call.cancel()
        # The killed worker exports nothing.
        root, workers = site.tree(call, workers=2)
        below = site.below(root, 9)
    assert (root.attributes["rpc.response.status_code"], root.attributes["fissile.attempts"]) == ("CANCELLED", 3)
    assert names(below) == {"tokenize": 1, "queue": 1, "attempt": 3, "wait for worker": 2, "worker.generate": 2}
    tried = attempts_of(below)
    assert [each.attributes["fissile.worker.id"] for each in tried[:2]] == losing
    assert [each.attributes.get("fissile.attempt.loss") for each in tried] == ["drained", "died", None]
    assert [each.status for each in tried] == ["ERROR", "ERROR", "UNSET"]
    assert all(each.attributes["fissile.attempt.tokens"] for each in tried)
    assert [each.attributes["fissile.worker.id"] for each in workers] == [
        losing[0],
        root.attributes["fissile.worker.id"],
    ]
    assert root.attributes["fissile.stage.recovering_ms"] > 0


def has_more(site: Site, call: Any, tokens: int) -> bool:
    """True if a call has more than `tokens` tokens."""
    return site.listed(call).output_tokens > tokens


@pytest.mark.slow
def test_cancel_without_any_worker_has_that_wait_and_how_the_worker_was_lost(tmp_path: Path) -> None:
    with running_site(tmp_path, ["--simulate", "fixed:20ms"]) as site:
        call = site.begin(1900)
        next(iter(call))
        site.service.workers[0].running.kill()
        site.until(lambda: "attempt lost" in site.service.router.log.read_text())
        call.cancel()
        root = site.root(call)
        below = site.below(root, 3)
    assert names(below) == {"tokenize": 1, "queue": 1, "wait for worker": 1}
    (wait,) = [span for span in below if span.name == "wait for worker"]
    assert (wait.attributes["fissile.attempt.loss"], "fissile.worker.id" in wait.attributes) == ("died", False)
    assert root.attributes["fissile.stage.recovering_ms"] > 0
    assert root.attributes["rpc.response.status_code"] == "CANCELLED"


@pytest.mark.slow
def test_stalled_worker_is_lost_attempt_with_its_time(tmp_path: Path) -> None:
    """A worker whose step never ends still answers heartbeats, so its router calls it stalled, not silent."""
    options = ["--placement", "round_robin", "--stall-timeout", "2s"]
    with running_site(tmp_path, ["--simulate", "fixed:5ms"], workers=2, router_options=options) as site:
        hanging = site.service.workers[0]
        assert hanging.stop() == 0
        hanging.arguments[hanging.arguments.index("fixed:5ms")] = "fixed:600s"
        hanging.start()
        hanging.wait_serving()
        root = None
        for _ in range(ATTEMPTS):
            # Workers get requests in turn, once the router is connected to both.
            call = site.begin(5)
            list(call)
            root = site.root(call)
            if root.attributes["fissile.attempts"] == 2:
                break
            wait_workers(site.service, 2)
        assert root is not None
        below = site.below(root, 6)
    first, second = attempts_of(below)
    assert (first.attributes["fissile.attempt.loss"], first.attributes["fissile.worker.id"]) == ("stalled", "worker-0")
    assert (second.status, second.attributes["fissile.attempt.tokens"]) == ("UNSET", 5)
    (wait,) = [span for span in below if span.name == "wait for worker"]
    assert wait.attributes["fissile.attempt.loss"] == "stalled"
    assert first.end_ns <= wait.start_ns + 5_000_000
    assert first.end_ns - first.start_ns >= 2_000_000_000


def test_preempted_sequence_has_events_and_its_stage(tmp_path: Path) -> None:
    with running_site(tmp_path, SMALL_POOL) as site:
        for _ in range(ATTEMPTS):
            # Both run at once, unless the machine is so busy that one ends before the other begins.
            calls = [site.begin(300) for _ in range(2)]
            assert [sum(len(part.token_ids) for part in call) for call in calls] == [300, 300]
            trees = [site.tree(call) for call in calls]
            preempted = [tree for tree in trees if PREEMPTED_EVENT in tree[1][0].events]
            if preempted:
                break
        for root, (worker,) in preempted:
            (decode,) = [span for span in site.below(worker, 3) if span.name == "decode"]
            assert decode.attributes["fissile.decode.preemptions"] == len(worker.events) > 0
            assert root.attributes["fissile.stage.preempted_ms"] > 0
        for root, (worker,) in trees:
            if not worker.events:
                assert "fissile.stage.preempted_ms" not in root.attributes
            assert names(site.below(worker, 3)) == {"queue": 1, "prefill": 1, "decode": 1}
            # The steps of the other prompt.
            wait_ms = root.attributes.get("fissile.stage.others_prefill_ms", 0.0)
            assert worker.waits.get("others_prefill", 0.0) == pytest.approx(wait_ms, abs=1.1)


def test_drafts_are_in_decode_span_as_in_the_answer(tmp_path: Path) -> None:
    with running_site(tmp_path, ["--simulate", "fixed:2ms", "--speculative-config", json.dumps(DRAFTS)]) as site:
        # Of 300 different tokens the answer repeats many, which prompt lookup finds.
        answer = generate(site.stub, request(1, 500))
        site.until(lambda: len(site.receiver.named("decode")) == 1)
        (decode,) = site.receiver.named("decode")
    assert answer.finish is not None
    verified = sum(each.verified for each in answer.finish.drafts)
    accepted = sum(each.accepted for each in answer.finish.drafts)
    assert verified > 0
    given = decode.attributes["fissile.decode.drafts"], decode.attributes["fissile.decode.drafts_accepted"]
    assert given == (verified, accepted)
    assert decode.attributes["fissile.decode.steps"] >= 499 - accepted


def mixed(number: int) -> pb.GenerateRequest:
    """A request that ends in one of several ways."""
    made = request(number, 1 + number % 5)
    made.request_id = f"many-{number}"
    if number % 10 == 3:
        made.model = "unknown"
    if number % 10 == 7:
        made.sampling_params.temperature = -1
    return made


def end_of(site: Site, number: int) -> str:
    """Sends a request, of which every eleventh is cancelled, and every 13th has too little time; returns its status."""
    call: Any = site.stub.Generate(mixed(number), timeout=0.001 if number % 13 == 0 else 120)
    try:
        for _ in call:
            if number % 11 == 0:
                call.cancel()
    except grpc.RpcError:
        pass
    return str(call.code().name)


def missing(found: Sequence[ReceivedSpan], count: int, ends: Mapping[str, int]) -> list[str]:
    """Spans that `count` requests with these ends should have and the collector does not have."""
    roots = [span for span in found if span.name == METHOD]
    known = {span.span_id for span in found}
    named = [span.name for span in found if span.parent_id not in known and not span.name.startswith("fissile.")]
    below = Counter(span.parent_id for span in found if span.name == "worker.generate")
    answered = [span for span in roots if span.attributes["rpc.response.status_code"] == "OK"]
    named += ["worker.generate"] * sum(not below[root.span_id] for root in answered)
    # A call whose deadline passes before the router reads it has no span.
    return named + [METHOD] * (count - ends["DEADLINE_EXCEEDED"] - len(roots))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_span_is_left_after_many_requests(count: int, tmp_path: Path) -> None:
    """None is open, each trace is whole, and the collector has as many spans as the processes count."""
    ports = [free_port(), free_port()]
    with running_site(
        tmp_path, ["--simulate", "fixed:1ms", "--metrics-port", str(ports[1])],
        router_options=["--metrics-port", str(ports[0])], environment={"OTEL_BSP_MAX_QUEUE_SIZE": "100000"},
    ) as site:  # fmt: skip
        with ThreadPoolExecutor(16) as pool:
            ends = Counter(pool.map(lambda number: end_of(site, number), range(count)))
        assert {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND"} <= ends.keys()
        site.until(lambda: not any(span_counts(port)["open"] for port in ports))
        site.until(lambda: not missing(site.receiver.spans, count, ends))
        site.until(lambda: sum(span_counts(port)["exported"] for port in ports) == len(site.receiver.spans))
        assert [span_counts(port)[result] for port in ports for result in ("refused", "dropped")] == [0] * 4
        found = site.receiver.spans
    assert len({span.span_id for span in found}) == len(found)
    assert sum(span.name == METHOD for span in found) <= count


@pytest.mark.slow
def test_trace_slow_keeps_slow_request_whole_and_failed_one_and_drops_fast_one(tmp_path: Path) -> None:
    """With a sampler that drops all: a step takes 0.5 s, so five take longer than --trace-slow, and one does not."""
    kept = ["--trace-slow", "2s"]
    with running_site(
        tmp_path, ["--simulate", "fixed:500ms", *kept], router_options=[*kept, "--worker-wait", "100ms"],
        environment={"OTEL_TRACES_SAMPLER": "always_off"},
    ) as site:  # fmt: skip
        fast = []
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            fast.append(site.begin(1))
            list(fast[-1])
            # On a busy machine it may be slow, too.
            if time.monotonic() - began < 2:
                break
        slow = site.begin(5)
        list(slow)
        root, (worker,) = site.tree(slow)
        assert names(site.below(root, 3)) == {"tokenize": 1, "queue": 1, "worker.generate": 1}
        assert names(site.below(worker, 3)) == {"queue": 1, "prefill": 1, "decode": 1}
        # A process exports its spans in the order of their ends, so one of the fast request would be there.
        assert [
            span for span in site.receiver.named(METHOD) if span.attributes[RESPONSE_ID] == fast[-1].request_id
        ] == []
        traces = {span.trace_id for span in site.receiver.named(METHOD)}
        assert {span.trace_id for span in site.receiver.named("worker.generate")} <= traces
        assert len(traces) <= len(fast)
        site.service.workers[0].running.kill()
        failed = site.begin(1)
        with pytest.raises(grpc.RpcError):
            list(failed)
        assert (site.root(failed).status, failed.code()) == ("ERROR", grpc.StatusCode.UNAVAILABLE)
