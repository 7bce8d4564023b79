"""Workers that die, freeze, fail or return: their streams go on elsewhere, or end with the right status."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.limits import PROBATION_SEQS
from router.app import Router
from router.scheduling.failover import FailoverOptions, FailoverPolicy, Loss
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import (
    FILES,
    TOKENIZER,
    Bench,
    bench,
    collect,
    detail,
    error_of,
    leftovers,
    request,
    running,
    until,
)
from tests.otlp_receiver import OtlpReceiver

if TYPE_CHECKING:
    pass


async def test_restarted_worker_starts_with_a_clean_lane() -> None:
    worker = FakeWorker(FILES, room_seqs=1)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.1)) as b:
        slow = b.stub.Generate(request(params={"max_tokens": 4000}))
        await slow.read()
        await worker.stop()
        assert (await error_of(slow)).code() is grpc.StatusCode.ABORTED
        again = FakeWorker(FILES, answer=short, port=worker.port, instance_id="second")
        b.workers[0] = again
        await again.start()
        await until(lambda: b.ready_workers() == 1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        await b.empty()
        await again.stop()


async def test_lost_worker_costs_no_stream_a_token() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 700, "stop_strings": ["never"]})) for _ in range(6)]
        firsts = [await call.read() for call in calls]
        await one.stop()
        for first, call in zip(firsts, calls, strict=True):
            parts = [first, *await collect(call)]
            ids = [i for part in parts for i in part.token_ids]
            assert ids == one.answer(one.submitted[0])[:700]
            assert "".join(part.text for part in parts) == TOKENIZER.decode(ids)
            finish = parts[-1].finish
            assert (finish.usage.completion_tokens, finish.worker_id, finish.exact) == (700, "w1", True)
            assert finish.usage.prompt_tokens == 3
            assert finish.usage.cached_tokens == parts[0].prompt_info.cached_tokens
        moved = [s for s in two.submitted if len(s.token_ids) > 3]
        assert len(moved) == len(one.submitted) > 0
        assert {(s.prompt_len, tuple(s.token_ids[:3])) for s in moved} == {(3, tuple(TOKENIZER.encode("say")))}
        first_seeds = {s.seed for s in one.submitted}
        assert {s.seed for s in moved} == first_seeds
        assert not {s.rid for s in moved} & {s.rid for s in one.submitted}
        await b.empty()


async def test_streams_without_worker_end_after_bounded_wait() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.4)) as b:
        begun = b.stub.Generate(request(params={"max_tokens": 4000}))
        await begun.read()
        worker.step_s = 60.0
        # The step that is under way ends without the next request.
        await asyncio.sleep(0.2)
        waiting = b.stub.Generate(request(params={"max_tokens": 4000}))
        await until(lambda: len(worker.submitted) == 2)
        begin = asyncio.get_running_loop().time()
        await worker.stop()
        error = await error_of(begun)
        assert error.code() is grpc.StatusCode.ABORTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "WORKER_LOST"
        error = await error_of(waiting)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "for 0.4 s now" in (error.details() or "")
        assert asyncio.get_running_loop().time() - begin > 0.7
        await until(lambda: leftovers(b.router) == [0] * 8)


async def test_waiting_requests_go_to_returning_worker() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        call = b.stub.Generate(request(params={"max_tokens": 700}))
        first = await call.read()
        await worker.stop()
        fresh = b.stub.Generate(request(params={"max_tokens": 5}))
        await asyncio.sleep(0.5)
        b.workers[0] = again = FakeWorker(FILES, worker_id="w9", port=worker.port, instance_id="second")
        await again.start()
        await until(lambda: len(again.submitted) == 2)
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == worker.answer(worker.submitted[0])[:700]
        assert (parts[-1].finish.worker_id, parts[-1].finish.attempts) == ("w9", 2)
        assert (await collect(fresh))[-1].finish.attempts == 1
        await again.stop()


@pytest.mark.parametrize("policy", list(FailoverPolicy))
async def test_numerics_classes(policy: FailoverPolicy) -> None:
    workers = [FakeWorker(FILES, worker_id=c, description={"numerics": c}) for c in "xy"]
    async with bench(*workers, failover=FailoverOptions(policy, worker_wait_s=0.3)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 400}))
        first = await call.read()
        (lost,) = [worker for worker in workers if worker.submitted]
        await lost.stop()
        if policy is FailoverPolicy.EXACT:
            assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        else:
            parts = [first, *await collect(call)]
            finish = parts[-1].finish
            assert (finish.usage.completion_tokens, finish.attempts, finish.exact) == (400, 2, False)
        # What has no token yet may go anywhere.
        assert (await collect(b.stub.Generate(request())))[-1].finish.exact


async def test_worker_with_other_weights_gets_no_moved_stream() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(FailoverPolicy.ANY, worker_wait_s=1.0)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        await worker.stop()
        swapped = FakeWorker(FILES, port=worker.port, instance_id="second", description={"weights_digest": "other"})
        b.workers[0] = swapped
        await swapped.start()
        await until(lambda: swapped.calls and b.ready_workers() == 1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        assert len(swapped.submitted) == 1
        await swapped.stop()


async def test_request_that_kills_workers_ends_after_third_death() -> None:
    """Two deaths make a suspect; a third death, with no other request beside it, ends it."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(5)]
    async with bench(*workers) as b:
        for worker in workers:
            worker.answer = lambda _: []
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        for _ in range(3):
            await until(lambda: any(worker.running for worker in workers))
            (ill,) = [worker for worker in workers if worker.running]
            await ill.stop()
            await until(lambda: not ill.running)  # noqa: B023
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert detail(error, error_details_pb2.ErrorInfo).reason == "POISON_REQUEST"
        assert sum(len(worker.submitted) for worker in workers) == 3
        await until(lambda: b.ready_workers() == 2)
        for worker in workers:
            worker.answer = short
        assert (await collect(b.stub.Generate(request())))[-1].finish.attempts == 1
        await b.empty()


