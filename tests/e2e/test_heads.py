"""Checkpoints without an output head through router and worker: vectors and relevance, and what they refuse by name."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.rpc import error_details_pb2

from common.cli.serve.first_question import next_steps
from common.config import Config
from common.params.pooling import LABELS
from common.wire.heads import CLASSIFIER, NO_HEAD
from examples.semantic_search import INSTRUCTION
from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, detail, error_of
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import CONFIG, simulated_model, wait_workers
from tests.e2e.test_command_line import example, fissile
from worker.llm_engine import LLMEngine
from worker.simulation.runner import SimulatedRunner

OPTIONS = ["--prefix-caching", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
DOCUMENTS = ["a cat", "two dogs <|im_end|>", "a cat", "the mat, and the cat", "nothing"]
PAIRED = {
    "features": ["embed"],
    "hidden_size": 3,
    "default_pooling": wpb.POOLING_LAST,
    "head": wpb.HEAD_CLASSIFIER,
    "num_labels": 1,
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decoder"), "llama", num_hidden_layers=2, head=NO_HEAD)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    return make_checkpoint(folder, "qwen3", num_hidden_layers=2, num_labels=1, head=CLASSIFIER)


@pytest.fixture(scope="module")
def embedder(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("service"), decoder, worker_options=OPTIONS) as service:
        yield service


@pytest.fixture(scope="module")
def reranker(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("service"), classifier, worker_options=OPTIONS) as service:
        yield service


def refusal(stub: Any, method: str, request: Any) -> tuple[str, str]:
    def call() -> None:
        answer = getattr(stub, method)(request, timeout=60)
        list(answer if method in ("Generate", "Chat") else ())

    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, detail(error, error_details_pb2.ErrorInfo).reason


GENERATE = pb.GenerateRequest(text="a", request_id="g", sampling_params=pb.SamplingParams(max_tokens=1))
CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a")])
SCORE = pb.ScoreRequest(continuations=[pb.TextOrTokens(text="a cat")])
RERANK = pb.RerankRequest(query="q", documents=["d"])


@pytest.mark.parametrize("kind", slow_but({"reranker"}, ["embedder", "reranker"]))
def test_generation_without_output_head_is_refused_by_name(kind: str, request: pytest.FixtureRequest) -> None:
    service: Service = request.getfixturevalue(kind)
    stub = service.stub
    asked: dict[str, Any] = {
        "Generate": GENERATE, "GenerateOnce": GENERATE, "Chat": CHAT, "ChatOnce": CHAT, "Score": SCORE
    }  # fmt: skip
    for method, one in asked.items():
        assert refusal(stub, method, one) == ("FAILED_PRECONDITION", "NO_OUTPUT_HEAD")
    model = stub.GetModel(pb.GetModelRequest(), timeout=60).model
    expected = [pb.CAPABILITY_TEXT, pb.CAPABILITY_EMBED, *([pb.CAPABILITY_RERANK] if kind == "reranker" else [])]
    assert list(model.capabilities) == expected
    # A worker asked without a router says it too.
    params = wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=1)
    with grpc.insecure_channel(service.workers[0].address) as channel:
        direct = wpb.GenerateRequest(request_id="r", token_ids=[1], params=params)
        assert refusal(WorkerServiceStub(channel), "Generate", direct) == ("FAILED_PRECONDITION", "NO_OUTPUT_HEAD")
    service.wait_idle()


@pytest.mark.slow
def test_decoder_without_head_embeds_like_library(embedder: Service, decoder: Path) -> None:
    said = ["the cat sat on the mat", "a"]
    library = LLMEngine(Config(model=str(decoder), dtype="float32", max_model_len=256, num_kvcache_blocks=64))
    asked = pb.EmbedRequest(inputs=[pb.TextOrTokens(text=text) for text in said])
    response = embedder.stub.Embed(asked, timeout=60)
    found = [list(embedding.values) for embedding in response.embeddings]
    assert found == [vector.tolist() for vector in library.embed(said)]
    assert refusal(embedder.stub, "Rerank", RERANK) == ("FAILED_PRECONDITION", "NOT_A_RERANKER")


@pytest.mark.slow
def test_texts_are_searched_by_meaning(embedder: Service, reranker: Service) -> None:
    """The example finds the nearest vectors and orders them by the reranker."""
    query, texts = "where is the cat?", ["the cat sat", "two dogs", "bread needs yeast", "nothing"]
    inputs = [pb.TextOrTokens(text=text) for text in (INSTRUCTION + query, *texts)]
    answer = embedder.stub.Embed(pb.EmbedRequest(inputs=inputs), timeout=60)
    wanted, *vectors = (np.array(embedding.values) for embedding in answer.embeddings)
    nearest = sorted(zip((float(wanted @ vector) for vector in vectors), texts, strict=True), reverse=True)[:2]
    routers = ["--router", embedder.router.address, "--top", "2"]
    shown = example("semantic_search.py", *routers, query, *texts)
    assert shown.splitlines() == [f"{score:.4f}  {text}" for score, text in nearest]
    asked = pb.RerankRequest(query=query, documents=[text for _, text in nearest], return_documents=True)
    ranked = reranker.stub.Rerank(asked, timeout=60).documents
    shown = example("semantic_search.py", *routers, "--rerank", reranker.router.address, query, *texts)
    assert shown.splitlines() == [f"{one.relevance:.4f}  {one.document}" for one in ranked]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_serve_asks_model_without_head_for_vector(kind: str, request: pytest.FixtureRequest) -> None:
    """`fissile serve` asks a first question that the model can answer, and names further calls that it supports."""
    folder: Path = request.getfixturevalue(kind)
    done = fissile("serve", "--model", str(folder), "--once", "--max-model-len", "64", "--kv-cache-memory", "16MiB")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "a vector of 64 numbers, " in done.stderr


def test_commands_match_model_capabilities(reranker: Service) -> None:
    capabilities = reranker.stub.GetModel(pb.GetModelRequest(), timeout=60).model.capabilities
    said = next_steps("h:1", "", capabilities)
    assert ("embed --address h:1" in said, "rerank --address h:1" in said, "generate" in said) == (True, True, False)
    assert "chat --address h:1" in next_steps("h:1")
    shown = fissile("models", "--address", reranker.router.address).stdout
    assert shown.splitlines()[1].split()[4] == "embed,rerank"
    asked = fissile("generate", "--address", reranker.router.address, "a")
    assert (asked.returncode, "its checkpoint has no output head" in asked.stderr) == (2, True)


def test_relevance_equals_cross_encoder(reranker: Service, classifier: Path) -> None:
    """The tokenizer pairs query and document, the classifier gives a number, and the logistic function makes it a
    probability."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reference: Any = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(classifier)
    expected, lengths = [], []
    for document in DOCUMENTS:
        # A special token in what a client sends is text here.
        ids = tokenizer("cats?", document, split_special_tokens=True).input_ids
        lengths.append(len(ids))
        with torch.inference_mode():
            expected.append(reference(torch.tensor([ids])).logits[0, 0].double().sigmoid().item())
    response = reranker.stub.Rerank(pb.RerankRequest(query="cats?", documents=DOCUMENTS), timeout=60)
    found = {document.index: document.relevance for document in response.documents}
    assert [found[i] for i in range(5)] == pytest.approx(expected, abs=1e-4)
    assert len(set(found.values())) == 4
    assert [one.index for one in response.documents] == sorted(range(5), key=lambda i: (-found[i], i))
    assert response.usage.prompt_tokens == sum(lengths)
    assert response.numerics
    again = reranker.stub.Rerank(pb.RerankRequest(query="cats?", documents=DOCUMENTS[::-1]), timeout=60)
    assert {4 - document.index: document.relevance for document in again.documents} == found


