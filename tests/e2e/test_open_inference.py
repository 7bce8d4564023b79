"""The Open Inference Protocol on a real router: answers of Generate, streams, cancels, errors, log lines."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from fissile.peers.inference import open_inference_pb2 as oip
from fissile.peers.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from fissile.v1 import inference_pb2 as pb
from structlog.testing import LogCapture

from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.key_store import KeyStore
from router.scheduling.failover import FailoverOptions
from router.security import RouterSecurity
from tests.checkpoints import make_checkpoint
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, Bench, bench, collect, error_of, until
from tests.e2e.service import Service, running_service
from tests.mangled import Mangler

REQUEST = oip.ModelInferRequest
REFUSALS = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE", "NOT_FOUND", "PERMISSION_DENIED"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--prefix-caching", "--max-model-len", "512"]
    with running_service(tmp_path_factory.mktemp("service"), folder, worker_options=options) as service:
        yield service


def tensor(made: oip.ModelInferRequest, name: str, value: bool | str) -> None:
    """Adds a tensor in raw form."""
    is_flag = isinstance(value, bool)
    made.inputs.add(name=name, datatype="BOOL" if is_flag else "BYTES", shape=[1])
    data = b"" if isinstance(value, bool) else value.encode()
    made.raw_input_contents.append(bytes([value]) if isinstance(value, bool) else struct.pack("<I", len(data)) + data)


def infer(text: str, *, stream: bool | None = None, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    made = oip.ModelInferRequest(**fields)
    tensor(made, "text_input", text)
    if stream is not None:
        tensor(made, "stream", stream)
    tensor(made, "sampling_parameters", json.dumps({"max_tokens": 12, **(params or {})}))
    return made


def texts_of(response: oip.ModelInferResponse, name: str = "text_output") -> list[str]:
    """Elements of a raw BYTES tensor."""
    (i,) = [i for i, output in enumerate(response.outputs) if output.name == name]
    data, found = response.raw_output_contents[i], []
    while data:
        (length,) = struct.unpack_from("<I", data)
        found.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return found


def is_last(message: oip.ModelStreamInferResponse) -> bool:
    return message.infer_response.parameters["triton_final_response"].bool_param


def test_answers_are_those_of_generate(service: Service) -> None:
    stub = GRPCInferenceServiceStub(service.channel)
    given: tuple[dict[str, Any], ...] = ({"seed": 7, "n": 2}, {"seed": 7, "temperature": "0.5", "stop": ["e"]}, {})
    for params in given:
        asked = pb.GenerateRequest(text="the cat sat", request_id="same")
        for name, value in {"max_tokens": 12, **params}.items():
            if name == "stop":
                asked.sampling_params.stop_strings.extend(value)
            else:
                setattr(asked.sampling_params, name, float(value) if name == "temperature" else value)
        expected = service.stub.GenerateOnce(asked, timeout=60)
        texts = [answer.text for answer in expected.answers]
        reasons = [pb.FinishReason.Name(answer.finish.reason)[14:].lower() for answer in expected.answers]
        whole = stub.ModelInfer(infer("the cat sat", params=params, id="same"), timeout=60)
        assert (texts_of(whole), texts_of(whole, "finish_reason")) == (texts, reasons)
        assert (whole.id, whole.model_name, whole.model_version) == ("same", "test", "1")
        assert whole.parameters["seed"].string_param == expected.prompt_info.seed
        request = infer("the cat sat", params=params, id="same", stream=True)
        parts = [part.infer_response for part in stub.ModelStreamInfer(iter([request]), timeout=60)]
        joined = ["".join(pieces) for pieces in zip(*(texts_of(part) for part in parts), strict=True)]
        ends = ["".join(pieces) for pieces in zip(*(texts_of(part, "finish_reason") for part in parts), strict=True)]
        assert (joined, ends) == (texts, reasons)
    service.wait_idle()


def test_outputs_count_and_rate_the_tokens(service: Service) -> None:
    stub = GRPCInferenceServiceStub(service.channel)
    names = ("cumulative_logprob", "num_input_tokens", "num_output_tokens")
    asked = pb.GenerateRequest(text="the cat", output_options=pb.OutputOptions(logprobs=0))
    asked.sampling_params.max_tokens, asked.sampling_params.seed = 12, 3
    (answer,) = service.stub.GenerateOnce(asked, timeout=60).answers
    request = infer("the cat", params={"seed": 3}, outputs=[{"name": name} for name in names])
    whole = stub.ModelInfer(request, timeout=60)
    tensor(request, "stream", True)
    parts = [part.infer_response for part in stub.ModelStreamInfer(iter([request]), timeout=60)]
    raw = dict(zip(names, whole.raw_output_contents, strict=True))
    assert struct.unpack("<f", raw["cumulative_logprob"])[0] == pytest.approx(answer.finish.logprob, rel=1e-5)
    assert struct.unpack("<I", raw["num_input_tokens"])[0] == answer.finish.usage.prompt_tokens
    assert struct.unpack("<I", raw["num_output_tokens"])[0] == answer.finish.usage.completion_tokens
    assert [output.name for output in parts[0].outputs] == list(names)
    counted = sum(struct.unpack("<I", part.raw_output_contents[-1])[0] for part in parts)
    assert counted == answer.finish.usage.completion_tokens
    (total,) = struct.unpack("<f", parts[-1].raw_output_contents[0])
    assert total == pytest.approx(answer.finish.logprob, rel=1e-5)


def test_vectors_are_those_of_embed(service: Service) -> None:
    texts = ["a cat", "the dog sat"]
    embedded = service.stub.Embed(pb.EmbedRequest(inputs=[pb.TextOrTokens(text=text) for text in texts]), timeout=60)
    request = oip.ModelInferRequest()
    request.outputs.add(name="embedding")
    made = request.inputs.add(name="text_input", datatype="BYTES", shape=[2])
    made.contents.bytes_contents.extend(text.encode() for text in texts)
    response = GRPCInferenceServiceStub(service.channel).ModelInfer(request, timeout=60)
    numbers = list(response.outputs[0].contents.fp32_contents)
    assert list(response.outputs[0].shape) == [2, 64]
    assert numbers == [number for vector in embedded.embeddings for number in vector.values]


def test_metadata_and_readiness(service: Service) -> None:
    stub = GRPCInferenceServiceStub(service.channel)
    assert stub.ServerLive(oip.ServerLiveRequest(), timeout=60).live
    assert stub.ServerReady(oip.ServerReadyRequest(), timeout=60).ready
    assert stub.ModelReady(oip.ModelReadyRequest(name="test", version="1"), timeout=60).ready
    assert not stub.ModelReady(oip.ModelReadyRequest(name="other"), timeout=60).ready
    assert stub.ServerMetadata(oip.ServerMetadataRequest(), timeout=60).name == "fissile"
    described = stub.ModelMetadata(oip.ModelMetadataRequest(), timeout=60)
    assert (described.name, list(described.versions), described.platform) == ("test", ["1"], "fissile")
    assert described.outputs[-1].name == "embedding"
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelMetadata(oip.ModelMetadataRequest(name="other"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_mangled_requests_get_a_status_that_names_a_field(service: Service) -> None:
    stub, seen, problems = GRPCInferenceServiceStub(service.channel), Counter[str](), []
    served = {f"ModelInferRequest.{name}" for name in ("inputs", "raw_input_contents", "parameters", "model_version")}
    mangler = Mangler(random.Random(5), served)
    for i in range(240):
        message: Any = mangler.changed(infer("say", params={"max_tokens": 3})) if i % 4 else mangler.random(REQUEST)
        try:
            stub.ModelInfer(message, timeout=60)
            code = "OK"
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code().name
            if code not in REFUSALS or not failed.details():
                problems.append((message, code, failed.details()))
        seen[code] += 1
    assert not problems, problems[:3]
    assert min(seen["INVALID_ARGUMENT"], seen["UNIMPLEMENTED"]) > 5, seen
    stub.ModelInfer(infer("say"), timeout=60)
    service.wait_idle()


def stub_of(made: Bench) -> Any:
    return GRPCInferenceServiceStub(made.channel)


async def test_requests_of_a_stream_run_side_by_side_and_fail_alone(log: LogCapture) -> None:
    endless = {"max_tokens": 4000, "ignore_eos": True}
    async with bench() as made:
        call = stub_of(made).ModelStreamInfer(timeout=60)
        await call.write(infer("say", id="long", stream=True, params=endless))
        assert (await call.read()).infer_response.id == "long"
        # Two with one id, as load generators number them.
        for _ in range(2):
            await call.write(infer("say", id="short", params={"max_tokens": 3}))
        await call.write(infer("say", id="bad", params={"temperature": -1}))
        await call.write(infer("say", id="lost", model_name="nowhere"))
        ended: list[oip.ModelStreamInferResponse] = []
        while len(ended) < 4:
            message = await call.read()
            ended += [message] * is_last(message)
        found = sorted((message.infer_response.id, message.error_message.partition(":")[0]) for message in ended)
        assert found == [("bad", "INVALID_ARGUMENT"), ("lost", "NOT_FOUND"), ("short", ""), ("short", "")]
        bad = next(message for message in ended if message.infer_response.id == "bad")
        assert "parameters.temperature is -1" in bad.error_message
        call.cancel()
        await made.empty()
        await until(lambda: len(lines(log)) == 5)
    got = {line["request_id"].partition("-")[0]: line for line in lines(log)}
    statuses = {name: line["status"] for name, line in got.items()}
    assert statuses == {"long": "CANCELLED", "short": "OK", "bad": "INVALID_ARGUMENT", "lost": "NOT_FOUND"}
    assert got["short"]["completion_tokens"] == 3
    assert got["bad"]["fields"] == ["parameters.temperature"]


@pytest.fixture
def log() -> Iterator[LogCapture]:
    capture, before = LogCapture(), structlog.get_config()
    structlog.configure(processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0))
    yield capture
    structlog.configure(**before)


def lines(log: LogCapture) -> list[Any]:
    """Lines of requests; the call of a stream has none by itself."""
    return [line for line in log.entries if line["event"] == "request ended" and line["log_level"] == "info"]


async def test_cancelled_call_ends_its_sequences() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as made:
        whole = stub_of(made).ModelInfer(infer("say", params={"max_tokens": 4000, "ignore_eos": True}), timeout=60)
        streamed = stub_of(made).ModelStreamInfer(timeout=60)
        await streamed.write(infer("say", stream=True, params={"max_tokens": 4000, "ignore_eos": True}))
        await until(lambda: len(worker.running) == 2)
        whole.cancel()
        streamed.cancel()
        await made.empty()


async def test_operator_cancels_one_request_of_a_stream() -> None:
    async with bench() as made:
        call = stub_of(made).ModelStreamInfer(timeout=60)
        for name in ("one", "two"):
            await call.write(infer("say", id=name, stream=True, params={"max_tokens": 200, "ignore_eos": True}))
        await until(lambda: made.router.service.in_flight == 2)
        (chosen,) = [each for each in made.router.service.calls if each.request_id.startswith("one-")]
        assert chosen.method == "ModelStreamInfer"
        made.router.service.calls.cancel("", chosen.request_id)
        await call.done_writing()
        ends = {message.infer_response.id: message for message in await collect(call) if is_last(message)}
        assert ends["one"].error_message == "CANCELLED: an operator has ended this request"
        assert ends["two"].error_message == ""
        await made.empty()


async def test_lost_worker_ends_a_request_with_its_status() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.1)) as made:
        call = stub_of(made).ModelStreamInfer(timeout=60)
        await call.write(infer("say", id="x", stream=True, params={"max_tokens": 4000, "ignore_eos": True}))
        await call.read()
        await worker.stop()
        while not is_last(message := await call.read()):
            pass
        assert message.infer_response.parameters["status"].string_param == "ABORTED"


async def test_idle_stream_ends_with_the_router() -> None:
    async with bench() as made:
        call = stub_of(made).ModelStreamInfer(timeout=60)
        await call.write(infer("say", params={"max_tokens": 1}))
        assert is_last(await call.read())
        ended = asyncio.create_task(error_of(call))
        await made.router.stop()
        assert (await ended).code() is grpc.StatusCode.UNAVAILABLE


async def test_malformed_message_ends_the_stream() -> None:
    async with bench() as made:
        method: Any = made.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = method(timeout=60)
        await call.write(b"\xff")
        assert (await error_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_keys_tenants_and_deadlines_are_those_of_every_rpc() -> None:
    shown, kept = new_key("tester", "gold", [Role.INFER])
    security = RouterSecurity(access=KeyAccess(KeyStore(None, [kept.line()])))
    async with bench(security=security) as made:
        stub, bearer = stub_of(made), (("authorization", f"Bearer {shown}"),)
        assert (await error_of(stub.ModelInfer(infer("say")))).code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await error_of(stub.ModelStreamInfer())).code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.ModelStreamInfer(metadata=bearer, timeout=60)
        await call.write(infer("say", stream=True, params={"max_tokens": 4000, "ignore_eos": True}))
        await call.read()
        assert [each.tenant for each in made.router.service.calls] == ["gold"]
        call.cancel()
        high = infer("say")
        high.parameters["priority"].int64_param = 1
        error = await error_of(stub.ModelInfer(high, metadata=bearer))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        late = stub.ModelInfer(
            infer("say", params={"max_tokens": 4000, "ignore_eos": True}), metadata=bearer, timeout=1
        )
        assert (await error_of(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await made.empty()
