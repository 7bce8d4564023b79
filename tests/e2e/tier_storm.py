"""Random requests over workers with KV tiers, while workers and a tier's store fail and stored blocks are damaged."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.params.sampling_params import SamplingParams
from common.telemetry import names
from tests.chaos.support import until
from tests.e2e.service import Service, free_port, generate
from tests.e2e.simulated import wait_workers
from tests.scraped import scrape
from worker.kv_tiers.tiers import DAMAGED, FAILED, HIT
from worker.llm_engine import LLMEngine, default_config

REQUESTS: Final = 3000
AT_ONCE: Final = 16
# One in this number of stored blocks is damaged.
DAMAGE_EVERY: Final = 50
# A pool of few blocks for eight running sequences, so that blocks are evicted and sequences preempted.
OPTIONS: Final = ("--max-model-len", "192", "--max-num-seqs", "8", "--kv-cache-memory", "400KiB")
# So that prompts are not placed by what the pools have, and blocks come from the tiers.
ROUTER_OPTIONS: Final = ("--placement", "least_loaded")
_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.05


class DamagedStore(Protocol):
    """A tier's store, seen by a test that damages it. Methods may raise while the store is gone."""

    def names(self) -> set[bytes]:
        """Names of the stored values."""
        ...

    def read(self, name: bytes) -> bytes | None:
        """A value, None without one."""
        ...

    def replace(self, name: bytes, value: bytes) -> None:
        """Stores another value under a name."""
        ...


@dataclass
class StormCounts:
    """Counts of a storm's events.

    Attributes:
        moved: answers that more than one worker made.
        damaged: values that the test damaged in the store.
        preemptions: sequences that lost their blocks.
        blocks: KV blocks by result, of all workers and of all tiers.
    """

    moved: int = 0
    damaged: int = 0
    preemptions: int = 0
    blocks: Counter[str] = field(default_factory=Counter)

    def add_worker(self, metrics_port: int) -> None:
        """Adds what a worker has counted since its start."""
        found = scrape(metrics_port)
        self.preemptions += int(sum(value for _, value in found[f"{_metric(names.ENGINE_PREEMPTIONS)}_total"]))
        for labels, value in found[f"{_metric(names.ENGINE_TIER_BLOCKS)}_total"]:
            self.blocks[labels[_metric(names.TIER_RESULT)]] += int(value)


class Damager:
    """Damages one in DAMAGE_EVERY of the values that appear in a store, on a thread of its own, while it is open."""

    def __init__(self, store: DamagedStore, rnd: random.Random) -> None:
        self._store = store
        self._rnd = rnd
        self._seen: set[bytes] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_damaged = 0

    def __enter__(self) -> Damager:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_POLL_S):
            try:
                # A value that left and came back is a new one.
                stored = self._store.names()
                new, self._seen = sorted(stored - self._seen), stored
                for name in new:
                    if not self._rnd.randrange(DAMAGE_EVERY):
                        self._damage(name)
            except Exception:
                # The store is gone or hangs, as the test wants.
                continue

    def _damage(self, name: bytes) -> None:
        wrong = damage(self._store, name, self._rnd)
        # Another value may be there: a worker was faster, or the store has evicted it.
        self.num_damaged += wrong is not None and self._store.read(name) == wrong


def damage(store: DamagedStore, name: bytes, rnd: random.Random) -> bytes | None:
    """Stores a value with another bit, or cut off. Returns it; None if the store has none, or an empty one."""
    value = store.read(name)
    if not value:
        return None
    place = rnd.randrange(len(value))
    flipped = value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
    wrong = rnd.choice([value[:place], flipped])
    store.replace(name, wrong)
    return wrong


def random_requests(rnd: random.Random, count: int) -> list[pb.GenerateRequest]:
    """Requests whose prompts have beginnings in common, and come several times."""
    beginnings = [[rnd.randrange(5, 250) for _ in range(rnd.choice([16, 40, 64, 96]))] for _ in range(12)]
    prompts = [
        [*rnd.choice(beginnings), *(rnd.randrange(5, 250) for _ in range(rnd.randint(1, 50)))] for _ in range(150)
    ]
    found = []
    for seed in range(count):
        made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=rnd.choice(prompts)))
        params = made.sampling_params
        params.seed, params.temperature = seed, rnd.choice([0.0, 1.0])
        params.max_tokens, params.ignore_eos = rnd.randint(1, 24), True
        made.output_options.return_token_ids = True
        if rnd.random() < 0.1:
            made.cache_salt = "salt"
        found.append(made)
    return found


