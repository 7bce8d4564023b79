"""Speculation through router and workers: the streams of a plain engine, also where a worker dies in the middle."""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.config import Config, SpeculativeConfig
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, running_service
from worker.llm_engine import LLMEngine

MODEL_LEN: Final = 400
NGRAM: Final[dict[str, Any]] = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
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


def ask_all(service: Service, begun: threading.Event) -> list[list[int]]:
    """All at once; `begun` is set with the first tokens."""

    def ask(given: Request) -> list[int]:
        answer = Answer()
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=given[0]),
            sampling_params=pb.SamplingParams(**given[1]),
            output_options=pb.OutputOptions(return_token_ids=True),
        )
        for part in service.stub.Generate(request, timeout=120):
            answer.add(part)
            if answer.token_ids:
                begun.set()
        assert answer.finish is not None
        return answer.token_ids

    with ThreadPoolExecutor(len(requests())) as pool:
        return list(pool.map(ask, requests()))


def draft_counts(address: str) -> list[tuple[int, int]]:
    with grpc.insecure_channel(address) as channel:
        answer = WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)
    return [(one.verified, one.accepted) for one in answer.drafts]


def test_streams_are_those_of_a_plain_engine_also_when_a_worker_is_killed(
    checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    # On a busy machine drafts may not pay, and are not verified.
    config = json.dumps({**NGRAM, "adaptive": False})
    options = ["--dtype", "float32", "--max-model-len", str(MODEL_LEN), "--speculative-config", config]
    with running_service(tmp_path, checkpoint, workers=2, worker_options=options) as service:
        assert ask_all(service, threading.Event()) == expected
        counts = [draft_counts(worker.address) for worker in service.workers]
        assert any(verified for one in counts for verified, _ in one)
        assert all(verified >= accepted for one in counts for verified, accepted in one)
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_all, service, begun)
            assert begun.wait(60)
            service.workers[0].stop(signal.SIGKILL)
            assert answers.result() == expected
