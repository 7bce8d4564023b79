"""Completions, logprobs, embeddings, reranking, models and tokens over HTTP, by the `openai` package."""

from __future__ import annotations

import base64
import json
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fissile.client import AsyncClient
from fissile.v1 import inference_pb2 as pb

from common.rpc.tls import ServerTls
from router.security import RouterSecurity
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import HttpBench, checked, facade_of
from tests.e2e.router_bench import FILES, TOKENIZER, Bench, bench, until
from tests.e2e.secure import Pki
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import OPTIONS, simulated_model
from tests.e2e.test_admission import Keys
from tests.e2e.test_embed import EMBEDS

SAY: Any = {"model": "m", "prompt": "say", "max_tokens": 6}


@pytest.fixture
async def served() -> AsyncIterator[tuple[Bench, HttpBench]]:
    async with bench(FakeWorker(FILES)) as router, facade_of([router.router.server.address]) as http:
        yield router, http


@pytest.mark.client("openai", "completions, whole and streamed, async")
async def test_completion_stream_and_whole_are_equal(served: tuple[Bench, HttpBench]) -> None:
    create = served[1].openai.completions.create
    whole = checked(await create(**SAY))
    chunks = [checked(chunk) async for chunk in await create(**SAY, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == "hijklm"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len(checked(await create(model="m", prompt="say")).choices[0].text) == 16


@pytest.mark.parametrize("prompt", ["say", ["say", "hi"], TOKENIZER.encode("say"), [TOKENIZER.encode("say"), [5, 6]]])
@pytest.mark.client("openai", "completions of texts and token ids")
async def test_prompt_is_a_text_texts_or_token_ids(served: tuple[Bench, HttpBench], prompt: Any) -> None:
    router, http = served
    whole = checked(await http.openai.completions.create(**SAY | {"prompt": prompt, "n": 2}))
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    assert [choice.index for choice in whole.choices] == [*range(2 * len(several))]
    wanted = [TOKENIZER.encode(each) if isinstance(each, str) else each for each in several]
    assert [*{tuple(one.token_ids) for one in router.workers[0].submitted}] == [*{tuple(ids) for ids in wanted}]
    stream = await http.openai.completions.create(**SAY | {"prompt": prompt, "n": 2}, stream=True)
    texts = ["" for _ in whole.choices]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_prompt_token_ids_are_an_input_and_an_output(served: tuple[Bench, HttpBench]) -> None:
    body = {"model": "m", "prompt_token_ids": [5, 6, 7], "max_tokens": 3, "return_token_ids": True, "echo": True}
    choice = (await served[1].http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["token_ids"] == [5, 6, 7, *TOKENIZER.encode("hij")]


@pytest.mark.client("openai", "embeddings, as numbers and base64")
async def test_embeddings_as_numbers_and_base64_are_equal() -> None:
    """Surprise 16: OpenAI's package asks for base64 by default."""
    async with bench(FakeWorker(FILES, description=EMBEDS)) as b, facade_of([b.router.server.address]) as http:
        create = http.openai.embeddings.create
        numbers = checked(await create(model="m", input=["a", "b"], encoding_format="float"))
        packed = checked(await create(model="m", input=["a", "b"]))
        assert [each.embedding for each in numbers.data] == [each.embedding for each in packed.data]
        assert numbers.data[1].embedding == pytest.approx([0.6, 0.8, 0.0])
        assert (numbers.data[1].index, numbers.usage.prompt_tokens) == (1, 2)
        response = await http.http.post("/v1/embeddings", json={"input": [5, 6], "encoding_format": "base64"})
        vector = struct.unpack("<3f", base64.b64decode(response.json()["data"][0]["embedding"]))
        assert vector == pytest.approx((0.6, 0.8, 0.0))


@pytest.mark.client("openai", "API keys")
async def test_key_of_the_caller_goes_to_the_router() -> None:
    keys = Keys(plain="")
    async with bench(FakeWorker(FILES), security=keys.security, start=False) as b:
        await b.ready()
        async with facade_of([b.router.server.address]) as http:
            with pytest.raises(openai.AuthenticationError) as caught:
                await http.openai.completions.create(**SAY)
            assert caught.value.code == "invalid_api_key"
            known = http.openai.with_options(api_key=keys.secret("plain"))
            assert (await known.completions.create(**SAY)).choices[0].text == "hijklm"
            assert (await known.models.list()).data[0].id == "m"
            assert (await http.http.get("/health")).status_code == 200
        async with facade_of([b.router.server.address], api_key=keys.secret("plain")) as http:
            response = await http.http.post("/v1/completions", json=SAY)
            assert response.status_code == 200


async def test_pages_of_named_origins_may_call() -> None:
    async with bench() as b, facade_of([b.router.server.address], origins=["https://chat.test"]) as http:
        asked = {"origin": "https://chat.test", "access-control-request-method": "POST"}
        allowed = await http.http.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.test"
        other = await http.http.options("/v1/completions", headers=asked | {"origin": "https://other.test"})
        assert "access-control-allow-origin" not in other.headers


async def test_tls_on_both_hops(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    tls = ServerTls(pki.router.cert, pki.router.key)
    connection = {"tls_ca": pki.servers.cert}
    async with bench(security=RouterSecurity(tls=tls), start=False) as b:
        await until(lambda: b.ready_workers() == 1)
        async with facade_of([b.router.server.address], tls=tls, connection=connection) as http:
            context = ssl.create_default_context(cafile=pki.servers.cert)
            async with httpx2.AsyncClient(
                base_url=f"https://{http.facade.address}", verify=context, timeout=60.0
            ) as client:
                response = await client.post("/v1/completions", json=SAY)
                assert response.json()["choices"][0]["text"] == "hijklm"


@pytest.mark.client("openai", "models")
async def test_models_have_the_fields_of_openai_and_vllm(served: tuple[Bench, HttpBench]) -> None:
    """Surprise 18."""
    _, http = served
    models = [checked(model) async for model in http.openai.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [("m", "model", "fissile")]
    assert (models[0].max_model_len, models[0].root, models[0].parent) == (4096, "m", None)
    assert checked(await http.openai.models.retrieve("m")) == models[0]


async def test_tokenize_and_detokenize_are_inverse(served: tuple[Bench, HttpBench]) -> None:
    http = served[1].http
    found = (await http.post("/tokenize", json={"model": "m", "prompt": "say é", "return_token_strs": True})).json()
    assert found["tokens"] == TOKENIZER.encode("say é")
    assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (6, 4096, 6)
    assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json() == {"prompt": "say é"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    whole = (await http.post("/v1/chat/completions", json=chat | {"max_tokens": 1})).json()
    assert (await http.post("/tokenize", json=chat)).json()["count"] == whole["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("simulated")
    with running_service(folder, simulated_model(folder / "model"), worker_options=OPTIONS) as service:
        yield service


@pytest.mark.client("openai", "logprobs of chat completions, whole and streamed")
async def test_chat_logprobs_are_those_of_the_router(simulated: Service) -> None:
    """Surprise 8: logprobs without top_logprobs, and bytes."""
    ask: Any = {"model": "test", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 12}
    async with facade_of([simulated.router.address]) as http, AsyncClient(simulated.router.address) as client:
        for top in (None, 2):
            more: Any = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
            result = await client.chat("hi", seed=3, max_tokens=12, logprobs=top or 0, token_bytes=True)
            whole = checked(await http.openai.chat.completions.create(**ask | more))
            content = whole.choices[0].logprobs.content
            entries = result.answers[0].logprobs
            assert [(each.bytes, len(each.top_logprobs)) for each in content] == [
                ([*entry.token_bytes], top or 0) for entry in entries
            ]
            assert [each.logprob for each in content] == pytest.approx([entry.logprob for entry in entries])
            assert [each.token for each in content] == [e.token_bytes.decode("utf-8", "replace") for e in entries]
            stream = await http.openai.chat.completions.create(**ask | more, stream=True)
            chunks = [checked(chunk) async for chunk in stream]
            streamed = [each for chunk in chunks if (found := chunk.choices[0].logprobs) for each in found.content]
            assert streamed == content


@pytest.mark.client("openai", "logprobs of completions with `echo`")
async def test_completion_logprobs_with_echo_cover_the_prompt(simulated: Service) -> None:
    """What `lm-eval` reads for log likelihoods."""
    prompt = TOKENIZER.encode("say hello")
    ask: Any = {"model": "test", "prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1}
    async with facade_of([simulated.router.address]) as http, AsyncClient(simulated.router.address) as client:
        choice = checked(await http.openai.completions.create(**ask)).choices[0]
        found = choice.logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(prompt) + 1
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert "".join(found.tokens[: len(prompt)]) == "say hello"
        assert found.text_offset[: len(prompt)] == [*range(len(prompt))]
        score = await client.score([prompt[3:]], prompt[:3], return_tokens=True)
        assert found.token_logprobs[3:-1] == pytest.approx([entry.logprob for entry in score.scores[0].logprobs])
        (chunk, *_) = [checked(each) async for each in await http.openai.completions.create(**ask, stream=True)]
        assert chunk.choices[0].logprobs.tokens[: len(prompt)] == found.tokens[: len(prompt)]


async def test_random_requests_have_the_text_of_grpc(simulated: Service) -> None:
    async with facade_of([simulated.router.address]) as http, AsyncClient(simulated.router.address) as client:
        for seed in range(20):
            prompt = [(7 * seed + i) % 256 for i in range(1 + seed)]
            wanted = await client.generate(prompt, seed=seed, max_tokens=8, temperature=0.9, ignore_eos=True)
            more: Any = {"seed": seed, "max_tokens": 8, "temperature": 0.9, "extra_body": {"ignore_eos": True}}
            answer = await http.openai.completions.create(model="test", prompt=prompt, **more)
            assert answer.choices[0].text == wanted.text


@pytest.mark.parametrize("n", [1, 3])
async def test_best_of_is_that_of_generate_once(simulated: Service, n: int) -> None:
    request = pb.GenerateRequest(text="say hello")
    params: Any = {"seed": 3, "max_tokens": 12, "temperature": 1.2, "n": n}
    request.sampling_params.MergeFrom(pb.SamplingParams(best_of=9, **params))
    wanted = simulated.stub.GenerateOnce(request, timeout=60).answers
    async with facade_of([simulated.router.address]) as http:
        create = http.openai.completions.create
        found = checked(await create(model="test", prompt="say hello", best_of=9, **params))
        assert [(each.index, each.text, each.logprobs) for each in found.choices] == [
            (place, each.text, None) for place, each in enumerate(wanted)
        ]
        # All answers were generated.
        assert found.usage.completion_tokens == 9 * 12
        for more in ({"best_of": 9, "stream": True}, {"best_of": n - 1}, {"best_of": 65}):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model="test", prompt="say hello", **params | more)
            assert caught.value.param == "best_of"
        body = {"messages": [{"role": "user", "content": "hi"}], "best_of": 9, "logprobs": True, **params}
        said = (await http.http.post("/v1/chat/completions", json=body)).json()["choices"]
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.sampling_params.CopyFrom(request.sampling_params)
    expected = simulated.stub.ChatOnce(chat, timeout=60).answers
    assert [each["message"]["content"] for each in said] == [each.message.content for each in expected]
    assert all(len(each["logprobs"]["content"]) == 12 for each in said)


async def test_tokens_are_named_by_their_ids_on_request(simulated: Service) -> None:
    """Surprise 19: callers who count in ids ask for `token_id:N` in place of texts."""
    more: Any = {"model": "test", "seed": 3, "max_tokens": 12, "return_token_ids": True}
    more |= {"return_tokens_as_token_ids": True, "n": 2}
    async with facade_of([simulated.router.address]) as http:
        chat: Any = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
        for choice in (await http.http.post("/v1/chat/completions", json=chat | more)).json()["choices"]:
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in choice["token_ids"]]
            assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
        text: Any = {"prompt": "say", "logprobs": 1}
        for choice in (await http.http.post("/v1/completions", json=text | more)).json()["choices"]:
            names = [f"token_id:{each}" for each in choice["token_ids"]]
            assert choice["logprobs"]["tokens"] == names
            assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))


async def test_token_ids_in_and_out_are_those_of_generate(simulated: Service) -> None:
    """vLLM's /inference/v1/generate, which trainers call."""
    prompt = TOKENIZER.encode("say hello")
    params: Any = {"seed": 3, "max_tokens": 12, "temperature": 0.9, "n": 2}
    body: Any = {"token_ids": prompt, "sampling_params": {**params, "logprobs": 1, "prompt_logprobs": 0}}
    body["sampling_params"]["detokenize"] = False
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    request.sampling_params.MergeFrom(pb.SamplingParams(**params))
    request.output_options.MergeFrom(pb.OutputOptions(return_token_ids=True, logprobs=1, prompt_logprobs=0))
    wanted = simulated.stub.GenerateOnce(request, timeout=60)
    async with facade_of([simulated.router.address]) as http:
        whole = (await http.http.post("/inference/v1/generate", json=body)).json()
        assert [choice["token_ids"] for choice in whole["choices"]] == [[*each.token_ids] for each in wanted.answers]
        for choice, each in zip(whole["choices"], wanted.answers, strict=True):
            names, found = zip(*logprobs_of(choice), strict=True)
            assert [*names] == [f"token_id:{entry.token_id}" for entry in each.logprobs]
            assert found == pytest.approx([entry.logprob for entry in each.logprobs])
        first, *others = whole["prompt_logprobs"]
        assert first is None
        assert [each[str(token)]["logprob"] for token, each in zip(prompt[1:], others, strict=True)] == pytest.approx(
            [entry.logprob for entry in wanted.prompt_logprobs]
        )
        streamed: dict[int, Any] = {0: ([], []), 1: ([], [])}
        async with http.http.stream("POST", "/inference/v1/generate", json=body | {"stream": True}) as response:
            *lines, done = [line[6:] async for line in response.aiter_lines() if line]
        assert done == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
        for choice in (chunk["choices"][0] for chunk in chunks):
            streamed[choice["index"]][0].extend(choice["token_ids"])
            streamed[choice["index"]][1].extend(logprobs_of(choice))
        assert streamed == {each["index"]: (each["token_ids"], logprobs_of(each)) for each in whole["choices"]}
        for more, param in [
            ({"sampling_params": {"top_p": 7}}, "sampling_params.top_p"),
            ({"sampling_params": {"horse": 1}}, "sampling_params.horse"),
            ({"sampling_params": {"extra_args": {}}}, "sampling_params.extra_args"),
            ({"token_ids": [1 << 31]}, "token_ids"),
            ({"priority": 3}, "priority"),
        ]:
            refused = await http.http.post("/inference/v1/generate", json=body | more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def logprobs_of(choice: Any) -> list[tuple[str, float]]:
    return [(entry["token"], entry["logprob"]) for entry in (choice["logprobs"] or {"content": ()})["content"]]
