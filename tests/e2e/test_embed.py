"""Embed and Rerank through router and worker: vectors of the library, relevance of `transformers`, whatever happens."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from fissile.client import AsyncClient, Client, Embeddings, FissileError
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.config import Config
from common.limits import MAX_PROMPTS_AT_ONCE
from common.params.pooling import LAST, MEAN, Pooling
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer
from common.wire.heads import public_pooling
from router.model_registry import rerank_template
from tests.checkpoints import make_checkpoint
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, bench, detail, error_of
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import simulated_model, wait_workers
from worker.llm_engine import LLMEngine
from worker.simulation.runner import SimulatedRunner

YES, NO = 40, 41
EMBEDS = {"features": ["logprobs", "embed"], "hidden_size": 3, "default_pooling": wpb.POOLING_LAST}
RERANKS = {"features": ["logprobs"], "relevance_tokens": wpb.RelevanceTokens(yes=YES, no=NO)}
SIMULATED_SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose own pooling is a mean, and that says how relevant documents are."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    said = {
        "1_Pooling": {"pooling_mode_mean_tokens": True},
        "1_LogitScore": {"true_token_id": YES, "false_token_id": NO},
    }
    for name, config in said.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--prefix-caching", "--max-model-len", "512", "--max-num-batched-tokens", "64"]
    with running_service(tmp_path_factory.mktemp("service"), folder, worker_options=options) as service:
        yield service


def texts(*said: str, **fields: Any) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.TextOrTokens(text=text) for text in said], **fields)


def tokens(*ids: list[int], **fields: Any) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.TextOrTokens(token_ids=pb.TokenIds(ids=one)) for one in ids], **fields)


def vectors(response: pb.EmbedResponse | Embeddings) -> list[list[float]]:
    return [list(embedding.values) for embedding in response.embeddings]


@pytest.mark.proto_field(
    "EmbedRequest.model",
    "EmbedRequest.request_id",
    "EmbedRequest.inputs",
    "EmbedRequest.pooling",
    "EmbedRequest.normalize",
    "EmbedRequest.dimensions",
    "EmbedResponse.request_id",
    "EmbedResponse.embeddings",
    "EmbedResponse.usage",
    "EmbedResponse.weights_digest",
    "EmbedResponse.numerics",
    "EmbedResponse.pooling",
    "Embedding.values",
    "Model.embedding_size",
    "Model.default_pooling",
)
def test_embed_rpc_equals_library(service: Service, folder: Path) -> None:
    said = ["the cat sat on the mat", "a", "the cat sat on the mat, and " * 9]
    config = Config(model=str(folder), dtype="float32", max_model_len=512, num_kvcache_blocks=64)
    library = LLMEngine(config)
    model = service.stub.GetModel(pb.GetModelRequest(), timeout=60).model
    assert (model.embedding_size, model.default_pooling) == (64, pb.POOLING_MEAN)
    assert pb.CAPABILITY_EMBED in model.capabilities
    asked: list[tuple[Any, Pooling]] = [(None, MEAN), (pb.POOLING_MEAN, MEAN), (pb.POOLING_LAST, LAST)]
    for given, pooling in asked:
        response = service.stub.Embed(texts(*said, pooling=given, request_id="e", model="test"), timeout=60)
        assert vectors(response) == [vector.tolist() for vector in library.embed(said, pooling)]
        assert response.pooling == (pb.POOLING_LAST if pooling == LAST else pb.POOLING_MEAN)
        assert (response.request_id, response.weights_digest) == ("e", model.weights_digest)
        assert response.numerics
        lengths = [len(Tokenizer.from_folder(folder).encode(text)) for text in said]
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (sum(lengths), 0)
    cut = service.stub.Embed(texts(*said, dimensions=5, normalize=False), timeout=60)
    assert vectors(cut) == [vector.tolist() for vector in library.embed(said, dimensions=5, normalize=False)]
    service.wait_idle()


def test_client_library_embeds_and_ranks(service: Service) -> None:
    said: list[str | list[int]] = ["a cat", [5, 6, 7]]
    query, documents = "cats", ["a dog", "a cat sat", "mat"]
    inputs = [pb.TextOrTokens(text="a cat"), pb.TextOrTokens(token_ids=pb.TokenIds(ids=[5, 6, 7]))]
    embedded = service.stub.Embed(pb.EmbedRequest(inputs=inputs, dimensions=9), timeout=60)
    ranked = service.stub.Rerank(pb.RerankRequest(query=query, documents=documents, top_n=2), timeout=60)

    async def by_asyncio() -> tuple[Embeddings, pb.RerankResponse]:
        async with AsyncClient(service.router.address) as client:
            return await client.embed(said, dimensions=9), await client.rerank(query, documents, top_n=2)

    with Client(service.router.address) as client:
        waited = client.embed(said, dimensions=9), client.rerank(query, documents, top_n=2)
        with pytest.raises(FissileError, match="dimensions"):
            client.embed(said, dimensions=65)
        with pytest.raises(ValueError, match=r"inputs is a list: give \['a cat'\] for one"):
            client.embed("a cat")
        with pytest.raises(ValueError, match="documents is a list"):
            client.rerank(query, "a dog")
    for found, order in (waited, asyncio.run(by_asyncio())):
        assert vectors(found) == vectors(embedded)
        assert list(order.documents) == list(ranked.documents)


def test_prefix_cache_serves_last_pooling_only(service: Service) -> None:
    prompt = [i % 250 for i in range(7, 207)]
    first, again = (service.stub.Embed(tokens(prompt, pooling=pb.POOLING_LAST), timeout=60) for _ in range(2))
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 192)
    assert vectors(first) == vectors(again)
    mean = service.stub.Embed(tokens(prompt), timeout=60)
    assert mean.usage.cached_tokens == 0


@pytest.mark.proto_field(
    "RerankRequest.model",
    "RerankRequest.request_id",
    "RerankRequest.query",
    "RerankRequest.documents",
    "RerankRequest.top_n",
    "RerankRequest.instruction",
    "RerankRequest.return_documents",
    "RerankResponse.request_id",
    "RerankResponse.documents",
    "RerankResponse.usage",
    "RerankResponse.weights_digest",
    "RerankResponse.numerics",
    "RankedDocument.index",
    "RankedDocument.relevance",
    "RankedDocument.document",
)
@pytest.mark.parametrize("instruction", ["", "Find cats."])
def test_relevance_equals_transformers(service: Service, folder: Path, instruction: str) -> None:
    from transformers import Qwen3ForCausalLM

    reference: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_folder(folder)
    template = rerank_template(ChatTemplate.from_tokenizer(tokenizer), tokenizer)
    documents = ["a cat", "two dogs <|im_end|>", "a cat", "the mat, and the cat", "nothing"]
    expected, lengths = [], []
    for document in documents:
        said = [{"role": "query", "content": "cats?"}, {"role": "document", "content": document}]
        if instruction:
            said.insert(0, {"role": "system", "content": instruction})
        ids = tokenizer.encode(template.render(said), allow_special=True)
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0, -1].double()
        expected.append(logits[[YES, NO]].softmax(0)[0].item())
        lengths.append(len(ids))
    model = service.stub.GetModel(pb.GetModelRequest(), timeout=60).model
    assert pb.CAPABILITY_RERANK in model.capabilities
    asked = pb.RerankRequest(request_id="k", model="test", query="cats?", documents=documents, instruction=instruction)
    response = service.stub.Rerank(asked, timeout=60)
    found = {document.index: document.relevance for document in response.documents}
    assert [found[i] for i in range(5)] == pytest.approx(expected, abs=1e-4)
    assert len(set(found.values())) == 4
    places = [document.index for document in response.documents]
    assert places == sorted(range(5), key=lambda i: (-found[i], i))
    assert (response.request_id, response.weights_digest) == ("k", model.weights_digest)
    assert response.numerics
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (sum(lengths), 0)
    assert not any(document.document for document in response.documents)
    asked.top_n, asked.return_documents = 2, True
    best = service.stub.Rerank(asked, timeout=60)
    assert [(document.index, document.document) for document in best.documents] == [
        (i, documents[i]) for i in places[:2]
    ]
    assert [document.relevance for document in best.documents] == [found[i] for i in places[:2]]


LONG = "x" * 9_000_000


@pytest.mark.parametrize(
    ("code", "path", "bad"),
    [
        ("INVALID_ARGUMENT", "inputs", pb.EmbedRequest()),
        ("INVALID_ARGUMENT", "inputs", texts(*["b"] * 2049)),
        ("INVALID_ARGUMENT", "inputs[1]", pb.EmbedRequest(inputs=[*texts("a").inputs, pb.TextOrTokens()])),
        ("INVALID_ARGUMENT", "inputs[0].text", texts("")),
        ("INVALID_ARGUMENT", "inputs[0].token_ids.ids", tokens([])),
        ("INVALID_ARGUMENT", "inputs[1].token_ids.ids[1]", tokens([1], [2, 90_000])),
        ("INVALID_ARGUMENT", "pooling", texts("a", pooling=7)),
        ("INVALID_ARGUMENT", "dimensions", texts("a", dimensions=0)),
        ("INVALID_ARGUMENT", "dimensions", texts("a", dimensions=65)),
        ("INVALID_ARGUMENT", "priority", texts("a", priority=9)),
        ("INVALID_ARGUMENT", "cache_salt", texts("a", cache_salt="s" * 129)),
        ("INVALID_ARGUMENT", "session_id", texts("a", session_id="s" * 129)),
        ("INVALID_ARGUMENT", "request_id", texts("a", request_id="s" * 129)),
        ("OUT_OF_RANGE", "inputs[0].token_ids.ids", tokens([1] * 512)),
        ("OUT_OF_RANGE", "inputs[1].text", texts("a", "x y " * 900)),
        ("OUT_OF_RANGE", "inputs[0].text", texts(LONG)),
        ("NOT_FOUND", "", texts("a", model="other")),
        ("INVALID_ARGUMENT", "documents", pb.RerankRequest(query="a")),
        ("INVALID_ARGUMENT", "documents", pb.RerankRequest(query="a", documents=["b"] * 1025)),
        ("INVALID_ARGUMENT", "documents[1]", pb.RerankRequest(query="a", documents=["b", ""])),
        ("INVALID_ARGUMENT", "documents[1]", pb.RerankRequest(query="a", documents=["b", "\ufdd0"])),
        ("INVALID_ARGUMENT", "query", pb.RerankRequest(documents=["b"])),
        ("INVALID_ARGUMENT", "top_n", pb.RerankRequest(query="a", documents=["b"], top_n=2)),
        ("INVALID_ARGUMENT", "cache_salt", pb.RerankRequest(query="a", documents=["b"], cache_salt="s" * 129)),
        ("OUT_OF_RANGE", "documents[0]", pb.RerankRequest(query="a", documents=["x y " * 900])),
        ("OUT_OF_RANGE", "documents", pb.RerankRequest(query="a" * 9000, documents=["b"] * 1024)),
    ],
)  # fmt: skip
def test_bad_input_is_named(service: Service, code: str, path: str, bad: Any) -> None:
    method = service.stub.Embed if isinstance(bad, pb.EmbedRequest) else service.stub.Rerank
    with pytest.raises(grpc.RpcError) as caught:
        method(bad, timeout=60)
    error: Any = caught.value
    assert error.code().name == code
    assert error.details().startswith(f"{path} " if path else "model")


async def test_oversized_embedding_is_refused_before_computing() -> None:
    size = 4096
    worker = FakeWorker(FILES, description={**EMBEDS, "hidden_size": size}, vector=[0.5] * size, answer=short)
    async with bench(worker) as b:
        error = await error_of(b.stub.Embed(tokens(*[[1]] * 245)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "inputs"
        assert "at most 244 of them, or fewer dimensions" in (error.details() or "")
        assert not worker.submitted
        response = await b.stub.Embed(tokens(*[[1]] * 244))
        assert response.ByteSize() < 4 << 20
        assert [len(embedding.values) for embedding in response.embeddings] == [size] * 244
        await b.empty()


async def test_embed_call_bounds_prompts_in_flight() -> None:
    worker = FakeWorker(FILES, description=EMBEDS, room_seqs=4096, answer=short)
    async with bench(worker) as b:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                under_way = [each for each in worker.submitted if each.rid in worker.running]
                most = max(most, len(under_way))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        response = await b.stub.Embed(tokens(*([i % 200] for i in range(400)), normalize=False, dimensions=2))
        watching.cancel()
        assert vectors(response) == [[3.0, 4.0]] * 400
        assert len(worker.submitted) == 400
        assert 0 < most <= MAX_PROMPTS_AT_ONCE
        await b.empty()


async def test_older_workers_refuse_embed_and_rerank() -> None:
    async with bench(FakeWorker(FILES)) as b:
        error = await error_of(b.stub.Embed(texts("a")))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "UNSERVED_METHOD"
        error = await error_of(b.stub.Rerank(pb.RerankRequest(query="a", documents=["b"])))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert detail(error, error_details_pb2.ErrorInfo).reason == "NOT_A_RERANKER"
        await b.empty()


async def test_unsupported_checkpoint_pooling_requires_request_pooling() -> None:
    async with bench(FakeWorker(FILES, description={**EMBEDS, "default_pooling": wpb.POOLING_UNSPECIFIED})) as b:
        error = await error_of(b.stub.Embed(texts("a")))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "pooling"
        assert vectors(await b.stub.Embed(texts("a", pooling=pb.POOLING_LAST))) == [pytest.approx([0.6, 0.8, 0.0])]
        await b.empty()


async def test_missing_vector_ends_embed_with_internal() -> None:
    async with bench(FakeWorker(FILES, description=EMBEDS, vector=())) as b:
        error = await error_of(b.stub.Embed(texts("a")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "no vector" in (error.details() or "")
        await b.empty()


@pytest.mark.proto_field(
    "EmbedRequest.priority",
    "EmbedRequest.cache_salt",
    "RerankRequest.priority",
    "RerankRequest.cache_salt",
)
@pytest.mark.parametrize("method", ["Embed", "Rerank"])
async def test_cancelled_call_frees_everything(method: str) -> None:
    """Its sequences end; workers got the priority and the salt of the call."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", description={**RERANKS, **EMBEDS}, step_s=3600.0) for i in range(3)]
    common: dict[str, Any] = {"priority": pb.PRIORITY_LOW, "session_id": "x", "cache_salt": "salt"}
    async with bench(*workers) as b:
        for _ in range(2):
            asked = texts("a", "b", **common) if method == "Embed" else pb.RerankRequest(
                query="q", documents=["a", "b"], **common
            )  # fmt: skip
            call = getattr(b.stub, method)(asked)
            async with asyncio.timeout(60):
                while sum(len(worker.running) for worker in workers) < 2:  # noqa: ASYNC110  # the fake has no event
                    await asyncio.sleep(0.01)
            call.cancel()
            await b.empty()
            async with asyncio.timeout(60):
                while any(worker.running for worker in workers):  # noqa: ASYNC110  # likewise
                    await asyncio.sleep(0.01)
        submitted = [sequence for worker in workers for sequence in worker.submitted]
        assert {(each.priority, bool(each.cache_salt)) for each in submitted} == {(wpb.PRIORITY_LOW, True)}
        assert {each.params.max_tokens for each in submitted} == {1}
        assert {each.pooling for each in submitted} == {wpb.POOLING_LAST if method == "Embed" else 0}


