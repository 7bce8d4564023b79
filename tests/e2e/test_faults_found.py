"""Single flipped bits in real workers, while they serve: the audit finds each, where it is, and nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
from fissile.receipts import contradiction
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Answer, Process, Service, free_port, generate, running

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
WORKERS = 3
BEGINNING = "Once upon a time there was a small fox. " * 2
ROUNDS, AT_ONCE = 12, 16
WRONG, DIFFER = "audit: a worker gives wrong answers", "audit: two workers differ"


class Fleet(Service):
    """Three workers that can have faults, and a router that audits every answer."""

    folder: Path

    def said(self) -> str:
        return self.router.log.read_text()

    def audits(self) -> int:
        """Audits that have come to a result."""
        return sum(self.said().count(text) for text in ('"result": "passed"', WRONG, DIFFER))

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, self.said()[-4000:]
            time.sleep(0.05)

    def wait_for_audit(self, before: int) -> None:
        self.wait(lambda: self.audits() > before)

    def break_worker(self, worker: str, fault: str) -> None:
        """Makes a fault and waits until it is there."""
        request = self.folder / worker / fault
        request.touch()
        self.wait(lambda: not request.exists())


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    environment = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "debug"}
    workers = []
    for i in range(WORKERS):
        port, name = free_port(), f"worker-{i}"
        (tmp_path / name).mkdir()
        arguments = ["tests.e2e.faulty_worker", str(tmp_path / name), "worker", "--model", str(DEMO)]
        arguments += ["--model-name", "test", "--port", str(port), "--worker-id", name, "--dtype", "float32"]
        arguments += ["--kv-cache-memory", "3MiB", "--max-model-len", "512"]
        workers.append(Process(name, arguments, port, tmp_path / f"{name}.log", environment))
    port = free_port()
    addresses = [part for worker in workers for part in ("--worker", worker.address)]
    audit = ["--audit", "100%", "--audit-dir", str(tmp_path / "audit")]
    router = Process(
        "router", ["router", "--port", str(port), *addresses, *audit], port, tmp_path / "router.log", environment
    )
    with running([*workers, router]), grpc.insecure_channel(router.address) as channel:
        made = Fleet(router, workers, channel)
        made.folder = tmp_path
        made.wait(lambda: made.said().count("worker up") == WORKERS)
        yield made


def ask(fleet: Fleet, number: int, *, temperature: float = 0.8) -> Answer:
    """One answer to a prompt of several blocks, with all of its logits digested."""
    params = pb.SamplingParams(max_tokens=8, temperature=temperature, seed=number)
    request = pb.GenerateRequest(request_id=f"r{number}", text=3 * BEGINNING, sampling_params=params)
    request.output_options.receipt.logits_every = 1
    answer = generate(fleet.stub, request)
    assert answer.finish is not None
    assert contradiction(answer.finish.receipt) == ""
    assert len(answer.finish.receipt.logit_digests) == answer.finish.receipt.output_tokens
    return answer


def mixed(number: int) -> pb.GenerateRequest:
    """One of many requests: common and new beginnings, several answers, every kind of sampling, logits now and then."""
    rnd = random.Random(number)
    params = pb.SamplingParams(
        max_tokens=rnd.randrange(1, 24),
        temperature=rnd.choice([0.0, 0.7, 1.3]),
        top_k=rnd.choice([0, 0, 20]),
        top_p=rnd.choice([1.0, 0.9]),
        repetition_penalty=rnd.choice([1.0, 1.2]),
        presence_penalty=rnd.choice([0.0, 0.5]),
        min_tokens=0,
        n=rnd.choice([1, 1, 1, 3]),
        stop_strings=rnd.choice([[], [], ["the", "e."]]),
    )
    text = rnd.choice(["", BEGINNING, 3 * BEGINNING]) + rnd.choice(["A fox", "12 + 7 =", "Spell cat"]) * rnd.randrange(
        1, 9
    )
    request = pb.GenerateRequest(request_id=f"m{number}", text=text, sampling_params=params)
    if number % 4 == 0:
        request.sampling_params.best_of = request.sampling_params.n + 1
    if number % 5 == 0:
        request.output_options.logprobs = number % 3
        request.output_options.prompt_logprobs = 1
    if number % 3:
        request.output_options.receipt.logits_every = number % 3
    return request


def check_replay(fleet: Fleet, request: pb.GenerateRequest, answer: pb.GeneratedText) -> None:
    """An answer with a receipt comes out again."""
    if answer.finish.HasField("receipt"):
        found = fleet.stub.Replay(pb.ReplayRequest(receipt=answer.finish.receipt, generate=request), timeout=120)
        assert (found.verdict, found.detail) == (pb.REPLAY_VERDICT_EQUAL, found.detail)


@pytest.mark.long
def test_no_worker_is_blamed_while_all_are_well(fleet: Fleet) -> None:
    """With prefixes from caches, many at once, and with a pool so small that sequences are preempted."""
    num_answers = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(ROUNDS):
            requests = [mixed(AT_ONCE * number + i) for i in range(AT_ONCE)]
            for request, response in zip(
                requests, pool.map(partial(fleet.stub.GenerateOnce, timeout=120), requests), strict=True
            ):
                num_answers += max(request.sampling_params.n, request.sampling_params.best_of)
                check_replay(fleet, request, response.answers[0])
            # More than may wait are not audited.
            fleet.wait_for_audit(num_answers - 1)
    assert num_answers > ROUNDS * AT_ONCE
    assert "audit: " not in fleet.said()


def ask_until(fleet: Fleet, text: str) -> None:
    """Asks until the router says something of an answer: which worker a request goes to depends on the time."""
    for number in range(100, 130):
        before = fleet.audits()
        ask(fleet, number)
        fleet.wait_for_audit(before)
        if text in fleet.said():
            return
    raise AssertionError(fleet.said()[-4000:])


@pytest.mark.long
def test_single_flipped_bits_are_found_and_nothing_else_is(fleet: Fleet) -> None:
    answers = [ask(fleet, number) for number in range(6)]
    fleet.wait(lambda: fleet.audits() == len(answers))
    assert "audit: " not in fleet.said()
    finish = answers[-1].finish
    assert finish is not None
    # It has the common beginning of all prompts in its cache.
    holder = finish.worker_id
    fleet.break_worker(holder, "kv")
    ask_until(fleet, WRONG)
    fleet.wait(lambda: "audit: worker cordoned" in fleet.said())
    assert f'"worker_id": "{holder}"' in next(line for line in fleet.said().splitlines() if WRONG in line)
    left = [worker.name for worker in fleet.workers if worker.name != holder]
    # A bit of a weight: both that are left stand by what they say, so that it is known that one is wrong, not which.
    fleet.break_worker(left[0], "weights")
    ask_until(fleet, DIFFER)
    assert fleet.said().count(WRONG) == fleet.said().count(DIFFER) == 1
    assert len(list((fleet.folder / "audit").iterdir())) == 2
