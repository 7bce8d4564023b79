"""Speculation through router and workers: the streams of a plain engine, also where a worker dies in the middle."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from click.testing import CliRunner
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.cli.bench.command import bench
from common.config import Config, SpeculativeConfig
from common.wire.draft_counts import add_counts
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, free_port, running_service
from worker.llm_engine import LLMEngine

MODEL_LEN: Final = 400
NGRAM: Final[dict[str, Any]] = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
# Seeds of requests.
WITH_RECEIPTS: Final = range(6, 10)
Request = tuple[list[int], dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def requests() -> list[Request]:
    """Prompts that repeat themselves, some with answers of a few ids only, which repeat themselves too."""
    rnd, made = random.Random(5), []
    for seed in range(10):
        piece = [rnd.randrange(5, 300) for _ in range(rnd.randint(2, 9))]
        params: dict[str, Any] = {
            "temperature": rnd.choice([0.0, 0.7]),
            "seed": seed,
            "max_tokens": 200,
            "ignore_eos": True,
        }
        if seed % 2:
            params |= {"allowed_token_ids": piece[:2], "repetition_penalty": rnd.choice([1.0, 1.1])}
        if seed % 5 == 0:
            params["num_drafts"] = seed // 5
        made.append((piece * rnd.randint(2, 5), params))
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What a plain engine generates; one that speculates, too, and it gains by it."""
    plain = Config(model=str(checkpoint), dtype="float32", max_model_len=MODEL_LEN)
    prompts, params = [prompt for prompt, _ in requests()], [given for _, given in requests()]
    tokens = [one["token_ids"] for one in LLMEngine(plain).generate(prompts, params)]
    drafting = LLMEngine(replace(plain, speculative_config=SpeculativeConfig(**NGRAM, adaptive=False)))
    assert [one["token_ids"] for one in drafting.generate(prompts, params)] == tokens
    assert drafting.core.scheduler.spec_stats.total_accepted_tokens > 100
    return tokens


def ask_all(service: Service, begun: threading.Event, **other: Any) -> list[Answer]:
    """All at once, some with receipts; `begun` is set with the first tokens. `other` are other sampling parameters."""

    def ask(given: Request) -> Answer:
        answer = Answer()
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=given[0]),
            sampling_params=pb.SamplingParams(**{**given[1], **other}),
            output_options=pb.OutputOptions(return_token_ids=True),
        )
        if given[1]["seed"] in WITH_RECEIPTS:
            request.output_options.receipt.logits_every = 3
        for part in service.stub.Generate(request, timeout=120):
            answer.add(part)
            if answer.token_ids:
                begun.set()
        return answer

    with ThreadPoolExecutor(len(requests())) as pool:
        return list(pool.map(ask, requests()))


def described(address: str) -> wpb.GetWorkerResponse:
    with grpc.insecure_channel(address) as channel:
        return WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)


def pairs(counts: Iterable[Any]) -> list[tuple[int, int]]:
    return [(one.verified, one.accepted) for one in counts]


def total(each: Iterable[Iterable[Any]]) -> list[tuple[int, int]]:
    counts: list[tuple[int, int]] = []
    for one in each:
        add_counts(counts, pairs(one))
    return counts


@pytest.fixture
def admin_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def service(checkpoint: Path, admin_address: str, tmp_path: Path) -> Iterator[Service]:
    # On a busy machine drafts may not pay, and are not verified.
    config = json.dumps({**NGRAM, "adaptive": False})
    options = ["--dtype", "float32", "--max-model-len", str(MODEL_LEN), "--speculative-config", config]
    admin = ["--admin-port", admin_address.rpartition(":")[2]]
    with running_service(tmp_path, checkpoint, workers=2, worker_options=options, router_options=admin) as running:
        yield running


@pytest.mark.proto_field("Finish.drafts", "DraftCounts.verified", "DraftCounts.accepted")
def test_streams_with_killed_worker_equal_plain_engine(
    service: Service, admin_address: str, expected: list[list[int]]
) -> None:
    """Answers, workers and the router's list of workers count the same drafts; a benchmark counts those of its own
    requests."""
    answers = ask_all(service, threading.Event())
    assert [answer.token_ids for answer in answers] == expected
    finishes = [answer.finish for answer in answers if answer.finish is not None]
    # Those of `num_drafts` 0 and 1.
    assert [len(finishes[i].drafts) for i in (0, 5)] == [0, 1]
    listed = all_workers_of(admin_address, len(service.workers))
    for process in service.workers:
        worker = described(process.address)
        assert (worker.speculation.method, worker.speculation.num_speculative_tokens) == ("ngram", 5)
        counts = pairs(worker.drafts)
        assert counts == total(finish.drafts for finish in finishes if finish.worker_id == worker.worker_id)
        seen = listed[worker.worker_id]
        assert seen.kernels == worker.kernels
        assert (seen.draft_method, seen.num_speculative_tokens, pairs(seen.drafts)) == ("ngram", 5, counts)
        assert all(verified >= accepted for verified, accepted in counts)
    plain = ask_all(service, threading.Event(), num_drafts=0)
    assert all(answer.finish is not None and not answer.finish.drafts for answer in plain)
    assert receipts_of(answers) == receipts_of(plain)
    before = total(described(process.address).drafts for process in service.workers)
    assert before[0][1] > 0
    row = benchmark(service.router.address)
    after = total(described(process.address).drafts for process in service.workers)
    verified, accepted = (sum(one[place] for one in after) - sum(one[place] for one in before) for place in (0, 1))
    assert verified > 0
    assert sum(one["verified"] for one in row["drafts"]) == verified
    assert sum(one["accepted"] for one in row["drafts"]) == accepted
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(ask_all, service, begun)
        assert begun.wait(60)
        service.workers[0].stop(signal.SIGKILL)
        assert [answer.token_ids for answer in later.result()] == expected


def receipts_of(answers: list[Answer]) -> list[pb.Receipt]:
    """With digests of logits."""
    finishes = [answers[i].finish for i in WITH_RECEIPTS]
    receipts = [finish.receipt for finish in finishes if finish is not None]
    assert all(len(receipt.logit_digests) == -(-200 // 3) for receipt in receipts)
    return receipts


def workers_of(address: str) -> Sequence[apb.Worker]:
    with grpc.insecure_channel(address) as channel:
        return AdminServiceStub(channel).ListWorkers(apb.ListWorkersRequest(), timeout=60).workers


def all_workers_of(address: str, count: int) -> dict[str, apb.Worker]:
    """By id; waits until so many are connected, since one that has long been silent on a busy machine is not."""
    end = time.monotonic() + 60
    while len(found := {worker.worker_id: worker for worker in workers_of(address) if worker.worker_id}) < count:
        assert time.monotonic() < end, f"{list(found)}"
        time.sleep(0.1)
    return found


def benchmark(address: str) -> dict[str, Any]:
    """The row of a run without a warm-up."""
    load = ("--concurrency", "2", "--requests", "4", "--warmup", "0", "--input-len", "60", "--output-len", "60")
    arguments = ["serve", "--address", address, *load, "--json", "-"]
    result = CliRunner().invoke(bench, arguments, standalone_mode=False, catch_exceptions=False)
    (row,) = json.loads(result.stdout)["rows"]
    found: dict[str, Any] = row
    return found
