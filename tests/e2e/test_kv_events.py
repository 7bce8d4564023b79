"""KV events end to end: two routers and two workers as processes; what one router warms, the other finds."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from tests.e2e.service import Answer, Process, Service, free_port, generate, running_service
from tests.e2e.simulated import CONFIG, OPTIONS, request, simulated_model, wait_workers
from tests.fake_dns import wait_until
from tests.scraped import scrape
from tests.unit.router.support import EOS
from worker.simulation.runner import SimulatedRunner

GRANULE = 128
# A pool of 200 blocks: 25 granules.
POOL = ["--kv-cache-memory", "1600KiB"]
PREFIX_GRANULES = 6
SEED = 5
MODEL = SimulatedRunner(int(str(CONFIG["vocab_size"])), EOS)


@dataclass
class Fleet:
    """Two workers, and two routers that share nothing else."""

    service: Service
    other: InferenceServiceStub

    def ask(self, stub: InferenceServiceStub, prompt: list[int]) -> Answer:
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        asked.sampling_params.max_tokens = 2
        asked.sampling_params.seed = SEED
        asked.sampling_params.ignore_eos = True
        asked.output_options.return_token_ids = True
        return generate(stub, asked)

    def warm(self, index: int, prompt: list[int]) -> None:
        """Gives a worker a prompt that no router knows of."""
        params = wpb.SamplingParams(top_p=1.0, repetition_penalty=1.0, max_tokens=1)
        with grpc.insecure_channel(self.service.workers[index].address) as channel:
            list(WorkerServiceStub(channel).Generate(wpb.GenerateRequest(token_ids=prompt, params=params), timeout=60))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("kv")
    model = simulated_model(folder / "model")
    with running_service(folder, model, workers=2, worker_options=[*OPTIONS, *POOL]) as service:
        port = free_port()
        addresses = [part for worker in service.workers for part in ("--worker", worker.address)]
        router = Process("other", ["router", "--port", str(port), *addresses], port, folder / "other.log")
        router.start()
        try:
            router.wait_serving()
            with grpc.insecure_channel(router.address) as channel:
                wait_workers(service, 2)
                wait_workers(Service(router, service.workers, channel), 2)
                yield Fleet(service, InferenceServiceStub(channel))
        finally:
            router.running.kill()
            router.running.wait()


def prefix(seed: int) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(256) for _ in range(PREFIX_GRANULES * GRANULE)]


def test_evicted_prompts_go_to_the_worker_that_has_them_in_memory(tmp_path: Path) -> None:
    """A KV cache has room for two prompts, a memory tier for all. Each worker is warmed without the router."""
    model, metrics = simulated_model(tmp_path / "model"), free_port()
    options = [*OPTIONS, "--kv-cache-memory", "512KiB", "--kv-tiers", "memory:64MiB"]
    with running_service(
        tmp_path, model, workers=2, worker_options=options, router_options=["--metrics-port", str(metrics)]
    ) as service:
        wait_workers(service, 2)
        fleet = Fleet(service, service.stub)
        for round_, _ in enumerate(PAUSES_S, 1):
            prompts = [prefix(300 + 10 * round_ + seed) for seed in range(8)]
            for place, prompt in enumerate(prompts):
                fleet.warm(place // 4, [*prompt, 7])
            wait_until(lambda: tier_prefixes(metrics) == 8 * PREFIX_GRANULES * round_)  # noqa: B023
            asked = [[*prompts[place], 7] for place in (4, 0, 1, 5, 6, 2)]
            answers = [fleet.ask(service.stub, prompt) for prompt in asked]
            # Tokens of the simulated model follow from the whole prompt, and so from the blocks that a tier gave back.
            assert [answer.token_ids for answer in answers] == [MODEL.reference(prompt, 2, SEED) for prompt in asked]
            hits = [found(answer) for answer in answers]
            if hits == [(f"worker-{index}", PREFIX_GRANULES * GRANULE) for index in (1, 0, 0, 1, 1, 0)]:
                return
    raise AssertionError(hits)


def tier_prefixes(port: int) -> float:
    """Granules that a router knows to be in memory tiers."""
    tables = scrape(port)["fissile_router_tables"]
    return sum(value for labels, value in tables if labels["fissile_table"] == "tier_prefixes")


# Many times longer than events take, so that a busy machine does not matter.
SETTLE_S = 8.0
# A busy machine needs the longer ones.
PAUSES_S = (0.5, 2.0, 8.0, 32.0)


def found(answer: Answer) -> tuple[str, int]:
    """Worker of an answer, and tokens that it had in its cache."""
    assert answer.finish is not None
    assert answer.prompt_info is not None
    return answer.finish.worker_id, answer.prompt_info.cached_tokens


def test_router_uses_cache_warmed_by_other_router(fleet: Fleet) -> None:
    for pause_s, first in zip(PAUSES_S, range(0, 100, 10), strict=False):
        prompts = [prefix(seed) for seed in range(first, first + 4)]
        homes = [found(fleet.ask(fleet.service.stub, [*prompt, 7]))[0] for prompt in prompts]
        time.sleep(pause_s)
        hits = [found(fleet.ask(fleet.other, [*prompt, 9, 9])) for prompt in prompts]
        if hits == [(home, PREFIX_GRANULES * GRANULE) for home in homes]:
            return
    raise AssertionError(f"caches of {homes}: {hits}")


def test_both_routers_learn_evictions(fleet: Fleet) -> None:
    """Both routers look for blocks evicted by worker 0 at worker 1, which has them by then."""
    for pause_s, first in zip(PAUSES_S, range(100, 200, 10), strict=False):
        rounds = [prefix(seed) for seed in range(first, first + 3)]
        for round_, hot in enumerate(rounds):
            fleet.warm(0, hot)
            for seed in range(6):
                fleet.warm(0, prefix(10 * (first + round_) + seed))
            fleet.warm(1, hot)
        time.sleep(pause_s)
        stubs = (fleet.service.stub, fleet.other)
        hits = [found(fleet.ask(stub, [*hot, 5])) for hot in rounds for stub in stubs]
        if hits == [("worker-1", PREFIX_GRANULES * GRANULE)] * 6:
            return
    raise AssertionError(f"not those of worker-1: {hits}")


@pytest.mark.slow
def test_changed_placement_learns_caches_during_streams(tmp_path: Path) -> None:
    """No Session breaks, and prefixes are found. Formerly a change of placement broke the Session with every worker."""
    model, port = simulated_model(tmp_path / "model"), free_port()
    options = ["--placement", "round_robin", "--admin-port", str(port)]
    worker_options = [*OPTIONS, "--kv-cache-memory", "16MiB"]
    with (
        running_service(tmp_path, model, workers=2, worker_options=worker_options, router_options=options) as service,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ThreadPoolExecutor(4) as pool,
    ):
        fleet, admin = Fleet(service, service.stub), AdminServiceStub(channel)
        wait_workers(service, 2)
        homes = [fleet.ask(service.stub, [*prefix(seed), 7]).finish for seed in range(4)]
        before = [generate(service.stub, request(i, 700)).token_ids for i in range(4)]
        running = [pool.submit(generate, service.stub, request(i, 700)) for i in range(4)]

        def are_running() -> bool:
            return sum(worker.running for worker in admin.ListWorkers(apb.ListWorkersRequest()).workers) == 4

        def connections() -> list[int]:
            log = service.router.log.read_text()
            return [log.count(event) for event in ("worker up", "worker not usable")]

        wait_until(are_running)
        connected = connections()
        for placement in ("least_loaded", "prefix_aware"):
            admin.SetRouting(apb.SetRoutingRequest(routing=apb.Routing(placement=placement)), timeout=60)
        assert [answer.result().token_ids for answer in running] == before
        time.sleep(SETTLE_S)
        for seed, home in enumerate(homes):
            assert home is not None
            answer = fleet.ask(service.stub, [*prefix(seed), 9, 9])
            assert answer.finish is not None
            assert (answer.finish.worker_id, answer.finish.usage.cached_tokens) == (
                home.worker_id,
                PREFIX_GRANULES * GRANULE,
            )
        assert connections() == connected


@pytest.mark.slow
def test_restarted_worker_has_empty_cache(fleet: Fleet) -> None:
    hot = [prefix(200 + i) for i in range(3)]
    for each in hot:
        fleet.warm(1, each)
    time.sleep(SETTLE_S)
    worker = fleet.service.workers[1]
    worker.running.kill()
    worker.running.wait()
    worker.start()
    worker.wait_serving()
    wait_workers(fleet.service, 2)
    for each in hot:
        fleet.warm(0, each)
    time.sleep(SETTLE_S)
    for each in hot:
        answer = fleet.ask(fleet.other, [*each, 3])
        assert answer.finish is not None
        assert answer.finish.worker_id == "worker-0"
