"""New weights under the name of the old ones, one worker after the other: no outage, and no answer of two weights."""

from __future__ import annotations

import json
import random
import signal
import threading
from pathlib import Path

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from router.scheduling.failover import FailoverOptions
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, Bench, bench, collect, error_of, request, until
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import OPTIONS, outcome, simulated_model, wait_workers
from tests.unit.router.support import tokenizer_files


def replaced(service: Service, index: int, folder: Path) -> int:
    """Ends a worker as a rolling update does, and starts one of another model in its place; its exit code."""
    worker = service.workers[index]
    code = worker.stop(signal.SIGTERM)
    worker.arguments[worker.arguments.index("--model") + 1] = str(folder)
    worker.start()
    worker.wait_serving()
    return code


def test_rolling_weights_under_load_fails_no_request(tmp_path: Path) -> None:
    """Three workers with an old tokenizer are replaced by three with a new one; one is ready at any time."""
    old = simulated_model(tmp_path / "old")
    new = simulated_model(tmp_path / "new")
    (new / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    outcomes: list[tuple[grpc.StatusCode, int]] = []
    ready: list[int] = []
    stop = threading.Event()

    with running_service(tmp_path, old, workers=3, worker_options=OPTIONS) as service:
        wait_workers(service, 3)

        def client(i: int) -> None:
            rnd = random.Random(i)
            while not stop.is_set():
                outcomes.append(outcome(service.stub, rnd.randrange(10**6, 10**9), 60))

        def watch() -> None:
            while not stop.wait(0.02):
                ready.append(service.stub.GetModel(pb.GetModelRequest(), timeout=60).model.ready_workers)

        before = service.stub.GetModel(pb.GetModelRequest()).model
        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)] + [threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        try:
            for index in range(3):
                # What runs on the last one of the old weights finishes there.
                assert replaced(service, index, new) == 0
                wait_workers(service, 3)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        after = service.stub.GetModel(pb.GetModelRequest()).model
    assert len(outcomes) > 20
    assert set(outcomes) == {(grpc.StatusCode.OK, 60)}
    assert min(ready) >= 2
    assert before.tokenizer_sha256 != after.tokenizer_sha256


async def rolled(b: Bench, *workers: FakeWorker) -> None:
    b.router.pool.set_workers([f"127.0.0.1:{worker.port}" for worker in workers])
    await b.ready(len(workers))


@pytest.mark.slow
async def test_waiting_request_is_prepared_again_after_weight_roll() -> None:
    """The only worker ends, and its successor has other weights and another tokenizer."""
    other = tokenizer_files(generation={"temperature": 0.0})
    old = FakeWorker(FILES, "old", room_seqs=1, description={"weights_digest": "old"})
    new = FakeWorker(other, "new", description={"weights_digest": "new"})
    async with bench(old, failover=FailoverOptions(worker_wait_s=20.0)) as b:
        begun = b.stub.Generate(request(request_id="begun", params={"max_tokens": 4000}))
        await until(lambda: old.running)
        await begun.read()
        calls = [b.stub.Generate(request(f"say {i}", request_id=str(i))) for i in range(200)]
        chat = b.stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")]))
        await until(lambda: len(b.router.dispatcher) == 201)
        await old.stop()
        await new.start()
        b.router.pool.set_workers([f"127.0.0.1:{worker.port}" for worker in (old, new)])
        for call in (*calls, chat):
            parts = await collect(call)
            assert (parts[-1].finish.worker_id, parts[-1].finish.weights_digest) == ("new", "new")
        assert len(new.submitted) == 201
        begun.cancel()
        await b.empty()
        await new.stop()


async def test_started_stream_gets_no_token_of_other_weights() -> None:
    """The stream waits for its own weights, and then ends like any stream without a worker."""
    old = FakeWorker(FILES, "old", description={"weights_digest": "old"})
    new = FakeWorker(FILES, "new", description={"weights_digest": "new"})
    async with bench(old, failover=FailoverOptions(worker_wait_s=0.5)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        await new.start()
        await rolled(b, old, new)
        await old.stop()
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.ABORTED
        assert not new.submitted
        await b.empty()
        await new.stop()


async def test_session_has_same_weights_at_every_router() -> None:
    """Routers with equal views of the workers choose the same weights."""

    def fleet() -> list[FakeWorker]:
        return [FakeWorker(FILES, f"w{i}", answer=short, description={"weights_digest": "ab"[i % 2]}) for i in range(4)]

    async with bench(*fleet()) as one, bench(*fleet()) as other:
        seen: dict[str, set[str]] = {}
        for i in range(40):
            session, stub = f"session {i % 10}", (one.stub, other.stub)[i // 20]
            finish = (await collect(stub.Generate(request(session_id=session), timeout=60)))[-1].finish
            seen.setdefault(session, set()).add(finish.weights_digest)
        assert {len(digests) for digests in seen.values()} == {1}
        assert set.union(*seen.values()) == {"a", "b"}