async def test_suspect_runs_alone_until_first_steps_end() -> None:
    """Other requests go elsewhere meanwhile; an innocent suspect ends normally."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(4)]
    async with bench(*workers) as b:
        for worker in workers:
            # It makes no step.
            worker.busy_ms = 1
        call = b.stub.Generate(request(params={"max_tokens": 40}))
        alive = list(workers)
        for _ in range(2):
            await until(lambda: any(worker.running for worker in alive))
            (ill,) = [worker for worker in alive if worker.running]
            alive.remove(ill)
            await ill.stop()
        await until(lambda: any(worker.running for worker in alive))
        (alone,) = [worker for worker in alive if worker.running]
        for worker in alive:
            worker.answer = letters
            worker.busy_ms = int(worker is alone)
        others = [b.stub.Generate(request(params={"max_tokens": 2})) for _ in range(8)]
        for other in others:
            assert (await collect(other))[-1].finish.worker_id != alone.worker_id
        assert len(alone.submitted) == 1
        alone.busy_ms = 0
        finish = (await collect(call))[-1].finish
        assert (finish.usage.completion_tokens, finish.attempts, finish.exact) == (40, 3, True)
        await asyncio.gather(*(collect(b.stub.Generate(request(params={"max_tokens": 2}))) for _ in range(8)))
        assert len(alone.submitted) > 1
        await b.empty()


def have_passed_first_steps(router: Router, address: str) -> bool:
    """True if there are requests on a worker, and all of them are."""
    there = [stream for stream in running(router) if stream.session and stream.session.address == address]
    return bool(there) and all(s.attempts.has_passed_first_steps(s.assembly.num_tokens) for s in there)


@pytest.mark.slow
async def test_long_answers_outlive_any_two_workers() -> None:
    """The workers die beside many other requests, after the first steps."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", step_s=0.01) for i in range(4)]
    async with bench(*workers) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 300})) for _ in range(12)]
        for ill in workers[:3]:
            address = f"127.0.0.1:{ill.port}"
            await until(lambda: have_passed_first_steps(b.router, address))  # noqa: B023
            await ill.stop()
        for call in calls:
            parts = await collect(call)
            assert [i for part in parts for i in part.token_ids] == letters(wpb.SubmitSequence())[:300]
        await b.empty()


