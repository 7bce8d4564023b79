"""Routers' Dispatchers over real engines in virtual time: discrete events, every worker with a clock of its own.

Real: Dispatcher, queue, lanes, placement, KvEventCursor; EngineTurns, EngineCore, Scheduler, BlockManager, KvLog.
Simulated: time, the model, and the wire, which is a constant delay each way. Workers compute at the same time, which a
single virtual loop cannot show.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import Config
from common.delay_gate import DelayGate
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain
from router.scheduling.dispatcher import Dispatcher, Release
from router.scheduling.placement import PLACEMENTS, CacheChange
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_dispatcher
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.turns import Command, EngineTurns, Submit, TicketReceipt, Turn
from worker.session.cache_events import KvCursor, KvLog
from worker.simulation.cost_model import CostModel
from worker.simulation.runner import SimulatedRunner

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
WIRE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with Poisson arrivals; each starts with one of `prefixes` and continues with its own tokens."""

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
    """An engine with its own time, and what each router has yet to hear of its cache."""

    def __init__(self, name: str, config: Config, cost: CostModel, num_routers: int) -> None:
        self.name = name
        self.now = 0.0
        self.seen = [0] * num_routers
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
        self.turns = EngineTurns(self.core, lambda: self.now)
        self.kv_log = KvLog()
        self.cursors = [KvCursor(self.kv_log, 0, lambda: None) for _ in range(num_routers)]
        self.is_due = [False] * num_routers
        self.commands: list[Command] = []

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def report(self, now: float, router: int) -> LoadReport:
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
            prefill_samples=load.prefill_samples,
            submit_seen=self.seen[router],
        )


class FleetRun:
    """One life of routers and their workers. Requests go to the routers in turn.

    Args:
        placement: policy of the routers.
        costs: of each worker.
        num_blocks: KV blocks of each worker.
        delay_factor: of the routers' gates.
        num_routers: they share nothing but the workers.
    """

    def __init__(
        self,
        placement: str,
        costs: Sequence[CostModel],
        *,
        num_blocks: int,
        delay_factor: float = 0.0,
        num_routers: int = 1,
    ) -> None:
        config = Config(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=num_blocks,
            enable_prefix_caching=True,
            max_model_len=4096,
        )
        self._workers = {f"w{i}": _Worker(f"w{i}", config, cost, num_routers) for i, cost in enumerate(costs)}
        self._routers = [make_dispatcher(DelayGate(delay_factor), PLACEMENTS[placement]()) for _ in range(num_routers)]
        self._events: list[tuple[float, int, object]] = []
        self._serial = itertools.count()
        self._requests: dict[int, QueuedRequest] = {}
        self._sequences: dict[int, EngineSequence] = {}
        self._outcomes: dict[int, Outcome] = {}
        for worker, (i, router) in itertools.product(self._workers.values(), enumerate(self._routers)):
            router.lane_up(worker.name, "m", worker.report(0.0, i), 0.0)

    def run(self, workload: Workload, seed: int = 0) -> Result:
        """Serves a workload to its end."""
        result = Result()
        for request, sequence in _requests(workload, seed):
            self._requests[request.key] = request
            self._sequences[request.key] = sequence
            self._outcomes[request.key] = Outcome(request.arrival)
            result.prompt_tokens += request.tokens
            self._at(request.arrival, request)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            match event:
                case QueuedRequest():
                    self._router_of(event.key).arrive(event, now)
                case (_Worker() as worker, int() as router, Release() as release):
                    self._submit(worker, router, release, now)
                case (_Worker() as worker, Turn() as turn):
                    self._stepped(worker, turn, now)
                case (_Worker() as worker, int() as router):
                    self._tell(worker, router, now)
            for i, dispatcher in enumerate(self._routers):
                for release in dispatcher.decide(now):
                    self._at(now + WIRE_S, (self._workers[release.worker], i, release))
        assert not any(len(router) for router in self._routers)
        result.outcomes = list(self._outcomes.values())
        return result

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Of `StepListener`."""

    def _at(self, time: float, event: object) -> None:
        heapq.heappush(self._events, (time, next(self._serial), event))

    def _submit(self, worker: _Worker, router: int, release: Release, now: float) -> None:
        worker.seen[router] = release.serial
        for request in release.requests:
            self._outcomes[request.key].worker = worker.name
        seqs = [self._sequences[request.key] for request in release.requests]
        worker.commands.append(Submit(TicketReceipt(self, release.serial), seqs))
        self._step(worker, now)

    def _step(self, worker: _Worker, now: float) -> None:
        if worker.is_stepping or not (worker.commands or worker.turns.has_work):
            return
        worker.is_stepping = True
        worker.now = now
        commands, worker.commands = worker.commands, []
        turn = worker.turns.run(commands)
        self._at(worker.now, (worker, turn))

    def _stepped(self, worker: _Worker, turn: Turn, now: float) -> None:
        worker.is_stepping = False
        for output in turn.outputs:
            outcome = self._outcomes[output.request_id]
            if output.start is not None:
                outcome.ttft_s = now + WIRE_S - outcome.arrival
                outcome.cached_tokens = output.start.cached_tokens
            if output.end is not None and outcome.ttft_s:
                outcome.ended = now + WIRE_S
            elif output.end is not None:
                self._take_back(output.request_id, worker.name, now)
        worker.kv_log.append(turn.granules)
        for i, router in enumerate(self._routers):
            router.report(worker.name, worker.report(now, i))
            self._tell(worker, i, now)
        self._step(worker, now)

    def _router_of(self, key: int) -> Dispatcher:
        return self._routers[key % len(self._routers)]

    def _take_back(self, key: int, worker: str, now: float) -> None:
        """A worker has returned a request that waited for too long (rule S9)."""
        self._sequences[key] = _copy(self._sequences[key], now)
        self._router_of(key).requeue(self._requests[key], now, excluded_worker=worker)

    def _tell(self, worker: _Worker, router: int, now: float) -> None:
        """Sends the KV events that are due, or comes back when they are."""
        cursor = worker.cursors[router]
        if (events := cursor.take(now)) is not None:
            change = CacheChange(events.stored, events.evicted, events.snapshot)
            self._routers[router].assignment.placement.cache_changed(worker.name, change)
        elif (wait := cursor.due_in(now)) < math.inf and not worker.is_due[router]:
            worker.is_due[router] = True
            self._at(now + wait, (worker, router))
            return
        worker.is_due[router] = False


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


def _copy(old: EngineSequence, now: float) -> EngineSequence:
    return EngineSequence(old.token_ids, BLOCK_SIZE, old.sampling_params, id=old.id, arrive_time=now)


def _tokens(rnd: random.Random, count: int) -> list[int]:
    return rnd.choices(range(2, VOCAB_SIZE), k=count)


def spread(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Fewest and most requests on a worker that had any."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome.worker] = counts.get(outcome.worker, 0) + 1
    return min(counts.values()), max(counts.values())
