"""Prefill and decode on workers of their own, under load and kills: to the bit the answers of one worker for both."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Answer, Service, generate, running_service
from tests.e2e.simulated import wait_workers

pytestmark = pytest.mark.slow

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
PREFILL, DECODE = 0, 1
REQUESTS = 1000
AT_ONCE = 16
# Small steps, so that the requests of one moment are in different phases.
OPTIONS = ["--max-model-len", "1024", "--max-num-batched-tokens", "64"]
STORY = "Once upon a time there was a little dog who lived in an old house near the river with his best friend"
WORDS = STORY.split()
SCHEMA = json.dumps({"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker for both, without tiers and without drafts."""
    with running_service(tmp_path_factory.mktemp("whole"), DEMO, worker_options=OPTIONS) as service:
        wait_workers(service, 1)
        yield service


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker for each half, which draft, and share blocks in files."""
    folder = tmp_path_factory.mktemp("halves")
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    options = [*OPTIONS, "--speculative-config", drafts, "--kv-tiers", f"memory:64MiB,files:{folder / 'kv'}:1GiB"]
    with running_service(folder, DEMO, roles=("prefill", "decode"), worker_options=options) as service:
        wait_workers(service, 2)
        yield service


def text(rnd: random.Random, most: int) -> str:
    """A beginning that other requests share, and an end of its own."""
    shared = random.Random(rnd.randrange(8))
    begin = [shared.choice(WORDS) for _ in range(shared.choice([0, 20, 60]))]
    return " ".join([*begin, *(rnd.choice(WORDS) for _ in range(rnd.randint(1, most)))])


def random_request(seed: int) -> pb.GenerateRequest:
    """A request that uses some of all that a hand-over could lose."""
    rnd = random.Random(seed)
    made = pb.GenerateRequest(text=text(rnd, 60))
    params = made.sampling_params
    params.seed, params.max_tokens = seed, rnd.randint(1, 24)
    params.temperature = rnd.choice([0.0, 0.0, 0.7, 1.0])
    params.n = rnd.choice([1, 1, 1, 3])
    if rnd.random() < 0.3:
        params.frequency_penalty, params.presence_penalty = 0.4, 0.2
        params.repetition_penalty = 1.1
    if rnd.random() < 0.3:
        params.stop_strings.extend(rnd.sample([".", " and", "the", "q"], 2))
    if rnd.random() < 0.2:
        params.min_tokens = min(4, params.max_tokens)
    match rnd.randrange(6):
        case 0:
            params.constraint.regex = "[a-d]{3,30}"
        case 1:
            params.constraint.json_schema = SCHEMA
    made.output_options.return_token_ids = True
    if rnd.random() < 0.4:
        made.output_options.logprobs = rnd.randint(0, 3)
    if rnd.random() < 0.1:
        made.output_options.prompt_logprobs = 1
    if rnd.random() < 0.2:
        made.cache_salt = rnd.choice(["a", "b"])
    return made


def content(answers: pb.GenerateOnceResponse) -> list[Any]:
    """All that a hand-over must not change: everything but times, workers and attempts."""
    return [
        (
            list(each.token_ids),
            each.text,
            each.logprobs,
            each.finish.reason,
            each.finish.stop,
            each.finish.logprob,
            each.finish.exact,
            each.finish.usage.completion_tokens,
        )
        for each in answers.answers
    ]


def check_left(service: Service) -> None:
    """Checks that workers and router hold nothing of requests that have ended."""
    for index, worker in enumerate(service.workers):
        load = service.wait_idle(index)
        assert not load.decoding_seqs + load.waiting_seqs, worker.name
        assert load.free_blocks == load.total_blocks, worker.name


def test_thousand_answers_equal_those_of_one_worker(whole: Service, halves: Service) -> None:
    def both(seed: int) -> int:
        asked = random_request(seed)
        wanted = whole.stub.GenerateOnce(asked, timeout=300)
        found = halves.stub.GenerateOnce(asked, timeout=300)
        assert content(found) == content(wanted), seed
        assert list(found.prompt_logprobs) == list(wanted.prompt_logprobs), seed
        return max(each.finish.attempts for each in found.answers)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        attempts = list(pool.map(both, range(REQUESTS)))
    # Answers of one token stay, and some streams find no place at the worker for decodes.
    assert attempts.count(2) > REQUESTS // 2
    assert set(attempts) <= {1, 2}
    check_left(halves)


# The worker that is killed when a stream has so many tokens. Before its first token, and with it, the prompts of other
# streams wait, or are half computed; with it, its blocks go down and are fetched; behind it, it decodes.
@pytest.mark.parametrize(("lost", "tokens"), [(PREFILL, 0), (PREFILL, 1), (DECODE, 1), (DECODE, 2), (DECODE, 60)])
def test_killed_half_changes_no_token(whole: Service, halves: Service, lost: int, tokens: int) -> None:
    rnd = random.Random(100 * lost + tokens)
    requests = []
    for i in range(AT_ONCE):
        made = pb.GenerateRequest(text=" ".join(rnd.choice(WORDS) for _ in range(600)))
        made.output_options.return_token_ids = True
        made.sampling_params.seed, made.sampling_params.temperature = i, 1.0
        made.sampling_params.max_tokens, made.sampling_params.ignore_eos = 200, True
        requests.append(made)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wanted = list(pool.map(lambda each: generate(whole.stub, each), requests))
        found = _disturbed(halves, requests, tokens, lambda: halves.workers[lost].stop(signal.SIGKILL))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.text for each in found] == [each.text for each in wanted]
    assert all(each.finish is not None and each.finish.exact for each in found)
    halves.workers[lost].start()
    halves.workers[lost].wait_serving()
    wait_workers(halves, 2)
    check_left(halves)


def _disturbed(
    service: Service, requests: list[pb.GenerateRequest], tokens: int, fault: Callable[[], object]
) -> list[Answer]:
    """Runs all requests at once, with a fault once the first of them has `tokens` tokens."""
    is_due = threading.Semaphore(0)

    def ask(asked: pb.GenerateRequest) -> Answer:
        answer = Answer()
        parts = service.stub.Generate(asked, timeout=300)
        for part in parts:
            answer.add(part)
            if len(answer.token_ids) >= tokens:
                is_due.release()
        assert answer.finish is not None
        return answer

    with ThreadPoolExecutor(len(requests)) as pool:
        running = [pool.submit(ask, each) for each in requests]
        assert not tokens or is_due.acquire(timeout=300)
        fault()
        return [each.result() for each in running]
