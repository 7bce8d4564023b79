"""Workers of one model with different lengths: an answer is whole, or it is not given out as if it were."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from router.scheduling.failover import FailoverOptions
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, Bench, bench, collect, error_of, until
from tests.e2e.router_bench import request as asked
from tests.e2e.service import Answer, Service, generate, running_service
from tests.e2e.simulated import OPTIONS, simulated_model, wait_workers
from tests.e2e.simulated import request as simulated_request

LONG, SHORT = 1024, 256


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker of 1024 tokens and one of 256."""
    folder = tmp_path_factory.mktemp("fleet")
    model = simulated_model(folder / "model")
    options = ["--worker-wait", "200s"]
    with running_service(folder, model, workers=2, worker_options=OPTIONS, router_options=options) as service:
        for worker, length in zip(service.workers, (LONG, SHORT), strict=True):
            worker.stop(signal.SIGKILL)
            worker.arguments += ["--max-model-len", str(length)]
        yield service


def start(service: Service, *indexes: int) -> None:
    for index in indexes:
        worker = service.workers[index]
        if worker.running.poll() is not None:
            worker.start()
            worker.wait_serving()
    wait_workers(service, len(indexes))


def stop(service: Service, index: int) -> None:
    service.workers[index].stop(signal.SIGKILL)
    wait_workers(service, sum(worker.running.poll() is None for worker in service.workers))


def long_request(request_id: str) -> pb.GenerateRequest:
    made = simulated_request(3, 900)
    made.request_id, made.sampling_params.seed = request_id, 7
    return made


def whole(answer: Answer, undisturbed: Answer, attempts: int) -> None:
    assert answer.token_ids == undisturbed.token_ids
    assert len(answer.token_ids) == 900
    assert answer.finish is not None
    assert (answer.finish.attempts, answer.finish.exact) == (attempts, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "attempts"), [(signal.SIGKILL, 2), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow)]
)
def test_answer_never_moves_to_worker_with_too_short_model_length(
    fleet: Service, ending: signal.Signals, attempts: int
) -> None:
    """The short worker joins while the stream runs on the long one, which is then killed, or drains."""
    start(fleet, 0)
    undisturbed = generate(fleet.stub, long_request(f"undisturbed {ending}"))
    with ThreadPoolExecutor(1) as pool:
        for number in count():
            running = pool.submit(generate, fleet.stub, long_request(f"disturbed {ending} {number}"))
            start(fleet, 0, 1)
            if not running.done():
                break
            # On a busy machine the start has taken longer than the answer.
            stop(fleet, 1)
        fleet.workers[0].stop(ending)
        time.sleep(0.1)
        start(fleet, 0, 1)
        whole(running.result(), undisturbed, attempts)
    stop(fleet, 1)


def test_clients_see_effective_model_length(fleet: Service) -> None:
    """A worker with a shorter context does not reduce the length that clients may use."""
    start(fleet, 0, 1)
    assert fleet.stub.GetModel(pb.GetModelRequest()).model.max_model_len == LONG
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda name: generate(fleet.stub, long_request(name)), ("one", "other"))
    whole(one, other, 1)
    stop(fleet, 0)
    assert fleet.stub.GetModel(pb.GetModelRequest()).model.max_model_len == SHORT
    stop(fleet, 1)


def fakes() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker(FILES, "long", max_model_len=LONG), FakeWorker(FILES, "short", max_model_len=SHORT)


async def joined(b: Bench, *workers: FakeWorker) -> None:
    b.router.pool.set_workers([f"127.0.0.1:{worker.port}" for worker in workers])
    await b.ready(len(workers))


async def test_waiting_request_never_moves_to_too_short_worker() -> None:
    """Requests queue when the short worker joins."""
    long, short = fakes()
    long.room_seqs = 1
    async with bench(long) as b:
        calls = [b.stub.Generate(asked(request_id=str(i), params={"max_tokens": 300})) for i in range(3)]
        small = [b.stub.Generate(asked(request_id=f"small {i}", params={"max_tokens": 200})) for i in range(3)]
        await until(lambda: long.running and len(b.router.dispatcher) == 5)
        await short.start()
        await joined(b, long, short)
        answers = [await collect(call) for call in [*calls, *small]]
        assert [len([i for part in parts for i in part.token_ids]) for parts in answers] == [300] * 3 + [200] * 3
        assert {parts[-1].finish.worker_id for parts in answers[:3]} == {"long"}
        assert all(sequence.prompt_len + sequence.params.max_tokens <= SHORT for sequence in short.submitted)
        await short.stop()
        await b.empty()


