"""Several models behind one router, and workers that differ from the others of their model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
import structlog
from fissile.v1 import inference_pb2 as pb
from structlog.testing import LogCapture

from router.scheduling.placement import PLACEMENTS
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, bench, collect, error_of, request
from tests.unit.router.support import tokenizer_files


@pytest.fixture
def logged() -> Iterator[LogCapture]:
    """What the router logs."""
    capture, before = LogCapture(), structlog.get_config()["processors"]
    structlog.configure(processors=[capture])
    yield capture
    structlog.configure(processors=before)


def fleet() -> list[FakeWorker]:
    """Two workers of model m, one of model k."""
    return [
        FakeWorker(FILES, "m0", answer=short),
        FakeWorker(FILES, "m1", answer=short),
        FakeWorker(FILES, "k0", answer=short, description={"model": "k", "weights_digest": "kk", "vocab_size": 290}),
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_every_request_goes_to_a_worker_of_its_model(placement: str) -> None:
    async with bench(*fleet(), placement=placement) as b:
        # Longer than a granule, and equal for both models.
        text = "say it again and again " * 40
        calls = [b.stub.Generate(request(text, model="mk"[i % 2], request_id=str(i))) for i in range(20)]
        for i, parts in enumerate(await asyncio.gather(*(collect(call) for call in calls))):
            assert parts[-1].finish.worker_id in (["m0", "m1"], ["k0"])[i % 2]
        listed = (await b.stub.ListModels(pb.ListModelsRequest())).models
        assert [(model.name, model.ready_workers) for model in listed] == [("k", 1), ("m", 2)]
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "one of k, m" in (error.details() or "")


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 32), ("tokenizer_sha256", None), ("hash_seed", 7), ("weights_digest", "x")]
)
async def test_worker_of_other_numerics_serves_with_one_warning(field: str, value: object, logged: LogCapture) -> None:
    """Both workers share the requests, and each prompt is made for the worker that gets it."""
    files, described = (FILES, {field: value}) if value is not None else (tokenizer_files(chat=False), {})
    odd = FakeWorker(files, "odd", answer=short, description=described)
    async with bench(FakeWorker(FILES, "m0", answer=short), start=False) as b:
        await b.ready(1)
        address = await odd.start()
        b.router.pool.set_workers([f"127.0.0.1:{b.workers[0].port}", address])
        await b.ready(2)
        lines = [entry for entry in logged.entries if "differs" in entry["event"]]
        assert [field in entry["difference"] for entry in lines] == [True]
        served = [(await collect(b.stub.Generate(request(request_id=str(i)))))[-1].finish for i in range(20)]
        assert {finish.worker_id for finish in served} == {"m0", "odd"}
        if field == "weights_digest":
            digests = {"m0": "ww", "odd": "x"}
            assert all(finish.weights_digest == digests[finish.worker_id] for finish in served)
        listed = (await b.stub.ListModels(pb.ListModelsRequest())).models
        assert [(model.name, model.ready_workers) for model in listed] == [("m", 2)]
        await odd.stop()
