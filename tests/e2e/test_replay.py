"""What a request takes along when its worker is lost or gives it back; and that each rule's loss is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from router.requests.running import RunningRequests
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, running, until
from tests.unit.mutants import Mutant

Test = Callable[[], Awaitable[None]]


def ask(b: Any, length: int, max_tokens: int) -> Any:
    """Prompts of other lengths are told apart at the worker."""
    params = pb.SamplingParams(max_tokens=max_tokens)
    return b.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length), sampling_params=params))


@contextlib.asynccontextmanager
async def one_and_another() -> AsyncIterator[tuple[Any, FakeWorker, FakeWorker]]:
    """A worker, and one that is cordoned until the first is lost."""
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        two.intake = wpb.INTAKE_CORDONED
        await until(lambda: b.ready_workers() == 1)
        yield b, one, two


async def moved_to(b: Any, one: FakeWorker, two: FakeWorker) -> None:
    """Loses the first worker and lets the other take over."""
    await one.stop()
    await until(lambda: not running(b.router))
    two.intake = wpb.INTAKE_OPEN


async def check_tokens_of_a_replay_are_counted() -> None:
    """A request that goes on elsewhere waits there with all tokens that it sends."""
    async with one_and_another() as (b, one, two):
        call = ask(b, 10, 3000)
        (stream,) = await streams(b, 1)
        await until(lambda: stream.assembly.delivered > 100)
        await moved_to(b, one, two)
        await until(lambda: two.submitted)
        (sequence,) = two.submitted
        assert len(sequence.token_ids) > 110
        assert stream.queued.tokens == len(sequence.token_ids)
        call.cancel()
        await b.empty()


async def check_requests_of_a_lost_worker_go_on_in_their_order() -> None:
    """Who came first goes on first."""
    async with one_and_another() as (b, one, two):
        calls = []
        for length in (30, 10, 20):
            calls.append(ask(b, length, 3000))
            await until(lambda: len(one.running) == len(calls))
        await moved_to(b, one, two)
        await until(lambda: len(two.submitted) == 3)
        assert [sequence.prompt_len for sequence in two.submitted] == [30, 10, 20]
        for call in calls:
            call.cancel()
        await b.empty()


async def check_a_request_is_given_back_once() -> None:
    """Where all workers are full, a request stays with the second, and is not passed round."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", give_back=True) for i in range(3)]
    async with bench(*workers) as b:
        call = ask(b, 10, 5)
        await until(lambda: sum(len(worker.submitted) for worker in workers) >= 2)
        kept = [sequence.keep for worker in workers for sequence in worker.submitted]
        assert kept.count(False) == 1
        call.cancel()


async def streams(b: Any, count: int) -> list[Any]:
    await until(lambda: len(running(b.router)) == count)
    return running(b.router)


CHECKS: list[Test] = [
    check_tokens_of_a_replay_are_counted,
    check_requests_of_a_lost_worker_go_on_in_their_order,
    check_a_request_is_given_back_once,
]
COUNTED = "stream.queued.tokens = stream.assembly.num_tokens"
ONCE = "stream.was_returned or bool(address)"
MUTANTS = [
    (Mutant("counts_the_prompt", RunningRequests, "_retry_or_fail", COUNTED, "pass"), CHECKS[0]),
    (Mutant("turns_them_round", RunningRequests, "_fail_over", "reverse=True", "reverse=False"), CHECKS[1]),
    (Mutant("passes_round", RunningRequests, "_requeue_unstarted", ONCE, "False"), CHECKS[2]),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_replay_carries_request_options(check: Test) -> None:
    await check()


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=[mutant.trap for mutant, _ in MUTANTS])
async def test_replay_fault_is_detected(mutant: Mutant, check: Test) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        await asyncio.wait_for(check(), 60)
