"""The client library against real routers: answers, errors, and streams that outlive the router that they began at."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import click
import grpc
import pytest
from fissile.client import AsyncClient, Client, Delta, Finished, FissileError, Stream
from fissile.client.arguments import OutputArguments
from fissile.client.errors import error_of
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.client.generate import generate as generate_command
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, TOKENIZER, Bench, bench, until
from tests.e2e.service import REPOSITORY, Process, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model

TOKENS = 300


@asynccontextmanager
async def client_of(b: Bench, **options: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(b.router.server.address, **options) as client:
        yield client


async def test_answers_and_events() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b, client_of(b) as client:
        result = await client.chat("hi", max_tokens=64)
        assert result.text == "hello"
        assert result.prompt_info.prompt_tokens > 3
        stream = client.generate_stream("say", max_tokens=64, n=2, output_options={"return_token_ids": True})
        events = [event async for event in stream]
        for index in range(2):
            mine = [event for event in events if event.index == index]
            assert "".join(event.text for event in mine if isinstance(event, Delta)) == "hello"
            assert isinstance(mine[-1], Finished)
        assert stream.progress.is_whole
        await b.empty()


async def test_client_result_equals_router_messages() -> None:
    async with bench(FakeWorker(FILES)) as b, client_of(b) as client:
        ids = [*(await client.tokenize("say é")).token_ids]
        assert ids == TOKENIZER.encode("say é")
        assert await client.detokenize(ids) == "say é"
        rendered = await client.render_prompt("hi", metadata={"x-fissile-tenant": "t"})
        assert len(rendered.token_ids) == await client.count_tokens("hi")
        assert "hi" in rendered.text

        def same_in_a_thread() -> None:
            with Client(b.router.server.address) as other:
                assert [*other.tokenize("say é").token_ids] == ids
                assert other.detokenize(ids) == "say é"
                assert other.render_prompt("hi") == rendered

        await asyncio.to_thread(same_in_a_thread)


async def test_client_error_has_reason_field_and_advice() -> None:
    async with bench(FakeWorker(FILES)) as b, client_of(b, give_up_s=0) as client:
        with pytest.raises(FissileError) as caught:
            await client.generate("say", top_p=0)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert [each.field for each in caught.value.fields] == ["sampling_params.top_p"]
        assert not caught.value.may_go_on
        with pytest.raises(ValueError, match="GenerateRequest has no such field"):
            await client.generate("say", no_such_field=1)  # type: ignore[call-arg]


async def test_leaving_stream_frees_its_call() -> None:
    async with bench(FakeWorker(FILES, step_s=0.01)) as b, client_of(b) as client:
        async with client.generate_stream("say", max_tokens=4000) as stream:
            async for event in stream:
                assert isinstance(event, Delta)
                break
        await b.empty()
        task = asyncio.ensure_future(client.generate("say", max_tokens=4000))
        await until(lambda: b.workers[0].running)
        task.cancel()
        await b.empty()


@pytest.mark.parametrize("with_token_ids", [False, True])
async def test_stream_resumes_at_next_router(with_token_ids: bool) -> None:
    worker = FakeWorker(FILES, answer=letters, step_s=0.01)
    async with bench(worker) as b, bench(worker_of(worker), start=False) as other:
        addresses = [b.router.server.address, other.router.server.address]
        async with AsyncClient(addresses) as client:
            await until(lambda: other.ready_workers() == 1, 60)
            stream = client.generate_stream("say", max_tokens=60, return_token_ids=with_token_ids)
            texts: list[str] = []
            async for event in stream:
                if isinstance(event, Delta):
                    texts.append(event.text)
                if len(texts) == 3:
                    ending = asyncio.ensure_future(b.router.stop())
            assert (
                "".join(texts) == stream.progress.answers[0].text == ("hijklmnpqrstuvwxyz" * 4)[: len("".join(texts))]
            )
            finish = stream.progress.answers[0].finish
            assert finish is not None
            assert finish.usage.completion_tokens == 60
            await ending


def worker_of(worker: FakeWorker) -> FakeWorker:
    """A worker of its own with the same answers, for another router."""
    return FakeWorker(FILES, worker_id="w1", answer=worker.answer, step_s=worker.step_s)


@pytest.fixture
def two_routers(tmp_path: Path) -> Iterator[tuple[list[Process], Process]]:
    """Two routers of one simulated worker, as processes."""
    with running_service(tmp_path, simulated_model(tmp_path / "model"), worker_options=OPTIONS) as service:
        port = free_port()
        arguments = ["router", "--port", str(port), "--worker", service.workers[0].address]
        other = Process("other", arguments, port, tmp_path / "other.log")
        other.start()
        try:
            other.wait_serving()
            yield [service.router, other], service.workers[0]
        finally:
            other.stop()


@pytest.mark.slow
def test_killed_router_changes_no_answer_of_many_clients(two_routers: tuple[list[Process], Process]) -> None:
    """Threads stream over two routers, one of which dies; every answer equals the one from before."""
    routers, _ = two_routers
    with Client([router.address for router in routers]) as client:
        prompts = [[7 + i, 8, 9] for i in range(12)]
        asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True}
        options: OutputArguments = {"return_token_ids": True}
        expected = [
            client.generate(prompt, seed=i, output_options=options, **asked).answers[0].token_ids
            for i, prompt in enumerate(prompts)
        ]
        got: dict[int, list[int]] = {}
        failures: list[BaseException] = []

        def run(i: int) -> None:
            try:
                got[i] = client.generate(prompts[i], seed=i, output_options=options, **asked).answers[0].token_ids
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        routers[0].stop(signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert not failures
    assert [got[i] for i in range(len(prompts))] == expected


@pytest.mark.slow
def test_answer_with_logit_digests_resumes(two_routers: tuple[list[Process], Process]) -> None:
    """The stream resumes by its token ids, and its receipt equals that of an unbroken answer."""
    routers, _ = two_routers
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True, "request_id": "r"}
    asked["output_options"] = {"return_token_ids": True, "logprobs": 1, "receipt": {"logits_every": 2}}
    with Client([router.address for router in routers]) as client:
        stream = client.generate_stream([7, 8, 9], **asked)
        for number, _ in enumerate(stream):
            if number == 5:
                routers[0].stop(signal.SIGKILL)
        broken = stream.progress.answers[0]
        whole = client.generate([7, 8, 9], **asked).answers[0]
    assert broken.token_ids == whole.token_ids
    assert list(broken.logprobs) == list(whole.logprobs)
    assert broken.finish is not None
    assert whole.finish is not None
    assert broken.finish.receipt == whole.finish.receipt
    assert len(whole.finish.receipt.logit_digests) == -(-TOKENS // 2)


@pytest.mark.slow
def test_shipped_service_config_retries_to_live_router(two_routers: tuple[list[Process], Process]) -> None:
    """For clients of other languages: a call that has not begun survives the loss of its router."""
    routers, _ = two_routers
    config = (REPOSITORY / "deploy" / "clients" / "service-config.json").read_text("utf-8")
    options = [("grpc.service_config", config), ("grpc.max_reconnect_backoff_ms", 1000)]
    targets = ",".join(f"127.0.0.1:{router.port}" for router in routers)
    with grpc.insecure_channel(f"ipv4:{targets}", options=options) as channel:
        stub = InferenceServiceStub(channel)
        for i in range(4):
            generate(stub, request(i, 3))
        routers[0].stop(signal.SIGKILL)
        for i in range(8):
            generate(stub, request(i, 3))


def cancelled_by(error: object) -> bool:
    """True if a stream says that its own program has ended it."""
    return isinstance(error, FissileError) and error.code is grpc.StatusCode.CANCELLED


async def test_closed_client_ends_its_streams() -> None:
    async with bench(FakeWorker(FILES, step_s=0.01)) as b:
        client = Client(b.router.server.address)
        reading = asyncio.ensure_future(asyncio.to_thread(client.generate, "say", max_tokens=4000))
        await until(lambda: b.workers[0].running)
        await asyncio.to_thread(client.close)
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert cancelled_by(error)
        async with client_of(b) as other:
            reading = asyncio.ensure_future(other.generate("say", max_tokens=4000))
            await until(lambda: b.workers[0].running)
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert cancelled_by(error)
        await b.empty()


async def test_stream_is_cancelled_by_another_task() -> None:
    async with bench(FakeWorker(FILES, step_s=0.01)) as b, client_of(b) as client:
        stream = client.generate_stream("say", max_tokens=4000)
        reading = asyncio.ensure_future(stream.result())
        await until(lambda: b.workers[0].running)
        stream.cancel()
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert cancelled_by(error)
        await b.empty()
        with Client(b.router.server.address) as sync:
            here = sync.generate_stream("say", max_tokens=4000)
            reading = asyncio.ensure_future(asyncio.to_thread(here.result))
            await until(lambda: b.workers[0].running)
            here.cancel()
            (error,) = await asyncio.gather(reading, return_exceptions=True)
            assert cancelled_by(error)
            await b.empty()


async def test_stream_is_cancelled_between_attempts() -> None:
    """The stream is cancelled while it waits, and just before another thread sees its next call."""
    nowhere = f"127.0.0.1:{free_port()}"
    async with AsyncClient(nowhere) as client:
        stream = client.generate_stream("say")
        reading = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0.3)
        stream.cancel()
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert cancelled_by(error)
    with Client(nowhere) as sync:
        here = sync.generate_stream("say")
        reading = asyncio.ensure_future(asyncio.to_thread(here.result))
        await asyncio.sleep(0.3)
        here.cancel()
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert cancelled_by(error)
    async with bench(FakeWorker(FILES, step_s=0.01)) as b:
        with Client(b.router.server.address) as sync:
            late = sync.generate_stream("say", max_tokens=4000)
            stub = sync.stub

            def cancel_and_stub(target: str) -> Any:
                late.cancel()
                return stub(target)

            sync.stub = cancel_and_stub  # type: ignore[method-assign]
            with pytest.raises(FissileError, match="CANCELLED"):
                await asyncio.to_thread(late.result)
            await b.empty()


def test_missing_certificate_is_named() -> None:
    with Client("127.0.0.1:1", tls_ca="/no/such/ca.pem") as client, pytest.raises(FileNotFoundError, match="no/such"):
        client.generate("say")


def test_retries_end_after_give_up_time() -> None:
    clock = 0.0
    retries = Retries(["a", "b"], 10.0)
    error = FissileError(grpc.StatusCode.UNAVAILABLE, "gone")
    targets = []
    while (wait_s := retries.failed(error, clock)) is not None:
        assert 0 <= wait_s <= 2.0
        clock += wait_s
        targets.append(retries.target)
    assert clock == pytest.approx(10.0)
    assert targets[:4] == ["b", "a", "b", "a"]
    retries.progress()
    assert retries.failed(error, clock) is not None
    assert (
        Retries(["a"], 10.0).failed(FissileError(grpc.StatusCode.INVALID_ARGUMENT, "bad", "INVALID_FIELD"), 0) is None
    )
    assert Retries(["a"], 0.0).failed(error, 0) is None


@pytest.mark.parametrize(("waited_s", "calls"), [("600", 1), ("30", 1), ("20", 3), ("5", 6), ("soon", 31)])
@pytest.mark.parametrize("target", ["a:1", "1.1.1.1:1"])
def test_router_whose_wait_for_worker_is_longer_than_give_up_is_asked_once(
    target: str, waited_s: str, calls: int
) -> None:
    """Former faults: the client repeated waits of ten minutes; with waits of 5 s it gave up after 29 s, not 35 s."""
    error = no_worker_for(waited_s)
    retries, clock, made = Retries([target], 30.0), error.waited_s, 1
    while (wait_s := retries.failed(error, clock)) is not None:
        clock += wait_s + error.waited_s
        made += 1
    assert made == calls


@pytest.mark.parametrize("waited_s", ["16", "20", "600"])
@pytest.mark.parametrize("targets", [["1.1.1.1:1", "2.2.2.2:1"], ["a:1", "b:1"]])
def test_next_router_is_asked_after_wait_for_worker(targets: list[str], waited_s: str) -> None:
    """Former fault: with waits of more than half of give_up_s the second router was never asked."""
    error = no_worker_for(waited_s)
    retries = Retries(targets, 30.0)
    assert retries.failed(error, error.waited_s) is not None
    assert retries.target == targets[1]
    # The second router has a worker, and is lost after the first message.
    retries.progress()
    lost = FissileError(grpc.StatusCode.UNAVAILABLE, "gone")
    assert retries.failed(lost, 2 * error.waited_s) is not None
    assert retries.target == targets[0]


def test_router_that_waited_too_long_is_left_out_while_others_fail() -> None:
    retries, clock, asked = Retries(["1.1.1.1:1", "2.2.2.2:1"], 30.0), 600.0, set[str]()
    error = no_worker_for("600")
    while (wait_s := retries.failed(error, clock)) is not None:
        clock += wait_s
        asked.add(retries.target)
        error = FissileError(grpc.StatusCode.UNAVAILABLE, "refused")
    assert asked == {"2.2.2.2:1"}
    assert clock == pytest.approx(630.0)


def no_worker_for(waited_s: str) -> FissileError:
    return FissileError(grpc.StatusCode.UNAVAILABLE, "none", "NO_WORKER", {"waited_s": waited_s}, retry_after_s=1.0)


def test_retry_waits_as_full_router_advises() -> None:
    full = FissileError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_s=1.5)
    assert Retries(["a"], 10.0).failed(full, 0.0) == 1.5


def test_client_library_imports_no_other_package_of_ours() -> None:
    """The library is a separate distribution."""
    assert error_of.__module__ == "fissile.client.errors"
    folder = Path(__file__).resolve().parents[2] / "protos" / "fissile"
    for path in (*folder.glob("*.py"), *folder.glob("client/*.py")):
        for line in path.read_text("utf-8").splitlines():
            if line.startswith(("import ", "from ")):
                top = line.split()[1].split(".")[0]
                assert top in {"fissile", "grpc", "google"} or top in sys.stdlib_module_names, f"{path.name}: {line}"


def read_to_ctrl_c(stream: Stream) -> Stream:
    """A stream whose reader has been interrupted while it took the second message."""
    next(stream)
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(stream.progress, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    return stream


async def test_failed_stream_is_not_complete() -> None:
    """A second read raises the failure again instead of ending."""
    async with bench(FakeWorker(FILES, step_s=0.01)) as b, client_of(b, give_up_s=0) as client:
        late = client.generate_stream("say", max_tokens=4000, timeout_s=0.3)
        for _ in range(3):
            with pytest.raises(FissileError, match="DEADLINE_EXCEEDED"):
                await late.result()
        with Client(b.router.server.address, give_up_s=0) as sync:
            here = sync.generate_stream("say", max_tokens=4000, timeout_s=0.3)
            for _ in range(3):
                with pytest.raises(FissileError, match="DEADLINE_EXCEEDED"):
                    await asyncio.to_thread(here.result)
            interrupted = await asyncio.to_thread(read_to_ctrl_c, sync.generate_stream("say", max_tokens=4000))
            for _ in range(2):
                with pytest.raises(FissileError, match="CANCELLED"):
                    await asyncio.to_thread(interrupted.result)
        await b.empty()


async def test_closed_client_ends_its_unary_calls() -> None:
    """The waiting task is not cancelled: it gets CANCELLED, as a reader of a stream does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}", give_up_s=0)
        asking = asyncio.ensure_future(client.models())
        await asyncio.sleep(0.1)
        await client.close()
        (error,) = await asyncio.gather(asking, return_exceptions=True)
        assert cancelled_by(error)