def test_long_rerank_query_is_cached_for_all_documents(reranker: Service) -> None:
    asked = pb.RerankRequest(query="which cat sat on which mat? " * 9, documents=DOCUMENTS)
    first, again = (reranker.stub.Rerank(asked, timeout=60) for _ in range(2))
    assert again.usage.cached_tokens > first.usage.cached_tokens
    assert list(again.documents) == list(first.documents)


@pytest.mark.parametrize(
    ("code", "path", "bad"),
    [
        ("INVALID_ARGUMENT", "instruction", pb.RerankRequest(query="a", documents=["b"], instruction="i")),
        ("OUT_OF_RANGE", "documents[1]", pb.RerankRequest(query="a", documents=["b", "x y " * 300])),
        ("OUT_OF_RANGE", "query", pb.RerankRequest(query="x y " * 300, documents=["b"])),
    ],
)
def test_bad_input_is_named(reranker: Service, code: str, path: str, bad: pb.RerankRequest) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        reranker.stub.Rerank(bad, timeout=60)
    error: Any = caught.value
    assert (error.code().name, error.details().startswith(f"{path} ")) == (code, True)


async def test_rerank_template_with_roles_makes_prompts() -> None:
    template = (
        "{% for m in messages if m['role'] == 'query' %}Q:{{ m['content'] }}{% endfor %}"
        "{% for m in messages if m['role'] == 'document' %} D:{{ m['content'] }}{% endfor %}"
    )
    worker = FakeWorker({**FILES, "chat_template.jinja": template.encode()}, description=PAIRED, vector=[0.5])
    async with bench(worker) as b:
        response = await b.stub.Rerank(pb.RerankRequest(query="a", documents=["b"]))
        assert response.documents[0].relevance == pytest.approx(1 / (1 + np.exp(-0.5)))
        (sequence,) = worker.submitted
        assert sequence.pooling == wpb.POOLING_LABELS
        tokenized = await b.stub.Detokenize(pb.DetokenizeRequest(token_ids=sequence.token_ids))
        assert tokenized.text == "Q:a D:b"
        await b.empty()