def answers_without_tiers(model: Path, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    """The tokens of each answer, from an engine without tiers."""
    params = [
        SamplingParams(
            seed=each.sampling_params.seed,
            temperature=each.sampling_params.temperature,
            max_tokens=each.sampling_params.max_tokens,
            ignore_eos=True,
        )
        for each in requests
    ]
    engine = LLMEngine(default_config(model))
    try:
        return [each["token_ids"] for each in engine.generate([list(each.token_ids.ids) for each in requests], params)]
    finally:
        engine.close()


def give_metrics_ports(service: Service) -> list[int]:
    """Starts the workers again, with ports for their metrics."""
    ports = []
    for worker in service.workers:
        worker.stop(signal.SIGKILL)
        ports.append(free_port())
        worker.arguments += ["--metrics-port", str(ports[-1])]
        worker.start()
    for worker in service.workers:
        worker.wait_serving()
    wait_workers(service, len(service.workers))
    return ports


def storm(
    service: Service, model: Path, store: DamagedStore, faults: Mapping[int, Callable[[], object]]
) -> StormCounts:
    """Has all requests answered, and compares each answer with that of an engine without tiers.

    Each worker is killed twice, and started again while the others answer.

    Args:
        service: its workers have a tier in the store.
        model: checkpoint of the service.
        store: of the tier.
        faults: of the store, by the number of the request whose answer they follow.
    """
    rnd, counts, ports = random.Random(11), StormCounts(), give_metrics_ports(service)
    requests = random_requests(rnd, REQUESTS)
    wanted = answers_without_tiers(model, requests)

    def ask(number: int) -> int:
        answer = generate(service.stub, requests[number], _TIMEOUT_S)
        assert answer.token_ids == wanted[number], number
        assert answer.finish is not None
        assert answer.finish.exact, number
        return answer.finish.attempts

    def lose(worker: int) -> None:
        counts.add_worker(ports[worker])
        service.workers[worker].stop(signal.SIGKILL)
        service.workers[worker].start()
        service.workers[worker].wait_serving()
        wait_workers(service, len(service.workers))

    deaths = {REQUESTS * (2 * i + 1) // 8: (lambda i=i: lose(i % len(service.workers))) for i in range(4)}
    with Damager(store, random.Random(12)) as damager, ThreadPoolExecutor(AT_ONCE) as pool:
        running = [pool.submit(ask, number) for number in range(REQUESTS)]
        for number, fault in sorted([*deaths.items(), *faults.items()]):
            running[number].result()
            fault()
        attempts = [each.result() for each in running]
    find_damage(service, store, lambda: ask(0), ports)
    for index, port in enumerate(ports):
        load = service.wait_idle(index)
        assert load.free_blocks == load.total_blocks
        counts.add_worker(port)
    counts.moved, counts.damaged = sum(each > 1 for each in attempts), damager.num_damaged
    return counts


def find_damage(service: Service, store: DamagedStore, ask: Callable[[], object], ports: list[int]) -> None:
    """Damages all values and has a request answered, until a worker has counted one of them.

    Tiers may rest for half a minute after the storm.
    """

    def num_damaged() -> int:
        counts = StormCounts()
        for port in ports:
            counts.add_worker(port)
        return counts.blocks[DAMAGED]

    def is_found() -> bool:
        # The test's client may have to join the store again.
        with contextlib.suppress(Exception):
            for name in store.names():
                damage(store, name, rnd)
        for worker in service.workers:
            with grpc.insecure_channel(worker.address) as channel:
                WorkerServiceStub(channel).FlushCache(wpb.FlushCacheRequest(), timeout=_TIMEOUT_S)
        ask()
        return num_damaged() > before

    before, rnd = num_damaged(), random.Random(13)
    until(is_found, _TIMEOUT_S)


def check_counts(counts: StormCounts, *, has_failures: bool) -> None:
    """Prints the counts, and checks that every kind of event happened and that workers counted hits and faults."""
    print(f"{REQUESTS} requests, no changed token, none failed: {counts}")
    assert counts.moved > 0
    assert counts.preemptions > 0
    assert counts.damaged > 0
    assert counts.blocks[HIT] > 0
    assert counts.blocks[DAMAGED] > 0
    assert (counts.blocks[FAILED] > 0) == has_failures


def _metric(name: str) -> str:
    return name.replace(".", "_")
