"""Real workers over a real Mooncake Store: they share blocks, and its master's death changes no answer."""

from __future__ import annotations

import random
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.params.sampling_params import SamplingParams
from common.telemetry import names
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, free_port, generate, running_service
from tests.e2e.simulated import wait_workers
from tests.e2e.tier_storm import OPTIONS, ROUTER_OPTIONS, check_counts, storm
from tests.e2e.tier_storm import REQUESTS as STORM_REQUESTS
from tests.peers.mooncake import LIMIT_S, MooncakeMaster, running_master, wait_until
from tests.scraped import read_text
from tests.unit.worker.kv_tiers.test_tiered_engine import REQUESTS as ENGINE_REQUESTS
from tests.unit.worker.kv_tiers.test_tiered_engine import run_damaged
from worker.kv_tiers import mooncake_tier
from worker.kv_tiers.mooncake_process import MooncakeSettings
from worker.kv_tiers.mooncake_tier import MooncakeTier
from worker.kv_tiers.tiers import FAILED, HIT, STORED
from worker.llm_engine import LLMEngine, default_config

pytestmark = pytest.mark.long

RND = random.Random(7)
PROMPT = [RND.randrange(5, 250) for _ in range(100)]
# All full blocks but one token.
CACHED = 96
# Workers of interpreters of their own, which find the library by their environment (tests/e2e/forked.py).
OWN = {"OMP_NUM_THREADS": "2"}
SETTINGS: dict[str, Any] = {"max_tokens": 8, "seed": 3, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeMaster]:
    with running_master(tmp_path) as found:
        for key, value in found.variables.items():
            monkeypatch.setenv(key, value)
        yield found


@pytest.fixture
def owner(master: MooncakeMaster) -> Iterator[MooncakeTier]:
    """A client that gives the store its memory, and outlives the workers."""
    tier = MooncakeTier(MooncakeSettings(f"127.0.0.1:{master.port}", 64 << 20), 1 << 20)
    wait_until(lambda: keeps(tier))
    yield tier
    tier.close()


class Store:
    """The values of the store, as `owner` finds them."""

    def __init__(self, master: MooncakeMaster, tier: MooncakeTier) -> None:
        self.master = master
        self.tier = tier

    def names(self) -> set[bytes]:
        found = {bytes.fromhex(key.removeprefix("fissile:kv:")) for key in self.master.stored_keys()}
        return found - {bytes(24)}

    def read(self, name: bytes) -> bytes | None:
        return self.tier.get(name)

    def replace(self, name: bytes, value: bytes) -> None:
        # The store keeps the first value of a name.
        self.tier.drop(name)
        self.tier.put(name, b"", value)


def keeps(tier: MooncakeTier) -> bool:
    try:
        return tier.put(bytes(24), b"", b"value") and tier.get(bytes(24)) == b"value"
    except Exception:
        return False


def ask(service: Service, tokens: list[int]) -> Answer:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling_params=pb.SamplingParams(**SETTINGS))
    request.output_options.return_token_ids = True
    return generate(service.stub, request)


def has_asked(service: Service) -> bool:
    """True once a new prompt is answered."""
    return ask(service, [RND.randrange(5, 250) for _ in range(40)]).finish is not None


def cached(answer: Answer) -> int:
    assert answer.prompt_info is not None
    return answer.prompt_info.cached_tokens


def wanted(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Answers of an engine without tiers."""
    params = SamplingParams(**SETTINGS)
    return [each["token_ids"] for each in LLMEngine(default_config(str(model))).generate(prompts, params)]


def blocks(port: int, result: str) -> float:
    """Blocks of the tier with this result, as a worker's metrics count them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
        families = read_text(answer.read().decode())
    name = names.ENGINE_TIER_BLOCKS.replace(".", "_")
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(name) and sample.labels.get("fissile_tier_result") == result
    )


