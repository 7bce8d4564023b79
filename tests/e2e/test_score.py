"""A real model through the service: logprobs are the library's to the bit, and Score gives those of decoding."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.client import AsyncClient, Client, FissileError
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.config import Config
from common.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, detail, error_of
from tests.e2e.service import Service, running_service
from tests.e2e.test_logprobs import PROMPT, logprobs_of, prompt_logprobs_of, tokens_of
from tests.e2e.test_logprobs import request as asking
from worker.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--prefix-caching", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
    with running_service(tmp_path_factory.mktemp("service"), folder, worker_options=options) as service:
        yield service


def tokens(*parts: list[int]) -> pb.ScoreRequest:
    """Continuations of the first part."""
    context, *continuations = (pb.TextOrTokens(token_ids=pb.TokenIds(ids=part)) for part in parts)
    return pb.ScoreRequest(request_id="s", context=context, continuations=continuations)


def texts(context: str | None, *continuations: str) -> pb.ScoreRequest:
    made = pb.ScoreRequest(continuations=[pb.TextOrTokens(text=text) for text in continuations], return_tokens=True)
    if context is not None:
        made.context.text = context
    return made


def plain(entry: pb.TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": tuple((one.token_id, one.logprob) for one in entry.top),
        "given": tuple(entry.given),
        "kept_mass": entry.kept_mass if entry.HasField("kept_mass") else None,
    }


@pytest.mark.proto_field(
    "OutputOptions.logprobs_kind",
    "OutputOptions.prompt_logprobs",
    "OutputOptions.prompt_logprobs_start",
    "TokenLogprobs.logprob",
    "TokenLogprobs.rank",
    "TokenLogprobs.top",
    "TokenLogprobs.given",
    "TokenLogprobs.kept_mass",
    "TopLogprob.token_id",
    "TopLogprob.logprob",
)
def test_score_rpc_equals_library_bit_for_bit(service: Service, folder: Path) -> None:
    params: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.9,
        "top_k": 8,
        "presence_penalty": 1.0,
        "ignore_eos": True,
    }
    asked = {"logprobs": 3, "logprob_token_ids": (5, 6), "prompt_logprobs": 2, "prompt_logprobs_start": 20}
    config = Config(model=str(folder), dtype="float32", max_model_len=256, num_kvcache_blocks=32)
    engine = LLMEngine(config)
    for kind in ("raw", "processed"):
        (expected,) = engine.generate([PROMPT], {**params, **asked, "logprobs_kind": kind}, request_ids=["r"])
        options = {**asked, "logprobs_kind": f"LOGPROBS_KIND_{kind.upper()}"}
        sampling = {name: value for name, value in params.items() if name not in ("max_tokens", "ignore_eos")}
        parts = list(service.stub.Generate(asking(max_tokens=12, options=options, **sampling), timeout=60))
        assert tokens_of(parts) == expected["token_ids"]
        assert parts[-1].finish.logprob == expected["logprob"]
        for found, entries in (
            (logprobs_of(parts), expected["logprobs"]),
            (prompt_logprobs_of(parts), expected["prompt_logprobs"]),
        ):
            assert [plain(entry) for entry in found] == [
                {name: value for name, value in entry.items() if name != "raw"} for entry in entries
            ]


@pytest.mark.proto_field(
    "ScoreRequest.model",
    "ScoreRequest.request_id",
    "ScoreRequest.context",
    "ScoreRequest.continuations",
    "ScoreRequest.return_tokens",
    "TextOrTokens.token_ids",
    "ScoreResponse.request_id",
    "ScoreResponse.scores",
    "ScoreResponse.usage",
    "ScoreResponse.weights_digest",
    "ScoreResponse.numerics",
    "Score.logprob",
    "Score.greedy",
    "Score.tokens",
    "Score.logprobs",
)
def test_scores_equal_decoding_logprobs(service: Service) -> None:
    prompt = [random.Random(1).randrange(5, 250) for _ in range(90)]
    options = pb.OutputOptions(return_token_ids=True, logprobs=0)
    drawn, infos = [], []
    for i, temperature in enumerate((0.0, 1.0, 1.0, 1.5)):
        sampling = pb.SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, repetition_penalty=1.0)
        asked = pb.GenerateRequest(request_id=f"g{i}", sampling_params=sampling, output_options=options)
        asked.token_ids.ids.extend(prompt)
        answer = service.stub.GenerateOnce(asked, timeout=60)
        drawn.append(answer.answers[0])
        infos.append(answer.prompt_info)
    asked_scores = tokens(prompt, *(list(answer.token_ids) for answer in drawn))
    for return_tokens in (False, True):
        asked_scores.return_tokens = return_tokens
        response = service.stub.Score(asked_scores, timeout=60)
        assert response.request_id == "s"
        assert (response.weights_digest, response.numerics) == (infos[0].weights_digest, infos[0].numerics)
        for score, said in zip(response.scores, drawn, strict=True):
            assert score.logprob == said.finish.logprob
            assert score.tokens == 20
            assert score.greedy == all(entry.rank == 1 for entry in said.logprobs)
            assert list(score.logprobs) == (list(said.logprobs) if return_tokens else [])
        assert response.scores[0].greedy
        assert not response.scores[3].greedy
        assert response.usage.prompt_tokens == 4 * (len(prompt) + 20)
        assert response.usage.completion_tokens == 0
        # The context's whole blocks before the first token that is scored.
        assert response.usage.cached_tokens >= 4 * 80
    service.wait_idle()


def test_client_library_scores(service: Service) -> None:
    expected = service.stub.Score(texts("the cat", " sat", " ran"), timeout=60)
    with_ids = service.stub.Score(tokens([5, 6, 7], [8, 9]), timeout=60)

    async def by_asyncio() -> pb.ScoreResponse:
        async with AsyncClient(service.router.address) as client:
            return await client.score([" sat", " ran"], "the cat", return_tokens=True)

    with Client(service.router.address) as client:
        waited = client.score([" sat", " ran"], "the cat", return_tokens=True)
        assert list(client.score([[8, 9]], [5, 6, 7]).scores) == list(with_ids.scores)
        rolling = client.score([[8, 9, 10]])
        assert list(rolling.scores) == list(
            service.stub.Score(
                pb.ScoreRequest(continuations=[pb.TextOrTokens(token_ids=pb.TokenIds(ids=[8, 9, 10]))]), timeout=60
            ).scores
        )
        with pytest.raises(ValueError, match=r"continuations is a list: give \[' sat'\] for one"):
            client.score(" sat", "the cat")
        with pytest.raises(FissileError, match="one form for all"):
            client.score([" sat"], [5])
    for found in (waited, asyncio.run(by_asyncio())):
        assert list(found.scores) == list(expected.scores)


@pytest.mark.proto_field("TextOrTokens.text")
def test_texts_are_encoded_together(service: Service, folder: Path) -> None:
    """Blanks at the end of the context belong to the continuation."""
    tokenizer = Tokenizer.from_folder(folder)
    for context, continuation in (
        ("the cat", " sat on"),
        ("the cat ", "sat on"),
        ("the cat  \n", "x"),
        ("th", "e cat"),
    ):
        start, whole = len(tokenizer.encode(context.rstrip())), tokenizer.encode(context + continuation)
        (by_text,) = service.stub.Score(texts(context, continuation), timeout=60).scores
        asked = tokens(whole[:start], whole[start:])
        asked.return_tokens = True
        (by_tokens,) = service.stub.Score(asked, timeout=60).scores
        assert by_text == by_tokens
        assert [entry.token_id for entry in by_text.logprobs] == whole[start:]


def test_score_without_context_starts_with_bos(service: Service, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id is not None
    whole = tokenizer.encode("the cat sat on the mat")
    (rolling,) = service.stub.Score(texts(None, "the cat sat on the mat"), timeout=60).scores
    (behind,) = service.stub.Score(tokens([tokenizer.bos_token_id], whole), timeout=60).scores
    assert rolling.logprob == behind.logprob
    assert [entry.token_id for entry in rolling.logprobs] == whole


@pytest.mark.parametrize(
    ("code", "path", "bad"),
    [
        ("INVALID_ARGUMENT", "continuations", pb.ScoreRequest()),
        ("INVALID_ARGUMENT", "continuations", texts("a", *["b"] * 129)),
        ("INVALID_ARGUMENT", "continuations[0]", pb.ScoreRequest(continuations=[pb.TextOrTokens()])),
        ("INVALID_ARGUMENT", "continuations[0].text", texts("a", "")),
        ("INVALID_ARGUMENT", "context.text", texts("", "a")),
        ("INVALID_ARGUMENT", "continuations[1].text", pb.ScoreRequest(
            continuations=[tokens([1], [2]).continuations[0], pb.TextOrTokens(text="a")])),
        ("INVALID_ARGUMENT", "continuations[0].token_ids.ids[0]", tokens([1], [90_000])),
        ("OUT_OF_RANGE", "continuations[0]", tokens([1] * 200, [2] * 200)),
        ("NOT_FOUND", "", pb.ScoreRequest(model="other", continuations=tokens([1], [2, 3]).continuations)),
    ],
)  # fmt: skip
def test_unscorable_request_is_refused_by_field(service: Service, code: str, path: str, bad: pb.ScoreRequest) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.Score(bad, timeout=60)
    error: Any = caught.value
    assert error.code().name == code
    assert path in error.details()


async def test_workers_without_logprobs_refuse_score() -> None:
    async with bench(FakeWorker(FILES)) as b:
        error = await error_of(b.stub.Score(texts("a", "b")))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        # It is the method, no field of the request.
        assert detail(error, error_details_pb2.ErrorInfo).reason == "UNSERVED_METHOD"
        await b.empty()


@pytest.mark.proto_field("ScoreRequest.priority", "ScoreRequest.session_id", "ScoreRequest.cache_salt")
async def test_cancelled_call_frees_everything() -> None:
    """Its sequences end; workers got the priority, the session's place and the salt of the call."""
    worker = FakeWorker(FILES, description={"features": ["logprobs"]}, step_s=0.05)
    async with bench(worker) as b:
        asked = texts("a", "b", "c")
        asked.priority, asked.session_id, asked.cache_salt = pb.PRIORITY_LOW, "x", "salt"
        call = b.stub.Score(asked)
        async with asyncio.timeout(60):
            while len(worker.submitted) < 2:  # noqa: ASYNC110  # the fake worker has no event
                await asyncio.sleep(0.01)
        assert {sequence.priority for sequence in worker.submitted} == {wpb.PRIORITY_LOW}
        assert all(sequence.cache_salt for sequence in worker.submitted)
        assert [sequence.params.prompt_logprobs_start for sequence in worker.submitted] == [0, 0]
        call.cancel()
        await b.empty()