def test_arguments_are_fields_of_the_request() -> None:
    with Client("127.0.0.1:1") as client:
        request = client.chat_stream(
            [{"role": "user", "content": "hi"}],
            seed=0,
            stop_strings=["END", "."],
            logit_bias={3: 1.5},
            sampling_params={"top_k": 4},
            output_options={"return_token_ids": True},
            model="m",
            request_id="r",
        ).progress.request
    assert request == pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="hi")],
        sampling_params=pb.SamplingParams(seed=0, stop_strings=["END", "."], logit_bias={3: 1.5}, top_k=4),
        output_options=pb.OutputOptions(return_token_ids=True),
        model="m",
        request_id="r",
    )


@pytest.mark.parametrize("key", ["fk_abc\n", "fk_abc ", "fk_\u00fc"])
def test_unsendable_api_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key has a character that no key has"):
        Client("127.0.0.1:1", api_key=key)


@pytest.mark.parametrize("target", ["127.0.0.1", "localhost", "::1", "[::1]", "", "a b:1"])
def test_address_without_port_is_refused(target: str) -> None:
    """gRPC would use port 443, and the call would wait."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        Client(["127.0.0.1:50051", target])
    with pytest.raises(click.BadParameter, match="address"):
        generate_command.main(["--address", f"127.0.0.1:50051,{target}", "hi"], standalone_mode=False)


@pytest.mark.parametrize("target", ["[::1]:1", "h-1.x:1", "dns:///r:1", "ipv4:1.2.3.4:1,1.2.3.5:1", "unix:/run/r"])
def test_address_forms_are_accepted(target: str) -> None:
    assert Client(target).connection.targets == [target]


def test_invalid_answer_index_takes_no_memory() -> None:
    """The router refuses the index; the client allocates nothing for it."""
    with Client("127.0.0.1:1") as client:
        assert len(client.generate_stream("say", n=2**32 - 1).progress.answers) < 10_000


def test_asyncio_client_works_in_second_event_loop() -> None:
    """Former fault: in scripts and notebooks the second `asyncio.run` failed with `Event loop is closed`."""

    async def serve(stop: threading.Event, ready: Queue[str]) -> None:
        async with bench(FakeWorker(FILES, answer=short)) as b:
            ready.put(b.router.server.address)
            await asyncio.to_thread(stop.wait)

    stop, ready = threading.Event(), Queue[str]()
    serving = threading.Thread(target=lambda: asyncio.run(serve(stop, ready)))
    serving.start()
    try:
        client = AsyncClient(ready.get(timeout=60))

        async def twice() -> list[str]:
            return [(await client.chat("hi", max_tokens=64)).text for _ in range(2)]

        async def elsewhere() -> None:
            await client.models()
            with pytest.raises(RuntimeError, match="at work on another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(client.models()))
            await client.close()

        assert [asyncio.run(twice()) for _ in range(3)] == [["hello"] * 2] * 3
        asyncio.run(elsewhere())
        with pytest.raises(FissileError, match="CANCELLED"):
            asyncio.run(twice())
    finally:
        stop.set()
        serving.join()
