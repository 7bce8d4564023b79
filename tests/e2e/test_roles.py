"""Prefill and decode on workers of their own: answers are those of one worker for both, whoever dies."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from fissile.v1 import inference_pb2 as pb

from common.cli.core.errors import CommandError
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, free_port, generate, running_service
from tests.e2e.simulated import wait_workers
from worker.cli.worker import worker

PREFILL, DECODE = 0, 1
METRICS = free_port()
UNSHARED = "workers for prefills and decodes share no KV blocks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fleet")
    tiers = ["--kv-tiers", f"files:{folder / 'kv'}:256MiB"]
    with running_service(folder, model, roles=("prefill", "decode"), worker_options=tiers) as service:
        service.workers[DECODE].stop(signal.SIGKILL)
        service.workers[DECODE].arguments += ["--metrics-port", str(METRICS)]
        service.workers[DECODE].start()
        service.workers[DECODE].wait_serving()
        wait_workers(service, 2)
        yield service


def ask(service: Service, seed: int, *, tokens: int = 90, max_tokens: int = 12) -> Answer:
    rnd = random.Random(seed)
    params = pb.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0, ignore_eos=True)
    ids = [rnd.randrange(5, 250) for _ in range(tokens)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling_params=params)
    request.output_options.return_token_ids = True
    return generate(service.stub, request)


def finish(answer: Answer) -> tuple[str, int, bool]:
    assert answer.finish is not None
    return answer.finish.worker_id, answer.finish.attempts, answer.finish.exact


def num_files(service: Service) -> int:
    return len(list(service.router.log.parent.glob("kv/*/*.kv")))


def hits() -> int:
    """Blocks that the worker for decodes has found in the tier."""
    with urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith("fissile_engine_kv_tiers_blocks_total") and '"hit"' in line]
    return sum(int(float(line.split()[-1])) for line in found)


def finds_all_blocks(service: Service, seed: int) -> bool:
    """True if the worker for decodes finds the full blocks of 90 tokens.

    On a busy machine they may come too late, and by an earlier report the worker may seem to have no place.
    """
    found = hits()
    if (end := finish(ask(service, seed))) != ("worker-1", 2, True):
        assert end == ("worker-0", 1, True)
        return False
    give_up = time.monotonic() + 5
    # Scrapes may see the figures of a moment ago.
    while hits() < found + 5 and time.monotonic() < give_up:
        time.sleep(0.1)
    return hits() == found + 5


def test_prompt_is_computed_by_one_worker_and_answer_by_other(fleet: Service) -> None:
    before = num_files(fleet)
    assert any(finds_all_blocks(fleet, seed) for seed in range(100, 120))
    # An answer of one token stays where its prompt was computed.
    assert finish(ask(fleet, 2, max_tokens=1)) == ("worker-0", 1, True)
    assert num_files(fleet) >= before + 5
    attempts = [line for line in fleet.router.log.read_text().splitlines() if '"attempt lost"' in line]
    assert '"loss": "handed_over"' in attempts[-1]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [PREFILL, DECODE])
def test_half_without_workers_is_done_by_others(fleet: Service, lost: int) -> None:
    wanted = [ask(fleet, seed).token_ids for seed in range(10, 13)]
    fleet.workers[lost].stop(signal.SIGKILL)
    wait_workers(fleet, 1)
    left = f"worker-{1 - lost}"
    answers = [ask(fleet, seed) for seed in range(10, 13)]
    assert [answer.token_ids for answer in answers] == wanted
    assert [finish(answer) for answer in answers] == [(left, 1, True)] * 3
    fleet.workers[lost].start()
    fleet.workers[lost].wait_serving()
    wait_workers(fleet, 2)


@pytest.mark.slow
def test_halves_with_different_tiers_are_named_and_answer(fleet: Service, tmp_path: Path) -> None:
    decode = fleet.workers[DECODE]
    own, place = list(decode.arguments), decode.arguments.index("--kv-tiers") + 1
    wanted = [ask(fleet, seed).token_ids for seed in range(20, 23)]
    for tiers, is_named in ((f"files:{tmp_path}:64MiB", True), (own[place], False)):
        decode.stop(signal.SIGKILL)
        wait_workers(fleet, 1)
        seen = len(fleet.router.log.read_text())
        decode.arguments = [*own[:place], tiers, *own[place + 1 :]]
        decode.start()
        decode.wait_serving()
        wait_workers(fleet, 2)
        assert [ask(fleet, seed).token_ids for seed in range(20, 23)] == wanted
        end = time.monotonic() + 60
        # Log lines are written behind the answers.
        while is_named and UNSHARED not in fleet.router.log.read_text()[seen:]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (UNSHARED in fleet.router.log.read_text()[seen:]) == is_named


def test_role_without_shared_tier_is_refused(model: Path) -> None:
    arguments = ["--model", str(model), "--port", str(free_port()), "--role", "prefill", "--kv-tiers", "memory:1GiB"]
    done = CliRunner().invoke(worker, arguments)
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == "--role needs --kv-tiers that workers share, where the other half finds the blocks"