async def test_classifier_of_several_labels_refuses_rerank() -> None:
    async with bench(FakeWorker(FILES, description={**PAIRED, "num_labels": 3})) as b:
        error = await error_of(b.stub.Rerank(RERANK))
        assert detail(error, error_details_pb2.ErrorInfo).reason == "NOT_A_RERANKER"
        assert "its classifier has 3 labels, where a reranker's has one" in (error.details() or "")
        model = (await b.stub.GetModel(pb.GetModelRequest())).model
        assert list(model.capabilities) == [pb.CAPABILITY_TEXT, pb.CAPABILITY_EMBED]
        await b.empty()


async def test_model_with_unknown_head_refuses_to_generate() -> None:
    async with bench(FakeWorker(FILES, description={**PAIRED, "head": 9})) as b:
        error = await error_of(b.stub.GenerateOnce(GENERATE))
        assert detail(error, error_details_pb2.ErrorInfo).reason == "NO_OUTPUT_HEAD"
        await b.empty()


def test_lost_worker_changes_no_relevance(tmp_path: Path) -> None:
    """Prompts of many steps run on two workers, one of which is killed meanwhile."""
    labelled = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    model = simulated_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({**CONFIG, **labelled}))
    reference = SimulatedRunner(300, None, hidden_size=CONFIG["hidden_size"], num_labels=1)  # type: ignore[arg-type]
    documents = ["".join(chr(97 + (i + place) % 26) for i in range(1200)) for place in range(12)]
    options = ["--simulate", "fixed:4ms", "--max-num-batched-tokens", "64"]
    with running_service(tmp_path, model, workers=2, worker_options=options) as service:
        wait_workers(service, 2)
        asked = pb.RerankRequest(query="q", documents=documents)
        call = service.stub.Rerank.future(asked, timeout=120)
        while not service.worker_load(0).waiting_tokens:
            if call.done():
                # A busy machine has looked too late: once more, with nothing of it in a cache.
                asked.query += "q"
                call = service.stub.Rerank.future(asked, timeout=120)
        service.workers[0].stop(signal.SIGKILL)
        found = {one.index: one.relevance for one in call.result().documents}
        for i, document in enumerate(documents):
            parts = (service.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids for text in (asked.query, document))
            ids = [token for part in parts for token in part]
            (label,) = np.frombuffer(reference.embedding(ids, LABELS), "<f4").tolist()
            assert found[i] == pytest.approx(1 / (1 + np.exp(-label)), abs=1e-7)
