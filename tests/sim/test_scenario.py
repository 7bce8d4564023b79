"""Random requests, cancels, deadlines and broken streams: every answer is right, and no state remains."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, field
from functools import partial

import pytest
import xxhash
from fissile.receipts import RequestDigest
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError, DeadlineError, HopelessDeadlineError
from common.limits import LEASE_S
from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain
from router.answers.logit_digests import LogitChain
from router.answers.stream_assembly import StreamAssembly
from router.requests.stream import ReceiptTerms, RoutedRequest
from tests.covering import slow_but
from tests.sim.service import EOS_ID, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, SimService
from tests.sim.virtual_time import VirtualLoop, run

NUM_REQUESTS = 40
# Stands for the part of receipts that is not looked at here.
NO_REQUEST = RequestDigest([], pb.SamplingParams(), 0, continues=True)


@dataclass
class Outcome:
    """What one client got."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list)
    reason: pb.FinishReason.ValueType | None = None
    error: ApiError | None = None
    cancelled: bool = False
    logits_every: int = 0
    logits: pb.Receipt | None = None

    @property
    def terminals(self) -> int:
        """How many ends the client saw."""
        return (self.reason is not None) + (self.error is not None) + self.cancelled


class Scenario:
    """One life of a service and its clients."""

    def __init__(
        self,
        seed: int,
        *,
        delay_factor: float = 0.0,
        breaks: int = 0,
        crashes: int = 0,
        freezes: int = 0,
        cordons: int = 0,
        deadlines: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        self.rnd = random.Random(seed)
        self.loop = VirtualLoop()
        self.delay_factor = delay_factor
        self.breaks = breaks
        self.crashes = crashes
        self.freezes = freezes
        self.cordons = cordons
        self.deadlines = deadlines
        self.lease_s = lease_s
        self.prefixes = [self.tokens(self.rnd.randrange(16, 120)) for _ in range(4)]
        self.outcomes: list[Outcome] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rnd.randrange(2, VOCAB_SIZE) for _ in range(count)]

    async def live(self) -> SimService:
        service = SimService(
            self.loop, self.rnd, delay_factor=self.delay_factor, lease_s=self.lease_s, worker_wait_s=20.0
        )
        await asyncio.sleep(0.2)
        clients = [asyncio.create_task(self.client(service, i)) for i in range(NUM_REQUESTS)]
        cancels = [self.loop.call_later(self.rnd.uniform(0, 3), client.cancel) for client in clients[::3]]
        faults = [service.break_connection] * self.breaks + [service.crash] * self.crashes
        for fault in [*faults, *[service.freeze] * self.freezes, *[service.cordon] * self.cordons]:
            self.loop.call_later(self.rnd.uniform(0.2, 2.5), fault, self.rnd.randrange(2))
        _, hanging = await asyncio.wait(clients, timeout=60)
        assert not hanging, "hang"
        for cancel in cancels:
            cancel.cancel()
        for client in clients:
            assert client.cancelled() or client.exception() is None, client.exception()
        # Longer than any freeze, restart and lease.
        await asyncio.sleep(12)
        service.check_nothing_left()
        return service

    async def client(self, service: SimService, i: int) -> None:
        prompt = self.rnd.choice(self.prefixes)[: self.rnd.randrange(1, 120)] + self.tokens(self.rnd.randrange(1, 60))
        params = SamplingParams(max_tokens=self.rnd.randrange(1, MAX_MODEL_LEN - len(prompt)))
        outcome = Outcome(prompt, params, seed=i, logits_every=i % 4)
        deadline_after = self.rnd.uniform(0.02, 0.6) if self.deadlines and self.rnd.random() < 0.5 else None
        self.outcomes.append(outcome)
        try:
            await asyncio.sleep(self.rnd.uniform(0, 1.5))
            await self.ask(service, outcome, deadline_after)
        except ApiError as error:
            outcome.error = error
        except asyncio.CancelledError:
            outcome.cancelled = True
            raise

    async def ask(self, service: SimService, outcome: Outcome, deadline_after: float | None) -> None:
        now = self.loop.time()
        chain = hash_chain(outcome.prompt, service.block_size)
        request = RoutedRequest(
            model=MODEL,
            identity=service.identity,
            token_ids=array("I", outcome.prompt),
            params=outcome.params,
            seed=outcome.seed,
            chain_hash=chain[-1] if chain else 0,
            arrival=now,
            deadline=None if deadline_after is None else now + deadline_after,
            granules=chain[GRANULE_BLOCKS - 1 :: GRANULE_BLOCKS],
            granule_tokens=GRANULE_BLOCKS * service.block_size,
            receipt=ReceiptTerms(NO_REQUEST, "", "", outcome.logits_every),
        )
        logits = LogitChain(len(outcome.prompt), outcome.logits_every) if outcome.logits_every else None
        assembly = StreamAssembly(len(outcome.prompt), text=AnswerText(None), return_token_ids=True, logit_chain=logits)
        stream = service.requests.open(request, assembly, lambda worker, choice: None)
        try:
            while outcome.reason is None:
                part = await stream.next()
                outcome.token_ids.extend(part.token_ids)
                if part.ending is not None:
                    outcome.reason = part.ending.reason
                    outcome.logits = None if logits is None else logits.of_answer(assembly.delivered)
        finally:
            service.requests.close(stream)

    def check_outcomes(self, service: SimService) -> None:
        for outcome in self.outcomes:
            assert outcome.terminals == 1
            full = self.reference(service, outcome)
            assert outcome.token_ids == full[: len(outcome.token_ids)]
            if outcome.reason is not None:
                assert outcome.token_ids == full
                self.check_digests(service, outcome)
                ended_by_eos = full[-1] == EOS_ID
                assert outcome.reason == (pb.FINISH_REASON_STOP if ended_by_eos else pb.FINISH_REASON_LENGTH)

    def check_digests(self, service: SimService, outcome: Outcome) -> None:
        """The digest of every n-th token arrives once, for any worker and any number of attempts."""
        if not outcome.logits_every:
            return
        begin, tokens = len(outcome.prompt), outcome.prompt + outcome.token_ids
        runner, running, expected = service.workers[0].runner, 0, []
        for at in range(begin, len(tokens), outcome.logits_every):
            row = runner.logit_digest(tokens[:at]).to_bytes(8, "little")
            running = xxhash.xxh3_64_intdigest(row, running)
            expected.append(running)
        assert outcome.logits is not None
        assert list(outcome.logits.logit_digests) == expected

    def reference(self, service: SimService, outcome: Outcome) -> list[int]:
        """The whole answer of an undisturbed run."""
        runner = service.workers[0].runner
        tokens = runner.reference(outcome.prompt, outcome.params.max_tokens, outcome.seed)
        return tokens[: tokens.index(EOS_ID) + 1] if EOS_ID in tokens else tokens


