"""Cache salts and priority classes through router and worker processes: who shares a cache, and who goes first."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from tests.e2e.service import Answer, Process, Service, free_port, generate, running_service
from tests.e2e.simulated import simulated_model, wait_workers
from tests.fake_dns import wait_until

# Of the 60 blocks of 16 tokens, 512 bytes each, two long prompts would take more than there are; a short one fills 2.
LONG, SHORT, HITS = 490, 33, 32
# The longest answer takes twenty seconds: none that waits for its blocks gets them before it is cancelled.
OPTIONS = ["--simulate", "fixed:50ms", "--kv-cache-memory", "480KiB", "--max-model-len", "960"]
LONGEST = 400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = simulated_model(tmp_path_factory.mktemp("model"))
    with running_service(tmp_path_factory.mktemp("service"), model, worker_options=OPTIONS) as running:
        wait_workers(running, 1)
        yield running


def request(content: int, length: int, max_tokens: int = 3, **fields: Any) -> pb.GenerateRequest:
    """A prompt that `content` decides."""
    rnd = random.Random(content)
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[rnd.randrange(256) for _ in range(length)]),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        output_options=pb.OutputOptions(return_token_ids=True),
        **fields,
    )


def cached(answer: Answer) -> int:
    assert answer.finish is not None
    return answer.finish.usage.cached_tokens


def test_prefix_is_shared_only_with_same_salt(service: Service) -> None:
    salts = ["a", "a", "b", "", "", "b", "a"]
    answers = [generate(service.stub, request(1, SHORT, cache_salt=salt)) for salt in salts]
    assert [cached(answer) for answer in answers] == [0, HITS, 0, 0, HITS, HITS, HITS]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def test_isolated_tenants_share_no_cache(service: Service, tmp_path: Path) -> None:
    """Former fault: without a salt of each client, all tenants shared the cache, and `cached_tokens` told what others
    had asked."""
    port = free_port()
    arguments = ["router", "--port", str(port), "--worker", service.workers[0].address, "--isolate-tenants"]
    router = Process("isolating", arguments, port, tmp_path / "isolating.log")
    router.start()
    try:
        router.wait_serving()
        with grpc.insecure_channel(router.address) as channel:
            isolating = InferenceServiceStub(channel)

            def ask(stub: InferenceServiceStub, tenant: str, salt: str = "") -> Answer:
                answer, metadata = Answer(), (("x-fissile-tenant", tenant),) if tenant else ()
                asked = request(4, SHORT, cache_salt=salt)
                for part in stub.Generate(asked, metadata=metadata, timeout=60):
                    answer.add(part)
                return answer

            # Without the option one tenant finds what another has asked, and keeps finding it.
            shared = [ask(service.stub, tenant) for tenant in ("a", "b")]
            assert [cached(answer) for answer in shared] == [0, HITS]
            tokens = {tuple(answer.token_ids) for answer in shared}
            # Few at a time, for the cache is small.
            for turns, found in (
                ([("a", ""), ("b", ""), ("a", ""), ("b", "")], [0, 0, HITS, HITS]),
                ([("", ""), ("a", ""), ("", "")], [0, 0, HITS]),
                ([("a", "s"), ("b", "s"), ("a", ""), ("a", "s")], [0, 0, 0, HITS]),
            ):
                with grpc.insecure_channel(service.workers[0].address) as direct:
                    WorkerServiceStub(direct).FlushCache(wpb.FlushCacheRequest(), timeout=60)
                answers = [ask(isolating, tenant, salt) for tenant, salt in turns]
                assert [cached(answer) for answer in answers] == found
                tokens |= {tuple(answer.token_ids) for answer in answers}
            assert len(tokens) == 1
    finally:
        router.stop(signal.SIGKILL)


def test_higher_class_overtakes_requests_waiting_for_blocks(service: Service) -> None:
    def waiting(count: int) -> bool:
        return service.worker_load().waiting_seqs == count

    def ended() -> list[str]:
        """Names in the order of the router's log: threads of a busy machine may see the ends in another one."""
        return re.findall(r'"request ended".*?"request_id": "(low|normal|unset|high)"', service.router.log.read_text())

    first = service.stub.Generate(request(2, LONG, max_tokens=LONGEST))
    next(iter(first))
    asked = [("low", pb.PRIORITY_LOW), ("normal", pb.PRIORITY_NORMAL), ("unset", 0), ("high", pb.PRIORITY_HIGH)]
    threads = [
        threading.Thread(
            target=generate, args=(service.stub, request(10 + i, LONG, request_id=name, priority=priority))
        )
        for i, (name, priority) in enumerate(asked)
    ]
    for count, thread in enumerate(threads, start=1):
        thread.start()
        # In this order, however long a busy machine takes for each.
        wait_until(partial(waiting, count))
    assert service.worker_load().waiting_seqs == len(asked)
    first.cancel()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(ended()) == len(asked))
    assert ended() == ["high", "normal", "unset", "low"]


def test_direct_call_obeys_salt_and_cache_opt_out(service: Service) -> None:
    with grpc.insecure_channel(service.workers[0].address) as channel:
        stub = WorkerServiceStub(channel)

        def hits(**fields: Any) -> int:
            given = wpb.GenerateRequest(
                token_ids=request(3, SHORT).token_ids.ids,
                params=wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=2, ignore_eos=True),
                **fields,
            )
            return int(next(iter(stub.Generate(given))).start.cached_tokens)

        assert [hits(cache_salt=salt) for salt in (b"a", b"a", b"b")] == [0, HITS, 0]
        assert hits(cache_salt=b"b", priority=wpb.PRIORITY_HIGH) == HITS
        with pytest.raises(grpc.RpcError) as caught:
            hits(cache_salt=b"x" * 129)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