@pytest.mark.usefixtures("owner")
def test_blocks_of_killed_worker_are_found_by_its_successor(
    model: Path, tmp_path: Path, master: MooncakeMaster
) -> None:
    before, metrics_port = master.num_values(), free_port()
    options = ["--kv-tiers", f"memory:16MiB,{master.tier}", "--metrics-port", str(metrics_port)]
    with running_service(tmp_path, model, worker_options=options, environment=OWN) as service:
        [worker] = service.workers

        def comes_from_store() -> bool:
            """True if blocks came from the store; a prompt waits for them no longer than computing them takes."""
            with grpc.insecure_channel(worker.address) as channel:
                WorkerServiceStub(channel).FlushCache(wpb.FlushCacheRequest(), timeout=LIMIT_S)
            answer = ask(service, PROMPT)
            assert answer.token_ids == first.token_ids
            return cached(answer) == CACHED and blocks(metrics_port, HIT) >= CACHED // 16

        first = ask(service, PROMPT)
        assert cached(first) == 0
        wait_until(lambda: master.num_values() >= before + CACHED // 16)
        worker.stop(signal.SIGKILL)
        worker.start()
        worker.wait_serving()
        wait_workers(service, 1)
        wait_until(comes_from_store)


def test_master_that_stops_and_dies_changes_no_token(model: Path, tmp_path: Path, master: MooncakeMaster) -> None:
    beginnings = [[RND.randrange(5, 250) for _ in range(64)] for _ in range(4)]
    prompts = [[*RND.choice(beginnings), *(RND.randrange(5, 250) for _ in range(20))] for _ in range(90)]
    metrics_port = free_port()
    # A pool that holds few of the prompts, so that blocks come from the store.
    options = ["--kv-tiers", f"{master.tier}?segment=64MiB", "--kv-cache-memory", "1MiB"]
    options += ["--metrics-port", str(metrics_port)]
    expected = wanted(model, prompts)
    with running_service(tmp_path, model, worker_options=options, environment=OWN) as service:
        # The client's process may take longer to join the store than the first blocks wait.
        wait_until(lambda: has_asked(service) and blocks(metrics_port, STORED) > 0)
        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(ask, service, prompt) for prompt in prompts]
            for place, sent in ((20, signal.SIGSTOP), (40, signal.SIGCONT), (60, signal.SIGKILL)):
                running[place].result()
                master.send(sent)
            assert [each.result().token_ids for each in running] == expected
        wait_until(lambda: has_asked(service) and blocks(metrics_port, FAILED) > 0)


def faults(master: MooncakeMaster, count: int) -> dict[int, Callable[[], object]]:
    """A hang, a death and a new start of the master, by the number of answers before."""
    return {
        count // 4: lambda: master.send(signal.SIGSTOP),
        count // 3: lambda: master.send(signal.SIGCONT),
        count // 2: lambda: master.send(signal.SIGKILL),
        count * 2 // 3: master.start,
    }


def test_storm_over_store_whose_master_hangs_and_dies_changes_no_token(
    model: Path, tmp_path: Path, master: MooncakeMaster, owner: MooncakeTier
) -> None:
    options = [*OPTIONS, "--kv-tiers", f"memory:256KiB,{master.tier}?segment=16MiB"]
    with running_service(
        tmp_path, model, workers=2, worker_options=options, router_options=ROUTER_OPTIONS, environment=OWN
    ) as service:
        counts = storm(service, model, Store(master, owner), faults(master, STORM_REQUESTS))
    check_counts(counts, has_failures=True)


# 3,000 requests.
@pytest.mark.parametrize("seed", range(10))
def test_each_fault_of_store_is_counted_and_changes_no_token(
    master: MooncakeMaster, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_tier, "TIMEOUT_S", 0.2)
    tier = MooncakeTier(MooncakeSettings(f"127.0.0.1:{master.port}", 64 << 20), 1 << 20)
    wait_until(lambda: keeps(tier))
    run_damaged("mooncake", tier, seed, faults(master, ENGINE_REQUESTS))


def test_prompt_moves_from_prefill_to_decode_worker(model: Path, tmp_path: Path, master: MooncakeMaster) -> None:
    prompts = [[RND.randrange(5, 250) for _ in range(100)] for _ in range(80)]
    expected = wanted(model, prompts)
    options = ["--kv-tiers", f"{master.tier}?segment=64MiB"]
    roles = ("prefill", "decode")
    with running_service(tmp_path, model, roles=roles, worker_options=options, environment=OWN) as service:
        decode, metrics_port = service.workers[1], free_port()
        decode.stop(signal.SIGKILL)
        decode.arguments += ["--metrics-port", str(metrics_port)]
        decode.start()
        decode.wait_serving()
        wait_workers(service, 2)
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = ask(service, prompt)
            assert answer.token_ids == tokens
            assert answer.finish is not None
            assert (answer.finish.worker_id, answer.finish.attempts, answer.finish.exact) == ("worker-1", 2, True)
        # The decode worker may compute a prompt whose blocks are late, but not all of them.
        assert blocks(metrics_port, HIT) > 0
