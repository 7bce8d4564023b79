"""A router's Dispatcher over real engines in virtual time: discrete events, every worker with a clock of its own.

Real: Dispatcher, queue, lanes, placement; EngineCore, Scheduler, BlockManager. Simulated: time, the model, and the
wire, which is a constant delay each way. Workers compute at the same time, which a single virtual loop can not show.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.block_hash import hash_chain
from common.config import Config
from common.delay_gate import DelayGate
from common.sampling_params import SamplingParams
from router.dispatcher import Dispatcher, Release
from router.fair_queue import QueuedRequest
from router.lane import LoadReport
from router.placement import PLACEMENTS
from router.prefix_index import GRANULE_BLOCKS
from worker.batch import RequestOutput
from worker.cost_model import CostModel
from worker.engine_core import EngineCore
from worker.sequence import Sequence as EngineSequence
from worker.simulated import SimulatedRunner

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
WIRE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with Poisson arrivals; each begins with one of `prefixes` and goes on with tokens of its own."""

    requests: int = 800
    rate: float = 100.0
    prefixes: int = 48
    prefix_tokens: int = 2048
    own_tokens: int = 200
    output_tokens: int = 32
    # Exponent of the prefixes' popularity (Zipf); 0 is uniform.
    skew: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What became of a request; times in virtual seconds."""

    arrival: float
    worker: str = ""
    ttft_s: float = 0.0
    cached_tokens: int = 0
    ended: float = 0.0


@dataclass(slots=True)
class Result:
    """Of one run."""

    outcomes: list[Outcome] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def saved(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return sum(outcome.cached_tokens for outcome in self.outcomes) / self.prompt_tokens

    def ttft_s(self, quantile: float) -> float:
        """Time from arrival to the first token."""
        times = sorted(outcome.ttft_s for outcome in self.outcomes)
        return times[min(len(times) - 1, int(quantile * len(times)))]

    @property
    def duration_s(self) -> float:
        """Until the last request ended."""
        return max(outcome.ended for outcome in self.outcomes)


class _Worker:
    """An engine with its own time."""

    def __init__(self, name: str, config: Config, cost: CostModel) -> None:
        self.name = name
        self.now = 0.0
        self.seen = 0
        self.is_stepping = False
        runner = SimulatedRunner(
            VOCAB_SIZE,
            None,
            cost,
            block_size=BLOCK_SIZE,
            num_blocks=config.num_kvcache_blocks,
            check_contexts=False,
            clock=lambda: self.now,
            sleep=self._sleep,
        )
        self.core = EngineCore(config, runner, lambda: self.now)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def report(self, now: float) -> LoadReport:
        load = self.core.load()
        return LoadReport(
            time=now,
            decoding_seqs=load.decoding_seqs,
            waiting_seqs=load.waiting_seqs,
            waiting_tokens=load.waiting_tokens,
            room_tokens=load.room_tokens,
            room_seqs=load.room_seqs,
            last_prompt_latency_s=load.last_prompt_latency_s,
            prefill_rate=load.prefill_rate,
            submit_seen=self.seen,
            total_blocks=load.total_blocks,
        )


class FleetRun:
    """One life of a router and its workers."""

    def __init__(
        self, placement: str, num_workers: int, cost: CostModel, *, num_blocks: int, delay_factor: float = 0.0
    ) -> None:
        config = Config(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=num_blocks,
            enable_prefix_caching=True,
            max_model_len=4096,
        )
        self._workers = {f"w{i}": _Worker(f"w{i}", config, cost) for i in range(num_workers)}
        self._dispatcher = Dispatcher(DelayGate(delay_factor), PLACEMENTS[placement].make())
        self._events: list[tuple[float, int, object]] = []
        self._serial = itertools.count()
        self._sequences: dict[int, EngineSequence] = {}
        self._outcomes: dict[int, Outcome] = {}
        for worker in self._workers.values():
            self._dispatcher.lane_up(worker.name, "m", worker.report(0.0), 0.0)

    def run(self, workload: Workload, seed: int = 0) -> Result:
        """Serves a workload to its end."""
        result = Result()
        for request, sequence in _requests(workload, seed):
            self._sequences[request.key] = sequence
            self._outcomes[request.key] = Outcome(request.arrival)
            result.prompt_tokens += request.tokens
            self._at(request.arrival, request)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            match event:
                case QueuedRequest():
                    self._dispatcher.arrive(event, now)
                case (_Worker() as worker, Release() as release):
                    self._submit(worker, release, now)
                case (_Worker() as worker, list() as outputs):
                    self._stepped(worker, outputs, now)
            for release in self._dispatcher.decide(now):
                self._at(now + WIRE_S, (self._workers[release.worker], release))
        assert len(self._dispatcher) == 0
        result.outcomes = list(self._outcomes.values())
        return result

    def _at(self, time: float, event: object) -> None:
        heapq.heappush(self._events, (time, next(self._serial), event))

    def _submit(self, worker: _Worker, release: Release, now: float) -> None:
        worker.seen = release.serial
        for request in release.requests:
            self._outcomes[request.key].worker = worker.name
        worker.core.add_group([self._sequences[request.key] for request in release.requests])
        self._step(worker, now)

    def _step(self, worker: _Worker, now: float) -> None:
        if worker.is_stepping or not worker.core.has_unfinished():
            return
        worker.is_stepping = True
        worker.now = now
        outputs = worker.core.step().outputs
        self._at(worker.now, (worker, outputs))

    def _stepped(self, worker: _Worker, outputs: list[RequestOutput], now: float) -> None:
        worker.is_stepping = False
        for output in outputs:
            outcome, sequence = self._outcomes[output.request_id], self._sequences[output.request_id]
            if not outcome.ttft_s:
                outcome.ttft_s = now + WIRE_S - outcome.arrival
                outcome.cached_tokens = sequence.num_cached_tokens
            if output.finished:
                outcome.ended = now + WIRE_S
        self._dispatcher.report(worker.name, worker.report(now))
        self._step(worker, now)


def _requests(workload: Workload, seed: int) -> list[tuple[QueuedRequest, EngineSequence]]:
    rnd = random.Random(seed)
    prefixes = [_tokens(rnd, workload.prefix_tokens) for _ in range(workload.prefixes)]
    weights = [1 / (1 + i) ** workload.skew for i in range(workload.prefixes)]
    made: list[tuple[QueuedRequest, EngineSequence]] = []
    arrival = 0.0
    for key in range(workload.requests):
        arrival += rnd.expovariate(workload.rate)
        prompt = rnd.choices(prefixes, weights)[0] + _tokens(rnd, workload.own_tokens)
        granules = hash_chain(prompt, BLOCK_SIZE)[GRANULE_BLOCKS - 1 :: GRANULE_BLOCKS]
        params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
        sequence = EngineSequence(prompt, BLOCK_SIZE, params, id=key, arrive_time=arrival)
        size = GRANULE_BLOCKS * BLOCK_SIZE
        queued = QueuedRequest(key, "m", len(prompt), arrival, granules=granules, granule_tokens=size)
        made.append((queued, sequence))
    return made


def _tokens(rnd: random.Random, count: int) -> list[int]:
    return rnd.choices(range(2, VOCAB_SIZE), k=count)


def spread(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Fewest and most requests on a worker that had any."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.worker] = counts.get(outcome.worker, 0) + 1
    return min(counts.values()), max(counts.values())