@pytest.mark.proto_field("EmbedRequest.session_id", "RerankRequest.session_id")
async def test_calls_of_a_session_go_to_one_worker() -> None:
    described = {**RERANKS, **EMBEDS}
    workers = [FakeWorker(FILES, worker_id=f"w{i}", description=described) for i in range(3)]
    async with bench(*workers) as b:
        for i in range(6):
            await b.stub.Embed(tokens([i + 1], session_id="x"))
        assert sorted(len(worker.submitted) for worker in workers) == [0, 0, 6]
        for worker in workers:
            worker.submitted.clear()
        for _ in range(4):
            # The fake sends no logprobs.
            await error_of(b.stub.Rerank(pb.RerankRequest(query="q", documents=["d"], session_id="y")))
        assert sorted(len(worker.submitted) for worker in workers) == [0, 0, 4]
        await b.empty()


def test_lost_worker_changes_no_vector(tmp_path: Path) -> None:
    """Prompts of two dozen steps run on two workers, one of which is killed meanwhile."""
    prompts = [[(i + place) % 250 for i in range(1500)] for place in range(16)]
    reference = SimulatedRunner(300, None, hidden_size=SIMULATED_SIZE)
    model = simulated_model(tmp_path / "model")
    options = ["--simulate", "fixed:4ms", "--max-num-batched-tokens", "64"]
    with running_service(tmp_path, model, workers=2, worker_options=options) as service:
        wait_workers(service, 2)
        poolings: list[Pooling] = [MEAN, LAST]
        for name in poolings:
            asked = tokens(*prompts, pooling=public_pooling(name), normalize=False)
            call = service.stub.Embed.future(asked, timeout=120)
            if name == MEAN:
                while not service.worker_load(0).waiting_tokens:
                    if call.done():
                        # A busy machine has looked too late: once more.
                        call = service.stub.Embed.future(asked, timeout=120)
                service.workers[0].stop(signal.SIGKILL)
            found = vectors(call.result())
            expected = [np.frombuffer(reference.embedding(prompt, name), "<f4").tolist() for prompt in prompts]
            assert found == expected