async def test_requests_too_long_for_all_workers_wait_then_fail() -> None:
    """Nothing is cut and nothing is INTERNAL."""
    long, short = fakes()
    async with bench(long, short, failover=FailoverOptions(worker_wait_s=0.5)) as b:
        begun = b.stub.Generate(asked(request_id="begun", params={"max_tokens": 900}))
        await until(lambda: long.running)
        await begun.read()
        long.room_seqs = 1
        await until(lambda: b.router.dispatcher.lanes[f"127.0.0.1:{long.port}"].load.report.room_seqs == 0)
        waiting = b.stub.Generate(asked(request_id="waiting", params={"max_tokens": 900}))
        await until(lambda: len(b.router.dispatcher) == 1)
        await long.stop()
        error = await error_of(waiting)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no worker with room for the request's 903 tokens serves model 'm'" in (error.details() or "")
        assert (await error_of(begun)).code() is grpc.StatusCode.ABORTED
        assert not short.submitted
        await b.empty()


async def test_worker_refusing_moved_request_does_not_fail_it() -> None:
    """The request runs on the first worker, is refused by the second, and goes on on the third."""
    workers = [FakeWorker(FILES, f"w{i}") for i in range(3)]
    async with bench(*workers) as b:
        call = b.stub.Generate(asked(params={"max_tokens": 500}))
        first = await call.read()
        (leaving,) = [worker for worker in workers if worker.submitted]
        refusing, taking = [worker for worker in workers if worker is not leaving]
        refusal = wpb.SequenceEnd(reason=wpb.END_REASON_INVALID, message="token_ids is too long")
        refusing.end_with = taking.end_with = refusal
        await leaving.stop()
        # Whichever is tried first refuses it.
        await until(lambda: refusing.submitted or taking.submitted)
        refusing.end_with = taking.end_with = None
        answer = [first, *await collect(call)]
        assert [i for part in answer for i in part.token_ids] == leaving.answer(leaving.submitted[0])[:500]
        await b.empty()


async def test_request_refused_by_two_workers_fails_with_their_message() -> None:
    """A refusal is tried elsewhere once."""
    refusal = wpb.SequenceEnd(reason=wpb.END_REASON_INVALID, message="no")
    workers = [FakeWorker(FILES, f"w{i}", end_with=refusal, tokens_per_step=0) for i in range(3)]
    async with bench(*workers) as b:
        error = await error_of(b.stub.Generate(asked()))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert sorted(len(worker.submitted) for worker in workers) == [0, 1, 1]
        await b.empty()


async def test_answer_cut_by_worker_continues_elsewhere() -> None:
    """FINISH_REASON_LENGTH promises all tokens that were asked for."""
    workers = [FakeWorker(FILES, f"w{i}") for i in range(2)]
    async with bench(*workers) as b:
        call = b.stub.Generate(asked(params={"max_tokens": 500}))
        first = await call.read()
        (cutting,) = [worker for worker in workers if worker.submitted]
        cutting.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_LENGTH)
        parts = [first, *await collect(call)]
        assert len([i for part in parts for i in part.token_ids]) == 500
        assert (parts[-1].finish.attempts, parts[-1].finish.exact) == (2, True)
        await b.empty()


async def test_workers_without_numerics_class_share_none() -> None:
    """Without numerics classes, an answer that moves between workers could not be called exact."""
    workers = [FakeWorker(FILES, f"w{i}") for i in range(2)]
    for worker in workers:
        plain = worker.GetWorker

        async def unnamed(request: object, context: object, plain: object = plain) -> wpb.GetWorkerResponse:
            answer: wpb.GetWorkerResponse = await plain(request, context)  # type: ignore[operator]
            answer.ClearField("numerics")
            return answer

        worker.GetWorker = unnamed  # type: ignore[method-assign]
    async with bench(*workers, failover=FailoverOptions(worker_wait_s=0.2)) as b:
        call = b.stub.Generate(asked(params={"max_tokens": 500}))
        await call.read()
        (leaving,) = [worker for worker in workers if worker.submitted]
        await leaving.stop()
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        await b.empty()