@pytest.mark.slow
async def test_temporarily_unreachable_workers_cost_no_stream() -> None:
    """Two workers freeze one after the other, each for longer than the router waits."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", step_s=0.3) for i in range(3)]
    async with bench(*workers) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 20})) for _ in range(9)]
        for frozen in workers[:2]:
            await until(lambda: frozen.running)  # noqa: B023
            frozen.silent = True
            await until(lambda: not any(s.worker_id == frozen.worker_id for s in b.sessions()))  # noqa: B023
            frozen.silent = False
        for call in calls:
            assert (await collect(call))[-1].finish.usage.completion_tokens == 20
        assert b.router.requests.running.lost.of_loss(Loss.SILENT) >= 2
        await b.empty()


async def begun_at_one(b: Bench, max_tokens: int) -> tuple[Any, Any, FakeWorker]:
    """A call, its first part, and the worker that makes it."""
    call = b.stub.Generate(request(params={"max_tokens": max_tokens}))
    first = await call.read()
    (worker,) = [worker for worker in b.workers if worker.submitted]
    return call, first, worker


async def test_silent_worker_is_lost_and_streams_continue() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call, first, silent = await begun_at_one(b, 800)
        silent.silent = True
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == one.answer(silent.submitted[0])[:800]
        assert parts[-1].finish.attempts == 2
        silent.silent = False
        await b.ready(2)


async def test_worker_dying_early_repeatedly_is_on_probation() -> None:
    """The returned worker gets no more requests than it may kill."""
    well = FakeWorker(FILES, worker_id="well")
    bad = FakeWorker(FILES, worker_id="bad", instance_id="0")
    async with bench(well, bad) as b:
        for life in range(1, 4):
            await bad.stop()
            await until(lambda: b.ready_workers() == 1)
            bad = b.workers[1] = FakeWorker(FILES, worker_id="bad", instance_id=str(life), port=bad.port, step_s=0.02)
            await bad.start()
            await until(lambda: b.ready_workers() == 2)
        calls = [asyncio.ensure_future(collect(b.stub.Generate(request(params={"max_tokens": 8})))) for _ in range(24)]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, len(bad.running))
            await asyncio.sleep(0.002)
        assert all(call.result()[-1].HasField("finish") for call in calls)
        assert 1 <= most <= PROBATION_SEQS
        await b.empty()


async def test_stall_timeout_spares_long_prefill() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two, failover=FailoverOptions(stall_timeout_s=1.0)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 900}))
        await call.read()
        (busy,) = [worker for worker in (one, two) if worker.submitted]
        # 2048 tokens at 10 000 a second: ten of the longest prefills take 2.05 s.
        busy.busy_ms = 1900
        await asyncio.sleep(0.5)
        assert (b.ready_workers(), len(one.submitted) + len(two.submitted)) == (2, 1)
        busy.busy_ms = 2100
        parts = await collect(call)
        assert (parts[-1].finish.attempts, parts[-1].finish.usage.completion_tokens) == (2, 900)
        await asyncio.sleep(0.6)
        assert b.ready_workers() == 1
        busy.busy_ms = 0
        await b.ready(2)


async def test_aborted_request_is_not_resubmitted() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        cancelled = b.stub.Generate(request(params={"max_tokens": 4000}), timeout=60)
        await cancelled.read()
        # On a busy machine the first of them may pass before the answer begins.
        for timeout_s in (1.0, 5.0, 25.0):
            late = b.stub.Generate(request(params={"max_tokens": 4000}), timeout=timeout_s)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await late.read()
                break
        await worker.stop()
        cancelled.cancel()
        assert (await error_of(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        again = FakeWorker(FILES, port=worker.port, instance_id="second")
        b.workers[0] = again
        await again.start()
        await b.ready()
        await asyncio.sleep(0.2)
        assert again.submitted == []
        await b.empty()
        await again.stop()


async def test_returned_request_is_routed_again_and_counts_once() -> None:
    full, other = FakeWorker(FILES, worker_id="w0", give_back=True), FakeWorker(FILES, worker_id="w1", answer=short)
    async with bench(full, other) as b:
        answers = [await collect(b.stub.Generate(request(params={"max_tokens": 64}))) for _ in range(4)]
        assert {(p[-1].finish.worker_id, p[-1].finish.attempts) for p in answers} == {("w1", 1)}
        assert len({s.rid for s in [*full.submitted, *other.submitted]}) == len(full.submitted) + len(other.submitted)
        await b.empty()


async def test_protocol_violation_closes_only_session() -> None:
    worker = FakeWorker(FILES, end_with=wpb.SequenceEnd(reason=wpb.END_REASON_LENGTH))
    async with bench(worker) as b:
        worker._advance = lambda step, rid, sequence: step.rid.append(rid)  # type: ignore[method-assign]
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        del worker._advance
        worker.end_with = None
        await b.ready(1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (wpb.END_REASON_INVALID, grpc.StatusCode.INTERNAL),
        (wpb.END_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (wpb.END_REASON_ERROR, grpc.StatusCode.ABORTED),
        (wpb.END_REASON_NOT_A_NUMBER, grpc.StatusCode.INTERNAL),
    ],
)
async def test_worker_failures_become_documented_statuses(
    reason: wpb.EndReason.ValueType, code: grpc.StatusCode
) -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.3)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        worker.end_with = wpb.SequenceEnd(reason=reason, message="engine: boom")
        error = await error_of(call)
        assert error.code() is code
        assert len(worker.submitted) == 1
        await b.empty()


async def test_failed_engine_gets_no_requests() -> None:
    """The worker and its stream may live until it has made another engine."""
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two, placement="round_robin") as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 500})) for _ in range(6)]
        firsts = [await call.read() for call in calls]
        assert (len(one.submitted), len(two.submitted)) == (3, 3)
        one.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_ERROR, message="engine: boom")
        for call, first in zip(calls, firsts, strict=True):
            parts = [first, *await collect(call)]
            assert [i for part in parts for i in part.token_ids] == two.answer(two.submitted[0])[:500]
        assert (len(one.submitted), len(two.submitted)) == (3, 6)
        await b.empty()


async def test_nan_output_ends_only_its_request() -> None:
    """INTERNAL without another attempt, since the same weights would give the same; the worker is not lost."""
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        (its,) = [worker for worker in (one, two) if worker.submitted]
        its.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_NOT_A_NUMBER, message="the model's output is not a number")
        error = await error_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the model's output is not a number")
        its.end_with = None
        assert (len(one.submitted) + len(two.submitted), b.ready_workers()) == (1, 2)
        assert not b.router.requests.running.lost.counts
        for _ in range(2):
            await collect(b.stub.Generate(request()))
        await b.empty()


async def test_sequences_given_up_by_worker_continue_elsewhere() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call, first, leaving = await begun_at_one(b, 500)
        leaving.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_CANCELLED, message="drained")
        await until(lambda: not leaving.running)
        leaving.end_with = None
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == one.answer(leaving.submitted[0])[:500]


async def test_trace_shows_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = "0af7651916cd43dd8448eb211c80319d"
    metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(2)]
        async with bench(*workers) as b:
            call = b.stub.Generate(request(params={"max_tokens": 400}), metadata=metadata)
            await call.read()
            (lost,) = [worker for worker in workers if worker.submitted]
            await lost.stop()
            parts = await collect(call)
            assert (await collect(b.stub.Generate(request())))[-1].finish.attempts == 1
            await until(lambda: b.router._tracing.open_spans() == 0)
            await receiver.until_received("fissile.v1.InferenceService/Generate", 2)
        (request_span, _) = sorted(
            receiver.wait_for("fissile.v1.InferenceService/Generate", 2), key=lambda s: s.trace_id != trace
        )
        spans = sorted(receiver.wait_for("attempt", 2), key=lambda s: s.start_ns)
        assert {(s.trace_id, s.parent_id) for s in spans} == {(trace, request_span.span_id)}
        assert [s.attributes["fissile.worker.id"] for s in spans] == [lost.worker_id, parts[-1].finish.worker_id]
        assert [s.attributes.get("fissile.attempt.loss") for s in spans] == ["died", None]
        assert sum(int(s.attributes["fissile.attempt.tokens"]) for s in spans) == 400
        assert spans[0].end_ns <= spans[1].start_ns <= spans[1].end_ns <= request_span.end_ns + 5_000_000
        # The time between the two is no hole, and neither is what came before the first.
        mine = [s for s in receiver.spans if s.parent_id == request_span.span_id and s.kind == "INTERNAL"]
        tokenize, queue, wait = sorted(mine, key=lambda s: s.start_ns)
        assert [s.name for s in (tokenize, queue, wait)] == ["tokenize", "queue", "wait for worker"]
        assert (wait.attributes["fissile.attempt.loss"], wait.attributes["fissile.worker.id"]) == (
            "died",
            parts[-1].finish.worker_id,
        )
        ends = [(tokenize.end_ns, queue.start_ns), (queue.end_ns, spans[0].start_ns)]
        ends += [(spans[0].end_ns, wait.start_ns), (wait.end_ns, spans[1].start_ns)]
        assert all(abs(one - other) < 5_000_000 for one, other in ends)
        assert request_span.events == ("submitted", "first_token", "submitted")
