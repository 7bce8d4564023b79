"""KV tiers of real workers: blocks are found after a worker's death, and by others, and no tier changes an answer."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from fissile.v1 import inference_pb2 as pb

from common.cli.core.errors import CommandError
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, free_port, generate, running_service
from tests.e2e.simulated import wait_workers
from tests.redis_server import running_redis
from worker.cli.worker import worker

RND = random.Random(7)
PROMPT = [RND.randrange(5, 250) for _ in range(100)]
# All full blocks but one token.
HIT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def ask(service: Service, tokens: list[int] = PROMPT) -> Answer:
    params = pb.SamplingParams(max_tokens=8, seed=3, temperature=1.0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling_params=params)
    request.output_options.return_token_ids = True
    answer = generate(service.stub, request)
    assert len(answer.token_ids) == 8
    return answer


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def kill(service: Service, index: int) -> None:
    service.workers[index].stop(signal.SIGKILL)


def start(service: Service, index: int) -> None:
    worker = service.workers[index]
    worker.start()
    worker.wait_serving()


def cached(answer: Answer) -> int:
    assert answer.prompt_info is not None
    return answer.prompt_info.cached_tokens


def test_blocks_of_killed_worker_are_found_by_its_successor(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = ["--kv-tiers", f"memory:16MiB,files:{folder}:64MiB"]
    with running_service(tmp_path, model, worker_options=options) as service:
        first = ask(service)
        assert cached(first) == 0
        # Blocks go down with the step after the one that published them.
        until(lambda: len(list(folder.glob("*/*.kv"))) >= HIT // 16)
        kill(service, 0)
        start(service, 0)
        wait_workers(service, 1)
        second = ask(service)
        assert (second.token_ids, cached(second)) == (first.token_ids, HIT)
        kill(service, 0)
        # All blocks of the prompt but the first are cut off.
        for path in folder.glob("*/*.kv"):
            path.write_bytes(path.read_bytes()[:-1])
        start(service, 0)
        wait_workers(service, 1)
        third = ask(service)
        assert (third.token_ids, cached(third)) == (first.token_ids, 0)


def num_keys(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(b"DBSIZE\r\n")
        return int(sock.recv(100)[1:])


@pytest.mark.slow
def test_workers_share_blocks_by_redis_and_outlive_it(model: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_redis(tmp_path))
        options = ["--kv-tiers", server.url]
        service = stack.enter_context(running_service(tmp_path, model, workers=2, worker_options=options))
        kill(service, 1)
        wait_workers(service, 1)
        first = ask(service)
        until(lambda: num_keys(server.port) >= HIT // 16)
        kill(service, 0)
        start(service, 1)
        wait_workers(service, 1)
        second = ask(service)
        assert (second.token_ids, cached(second)) == (first.token_ids, HIT)
        for sent in (signal.SIGSTOP, signal.SIGKILL):
            server.send(sent)
            other = [*PROMPT[:-1], int(sent)]
            kill(service, 1)
            start(service, 1)
            wait_workers(service, 1)
            assert ask(service, other).token_ids == ask(service, other).token_ids
            assert ask(service).token_ids == first.token_ids


def test_wrong_tier_is_refused_in_one_line(model: Path) -> None:
    arguments = ["--model", str(model), "--port", str(free_port()), "--kv-tiers", "disk:/tmp"]
    done = CliRunner().invoke(worker, arguments)
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == (
        "kv_tiers names 'disk'; valid: memory:SIZE, files:FOLDER:SIZE, mooncake://MASTER:PORT?segment=SIZE and "
        "redis://HOST:PORT/DATABASE, each at most once, with commas between"
    )
