"""No false alarm: many answers of healthy workers are computed again by others, and their KV compared, and nobody is
blamed. The workers are unlike in policy, cache and memory, and the routers ask them all at the same time."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.support import client_of
from tests.e2e.service import REPOSITORY, Process, free_port, running

pytestmark = pytest.mark.slow

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
WORKERS = (
    ("--scheduling-policy", "mixed", "--kv-cache-memory", "24MiB"),
    # A pool so small that sequences are preempted.
    ("--scheduling-policy", "prefill_first", "--max-num-batched-tokens", "96", "--kv-cache-memory", "4MiB"),
    ("--no-prefix-caching", "--max-num-seqs", "8", "--kv-cache-memory", "24MiB"),
)
NAME, LENGTH = "audited", 512
BEGINNING = "Once upon a time there was a small fox. " * 2
# Of each router: fewer answers than may wait for their audit (MAX_AUDITS_WAITING), with all that are asked for at once.
AT_ONCE, MOST_WAITING = 8, 24
TIMEOUT_S = 600.0
# Numbers of requests of one router and of the next are so far from each other.
FAR = 1_000_000


def mixed(number: int) -> pb.GenerateRequest:
    """One of many requests: common and new beginnings, several answers, every kind of sampling, salts, logits now and
    then."""
    rnd = random.Random(number)
    params = pb.SamplingParams(
        max_tokens=rnd.choice([1, 7, 24, 100, 200] if FULL else [1, 7, 24, 50]),
        temperature=rnd.choice([0.0, 0.7, 1.3]),
        top_k=rnd.choice([0, 0, 20]),
        top_p=rnd.choice([1.0, 0.9]),
        repetition_penalty=rnd.choice([1.0, 1.2]),
        presence_penalty=rnd.choice([0.0, 0.5]),
        min_tokens=0,
        n=rnd.choice([1, 1, 1, 3]),
        stop_strings=rnd.choice([[], [], ["the", "e."]]),
        ignore_eos=rnd.random() < 0.7,
    )
    text = rnd.choice(["", BEGINNING, 3 * BEGINNING]) + rnd.choice(["A fox", "12 + 7 =", "Spell cat"]) * rnd.randrange(
        1, 9
    )
    request = pb.GenerateRequest(request_id=f"m{number}", text=text, sampling_params=params)
    request.cache_salt = rnd.choice(["", "", "a", "b"])
    if number % 5 == 0:
        request.output_options.logprobs = number % 3
        request.output_options.prompt_logprobs = 1
    if number % 3:
        request.output_options.receipt.logits_every = number % 3
    return request


class Audited:
    """One router's audits: what was asked, and what its log says since.

    Attributes:
        results: audits by their result.
        tokens: of answers that another worker has computed again, with the same result.
        alarms: lines of the log that name a worker.
    """

    def __init__(self, router: Process) -> None:
        self.results: Counter[str] = Counter()
        self.tokens = 0
        self.alarms: list[str] = []
        self._log = router.log
        self._read = 0
        # Of requests whose answers have not all passed.
        self._tokens: dict[str, list[int]] = {}
        self._passed: Counter[str] = Counter()
        self._num_audited = 0

    @property
    def waiting(self) -> int:
        """Answers whose audit has not ended."""
        return self._num_audited - sum(self.results.values())

    def answered(self, response: pb.GenerateOnceResponse) -> None:
        """Takes answers; those that more than one worker has made are not audited."""
        finishes = [each.finish for each in response.answers if each.finish.attempts == 1]
        self._num_audited += len(finishes)
        if finishes:
            self._tokens[response.request_id] = [finish.usage.completion_tokens for finish in finishes]

    def look(self) -> None:
        """Reads what the log has got since."""
        for line in self._new_lines():
            if '"event": "audit"' in line:
                said = json.loads(line)
                self.results[said["result"]] += 1
                self._passed[said["request_id"]] += said["result"] == "passed"
            elif "audit broke off" in line:
                self.results["error"] += 1
            elif "audit: " in line:
                self.alarms.append(line)
        for request_id, tokens in list(self._tokens.items()):
            if self._passed[request_id] == len(tokens):
                self.tokens += sum(self._tokens.pop(request_id))

    def _new_lines(self) -> list[str]:
        with self._log.open("rb") as log:
            log.seek(self._read)
            whole = log.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        return whole.decode().splitlines()


@contextlib.contextmanager
def service(folder: Path) -> Iterator[list[Process]]:
    """Unlike workers of one numerics class, and routers that audit every answer."""
    environment = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "debug"}
    workers, routers = [], []
    for i, unlike in enumerate(WORKERS):
        port = free_port()
        own = ["--model", str(DEMO), "--model-name", NAME, "--port", str(port), "--worker-id", f"worker-{i}"]
        # A worker without prefix caching has no blocks to digest.
        digests = [] if "--no-prefix-caching" in unlike else ["--kv-digests", "100%"]
        arguments = ["worker", *own, "--max-model-len", str(LENGTH), *digests, *unlike]
        workers.append(
            Process(
                f"worker-{i}", arguments, port, folder / f"worker-{i}.log", {**environment, "FISSILE_LOG_LEVEL": "info"}
            )
        )
    targets = [part for worker in workers for part in ("--worker", worker.address)]
    for i in range(SCALE.audit_routers):
        port = free_port()
        # Each in its turn: no worker is asked less than others for what it has in its cache.
        options = ["--audit", "100%", "--placement", "round_robin"]
        arguments = ["router", "--port", str(port), *targets, *options]
        routers.append(Process(f"router-{i}", arguments, port, folder / f"router-{i}.log", environment))
    with running([*workers, *routers]):
        yield routers


def wait_workers(router: Process) -> None:
    """Waits until a router knows all workers."""
    end = time.monotonic() + TIMEOUT_S
    while router.log.read_text().count("worker up") < len(WORKERS):
        assert time.monotonic() < end, router.log.read_text()[-2000:]
        time.sleep(0.05)


def ask(router: Process, place: int) -> Audited:
    """Asks one router until its share of the tokens is audited, no more at a time than it can audit."""
    wait_workers(router)
    audited, number = Audited(router), place * FAR
    with client_of(router) as stub, ThreadPoolExecutor(AT_ONCE) as pool:
        while audited.tokens < SCALE.audit_tokens / SCALE.audit_routers and not audited.alarms:
            requests = [mixed(number + i) for i in range(AT_ONCE)]
            number += AT_ONCE
            for response in pool.map(partial(once, stub), requests):
                audited.answered(response)
            settle(audited, MOST_WAITING)
    settle(audited, 0)
    return audited


def once(stub: InferenceServiceStub, request: pb.GenerateRequest) -> pb.GenerateOnceResponse:
    """Answers; every sixth request with a receipt is replayed as well, at whichever worker."""
    response = stub.GenerateOnce(request, timeout=TIMEOUT_S)
    receipt = response.answers[0].finish.receipt
    if receipt.version and int(request.request_id[1:]) % 6 == 1:
        found = stub.Replay(pb.ReplayRequest(receipt=receipt, generate=request), timeout=TIMEOUT_S)
        assert (found.verdict, found.detail) == (pb.REPLAY_VERDICT_EQUAL, found.detail)
    return response


def settle(audited: Audited, most: int) -> None:
    """Waits until at most so many answers wait for their audit."""
    end = time.monotonic() + TIMEOUT_S
    audited.look()
    while audited.waiting > most:
        assert time.monotonic() < end, (audited.waiting, audited.results)
        time.sleep(0.05)
        audited.look()


def test_no_worker_is_blamed_while_all_are_well(tmp_path: Path, report: Report) -> None:
    """AUDI: with prefixes from caches, salts, several answers, many at once, preemptions."""
    began = time.monotonic()
    with service(tmp_path) as routers, ThreadPoolExecutor(len(routers)) as pool:
        done = list(pool.map(ask, routers, range(len(routers))))
    results = sum((each.results for each in done), Counter[str]())
    alarms = [line for each in done for line in each.alarms]
    report(
        "AUDI",
        tokens=sum(each.tokens for each in done),
        answers=results["passed"],
        alarms=len(alarms),
        broke_off=results["error"],
        took_s=time.monotonic() - began,
    )
    assert not alarms, alarms[:5]
    assert set(results) <= {"passed", "error"}
    assert sum(each.tokens for each in done) >= SCALE.audit_tokens