def lived(scenario: Scenario) -> list[Outcome]:
    """Runs a scenario to its end, checks every answer, and returns the clients' outcomes."""
    service = run(scenario.loop, scenario.live())
    scenario.check_outcomes(service)
    return scenario.outcomes


@pytest.mark.each_value
@pytest.mark.parametrize("delay_factor", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("seed", slow_but({0, 1}, range(6)))
def test_requests_and_cancels(seed: int, delay_factor: float) -> None:
    outcomes = lived(Scenario(seed, delay_factor=delay_factor))
    assert all(outcome.error is None for outcome in outcomes)
    assert sum(outcome.cancelled for outcome in outcomes) >= 1
    assert sum(outcome.reason is not None for outcome in outcomes) >= NUM_REQUESTS // 2


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(6)))
def test_deadlines(seed: int) -> None:
    outcomes = lived(Scenario(seed, deadlines=True))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    assert all(isinstance(error, DeadlineError | HopelessDeadlineError) for error in errors)


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(5)))
def test_broken_streams_fail_no_request(seed: int) -> None:
    scenario = Scenario(seed, breaks=8, lease_s=LEASE_S if seed % 2 else 1.0)
    outcomes = lived(scenario)
    assert all(outcome.error is None for outcome in outcomes)


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(5)))
def test_dead_or_frozen_workers_fail_no_request(seed: int) -> None:
    """Requests with two or more deaths of their workers succeed too."""
    outcomes = lived(Scenario(seed, breaks=3, crashes=1 + seed % 3, freezes=seed % 2))
    assert all(outcome.error is None for outcome in outcomes)


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(6)))
def test_cordoned_and_evicted_workers_fail_no_request(seed: int) -> None:
    outcomes = lived(Scenario(seed, cordons=6, breaks=2 * (seed % 2)))
    assert all(outcome.error is None for outcome in outcomes)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("part", range(8))
def test_fresh_scenarios(part: int, fresh_seed: int) -> None:
    """Faults of the kinds above, equally many of each, at other times."""
    draw = random.Random(fresh_seed)
    make = partial(Scenario, delay_factor=draw.choice([0.0, 0.5, 4.0]), lease_s=draw.choice([LEASE_S, 1.0]))
    make = draw.choice(
        [partial(make, breaks=8), partial(make, breaks=3, crashes=2, freezes=1), partial(make, breaks=2, cordons=6)]
    )
    outcomes = lived(make(draw.getrandbits(48)))
    assert all(outcome.error is None for outcome in outcomes)


def test_scenario_preempts() -> None:
    """The pool is small enough that running sequences push each other out."""
    service = run((scenario := Scenario(1)).loop, scenario.live())
    assert any(worker.core.scheduler.lifecycle.num_preemptions for worker in service.workers)
