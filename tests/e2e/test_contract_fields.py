"""Fields of fissile.v1 that no other test is about: what each asks for, and what each says."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.text.tokenizer import files_sha256
from common.wire.block_hash import hash_chain, salt_root
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, TOKENIZER, bench, collect, error_of, request
from tests.unit.router.support import EOS, tokenizer_files

SAID = pb.ChatMessage(role="user", content="hi")


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[SAID], **fields)


@pytest.mark.proto_field(
    "PromptInfo.queue_time",
    "PromptInfo.weights_digest",
    "PromptInfo.numerics",
    "Usage.cached_tokens",
    "Finish.weights_digest",
)
async def test_answer_names_its_worker_and_weights() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        parts = await collect(b.stub.Generate(request(params={"max_tokens": 64})))
        info, finish = parts[0].prompt_info, parts[-1].finish
        assert (info.weights_digest, info.numerics, finish.weights_digest) == ("ww", "nn", "ww")
        assert finish.usage.cached_tokens == info.cached_tokens == 3
        assert info.HasField("queue_time")
        assert info.queue_time == finish.timings.queue


@pytest.mark.proto_field("StopDetail.stop_token_id", "StopDetail.stop_token_sequence")
async def test_answer_names_its_stop_condition() -> None:
    worker = FakeWorker(FILES, answer=letters)
    async with bench(worker) as b:
        worker.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_STOP_TOKEN, stop_token_id=7)
        finish = (await collect(b.stub.Generate(request(params={"stop_token_ids": [7]}))))[-1].finish
        assert (finish.reason, finish.stop.stop_token_id) == (pb.FINISH_REASON_STOP, 7)
        worker.end_with = wpb.SequenceEnd(
            reason=wpb.END_REASON_STOP_SEQUENCE, stop_token_sequence=wpb.TokenIds(ids=[3])
        )
        sequences = [pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])]
        asked = request(params={"stop_token_sequences": sequences})
        finish = (await collect(b.stub.Generate(asked)))[-1].finish
        assert list(finish.stop.stop_token_sequence.ids) == [3]
        await b.empty()


@pytest.mark.proto_field(
    "ChatRequest.model",
    "ChatRequest.request_id",
    "ChatRequest.sampling_params",
    "ChatRequest.priority",
    "ChatRequest.cache_salt",
    "ChatRequest.output_options",
    "ChatResponse.request_id",
    "ChatResponse.index",
    "ChatResponse.delta",
    "ChatDelta.content",
    "ChatResponse.token_ids",
    "ChatResponse.prompt_info",
    "ChatResponse.finish",
    "GenerateRequest.model",
)
async def test_chat_accepts_output_options_of_generate() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        asked = chat(
            model="m",
            request_id="r",
            sampling_params=pb.SamplingParams(top_k=7, n=2),
            priority=pb.PRIORITY_HIGH,
            cache_salt="salt",
            output_options=pb.OutputOptions(return_token_ids=True),
        )
        parts = await collect(b.stub.Chat(asked))
        for index in range(2):
            mine = [part for part in parts if part.index == index]
            assert {part.request_id for part in mine} == {"r"}
            assert "".join(part.delta.content for part in mine) == "hello"
            assert [i for part in mine for i in part.token_ids] == [*TOKENIZER.encode("hello"), EOS]
            assert mine[-1].finish.usage.completion_tokens == len(TOKENIZER.encode("hello")) + 1
        submitted = b.workers[0].submitted[0]
        assert parts[0].prompt_info.prompt_tokens == submitted.prompt_len
        assert (submitted.params.top_k, submitted.priority, submitted.cache_salt) == (7, wpb.PRIORITY_HIGH, b"salt")
        root = salt_root(b"ww", cache_salt=b"salt")
        prompt = list(submitted.token_ids)
        assert submitted.chain_hash == (hash_chain(prompt, 16, root=root) or [0])[-1]
        for other in (b.stub.Chat(chat(model="x")), b.stub.Generate(request(model="x"))):
            assert (await error_of(other)).code() is grpc.StatusCode.NOT_FOUND
        assert (await collect(b.stub.Generate(request(model="m"))))[-1].HasField("finish")


@pytest.mark.proto_field("ChatRequest.resume")
async def test_broken_chat_resumes() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        asked = chat(request_id="r", sampling_params=pb.SamplingParams(max_tokens=12))
        whole = "".join(part.delta.content for part in await collect(b.stub.Chat(asked)))
        asked.resume.answers.add().text.CopyFrom(
            pb.TextDigest(bytes=5, sha256=hashlib.sha256(whole[:5].encode()).digest())
        )
        assert "".join(part.delta.content for part in await collect(b.stub.Chat(asked))) == whole[5:]


@pytest.mark.proto_field("GenerateRequest.session_id", "ChatRequest.session_id")
async def test_session_keeps_its_weights() -> None:
    workers = [
        FakeWorker(FILES, worker_id=f"w{i}", answer=short, description={"weights_digest": f"x{i}"}) for i in (0, 1)
    ]
    async with bench(*workers) as b:
        for session in ("s", ""):
            seen = set[str]()
            for i in range(8):
                given = {"request_id": f"r{i}", "session_id": session}
                seen.add((await collect(b.stub.Generate(request(**given))))[-1].finish.weights_digest)
                seen.add((await collect(b.stub.Chat(chat(**given))))[-1].finish.weights_digest)
            assert len(seen) == (1 if session else 2)


@pytest.mark.proto_field(
    "GenerateOnceResponse.request_id",
    "GenerateOnceResponse.prompt_info",
    "GenerateOnceResponse.answers",
    "GeneratedText.index",
    "GeneratedText.text",
    "GeneratedText.token_ids",
    "GeneratedText.finish",
    "ChatOnceResponse.request_id",
    "ChatOnceResponse.prompt_info",
    "ChatOnceResponse.answers",
    "ChatAnswer.index",
    "ChatAnswer.message",
    "ChatAnswer.token_ids",
    "ChatAnswer.finish",
    "ChatMessage.role",
    "ChatMessage.content",
)
async def test_answer_in_one_message_equals_stream() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        params = {"max_tokens": 64, "n": 2}
        plain, said = request(request_id="r", params=params), chat(request_id="r")
        said.sampling_params.CopyFrom(plain.sampling_params)
        said.output_options.return_token_ids = True
        generated: Any = await b.stub.GenerateOnce(plain)
        chatted: Any = await b.stub.ChatOnce(said)
        streamed = [(await collect(b.stub.Generate(plain)))[0], (await collect(b.stub.Chat(said)))[0]]
        for whole, info in zip((generated, chatted), [part.prompt_info for part in streamed], strict=True):
            assert whole.request_id == "r"
            assert whole.prompt_info.prompt_tokens == info.prompt_tokens > 0
            assert whole.prompt_info.seed == info.seed
            assert [answer.index for answer in whole.answers] == [0, 1]
            for answer in whole.answers:
                assert list(answer.token_ids) == [*TOKENIZER.encode("hello"), EOS]
                assert answer.finish.stop.eos_token_id == EOS
        assert [answer.text for answer in generated.answers] == ["hello"] * 2
        messages = [(answer.message.role, answer.message.content) for answer in chatted.answers]
        assert messages == [("assistant", "hello")] * 2


@pytest.mark.proto_field(
    "ListModelsRequest.page_size",
    "ListModelsRequest.page_token",
    "ListModelsResponse.models",
    "ListModelsResponse.next_page_token",
    "GetModelRequest.model",
    "GetModelResponse.model",
    "Model.name",
    "Model.architecture",
    "Model.max_model_len",
    "Model.vocab_size",
    "Model.capabilities",
    "Model.tokenizer_sha256",
    "Model.weights_digest",
    "Model.ready_workers",
    "Model.default_sampling_params",
    "Model.eos_token_ids",
    "Model.template_sha256",
)
async def test_models_are_described_and_paged() -> None:
    files = tokenizer_files(generation={"temperature": 0.5, "do_sample": True})
    workers = [
        FakeWorker(files, worker_id=f"w{i}", description={"model": f"m{i}", "eos_token_ids": [3, EOS]})
        for i in range(2)
    ]
    async with bench(*workers) as b:
        page = await b.stub.ListModels(pb.ListModelsRequest(page_size=1))
        rest = await b.stub.ListModels(pb.ListModelsRequest(page_size=1, page_token=page.next_page_token))
        assert [[model.name for model in one.models] for one in (page, rest)] == [["m0"], ["m1"]]
        assert rest.next_page_token == ""
        model = (await b.stub.GetModel(pb.GetModelRequest(model="m1"))).model
        assert model == rest.models[0]
        described = (model.architecture, model.max_model_len, model.vocab_size, model.weights_digest)
        assert described == ("Qwen3ForCausalLM", 4096, 300, "ww")
        assert (model.tokenizer_sha256, model.ready_workers) == (files_sha256(files), 1)
        assert pb.CAPABILITY_CHAT in model.capabilities
        assert (model.default_sampling_params.temperature, list(model.eos_token_ids)) == (0.5, [3, EOS])
        assert model.template_sha256 == hashlib.sha256(files["chat_template.jinja"]).hexdigest()


@pytest.mark.proto_field(
    "TokenizeRequest.model",
    "TokenizeRequest.text",
    "TokenizeResponse.token_ids",
    "TokenizeResponse.tokens",
    "DetokenizeRequest.model",
    "DetokenizeRequest.token_ids",
    "DetokenizeRequest.keep_special_tokens",
    "DetokenizeResponse.text",
    "CountTokensRequest.generate",
    "CountTokensRequest.chat",
    "CountTokensResponse.prompt_tokens",
    "CountTokensResponse.max_model_len",
    "RenderPromptRequest.chat",
    "RenderPromptResponse.text",
    "RenderPromptResponse.token_ids",
)
async def test_text_calls_encode_decode_render_and_count() -> None:
    async with bench() as b:
        made = await b.stub.Tokenize(pb.TokenizeRequest(model="m", text="lo x"))
        assert list(made.token_ids) == TOKENIZER.encode("lo x")
        assert made.tokens[0] == "lo"
        ids = [*made.token_ids, EOS]
        for keep, text in ((False, "lo x"), (True, "lo x<|end|>")):
            asked = pb.DetokenizeRequest(model="m", token_ids=ids, keep_special_tokens=keep)
            assert (await b.stub.Detokenize(asked)).text == text
        rendered = await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=chat()))
        assert TOKENIZER.decode(list(rendered.token_ids), skip_special=False) == rendered.text
        assert "hi" in rendered.text
        for counted, tokens in (
            (pb.CountTokensRequest(chat=chat()), len(rendered.token_ids)),
            (pb.CountTokensRequest(generate=request("lo x")), len(made.token_ids)),
        ):
            answer = await b.stub.CountTokens(counted)
            assert (answer.prompt_tokens, answer.max_model_len) == (tokens, 4096)
        for refused in (
            b.stub.Tokenize(pb.TokenizeRequest(model="x", text="lo")),
            b.stub.Detokenize(pb.DetokenizeRequest(model="x", token_ids=[1])),
        ):
            assert (await error_of(refused)).code() is grpc.StatusCode.NOT_FOUND
