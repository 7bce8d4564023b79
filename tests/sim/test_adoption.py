"""Routers that die or lose their workers, under clients that resume at another one, by adoption if possible (S12).

Every answer is right under any event, no state remains, and without another fault no prompt is computed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from fissile.v1 import inference_pb2 as pb

from common.params.sampling_params import SamplingParams
from common.text.answer_text import AnswerText
from common.wire.block_hash import hash_chain
from router.answers.logit_digests import LogitChain
from router.answers.stream_assembly import StreamAssembly
from router.requests.adoption_keys import AdoptionKeys
from router.requests.running import RunningRequests
from router.requests.stream import ReceiptTerms, RequestStream, RoutedRequest
from tests.covering import slow_but
from tests.sim.service import EOS_ID, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, SimService
from tests.sim.test_scenario import NO_REQUEST
from tests.sim.virtual_time import VirtualLoop, run
from tests.unit.mutants import Mutant, assert_noticed
from worker.session.adoption import Orphans
from worker.session.outbox import Outbox
from worker.session.router_state import ActiveSequence, RouterSequences
from worker.session.session import WorkerSession

NUM_REQUESTS = 30
LEASE_S = 3.0


class RouterGoneError(Exception):
    """The client's router has gone."""


@dataclass(eq=False)
class Site:
    """A router as its clients see it."""

    service: SimService
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, stream: RequestStream) -> pb.FinishReason.ValueType | None:
        """Takes the next part into `taken`; the finish with the last one."""
        reading, gone = asyncio.ensure_future(stream.next()), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait([reading, gone], return_when=asyncio.FIRST_COMPLETED)
            if self.gone.is_set():
                raise RouterGoneError
            part = reading.result()
        finally:
            for each in (reading, gone):
                each.cancel()
        self.taken = part.token_ids
        return None if part.ending is None else part.ending.reason


@dataclass
class Answer:
    """One client's answer so far; `by_ids` if it resumes after its token ids."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    by_ids: bool
    logits_every: int
    pause_s: float
    token_ids: list[int] = field(default_factory=list)
    reason: pb.FinishReason.ValueType | None = None
    logits: pb.Receipt | None = None
    moves: int = 0


class Fleet:
    """Three routers over the same workers, and what happens to them."""

    def __init__(self, seed: int, *, calm: bool = False, breaks: int = 0, crashes: int = 0, freezes: int = 0) -> None:
        self.rnd = random.Random(seed)
        self.loop = VirtualLoop()
        self.calm = calm
        self.faults = {"break_connection": breaks, "crash": crashes, "freeze": freezes}
        self.answers: list[Answer] = []
        self.sites: list[Site] = []

    def tokens(self, count: int) -> list[int]:
        return [self.rnd.randrange(2, VOCAB_SIZE) for _ in range(count)]

    async def live(self) -> None:
        make = partial(SimService, self.loop, self.rnd, lease_s=LEASE_S, worker_wait_s=20.0)
        services = [first := make(), make(other=first), make(other=first)]
        self.sites = [Site(service) for service in services]
        await asyncio.sleep(0.2)
        clients = [asyncio.create_task(self.client(i)) for i in range(NUM_REQUESTS)]
        self.loop.call_later(self.rnd.uniform(0.5, 0.9), self.lose, self.sites[0], self.calm)
        if not self.calm:
            self.loop.call_later(self.rnd.uniform(1.0, 1.6), self.lose, self.sites[1], self.rnd.random() < 0.5)
        for name, count in self.faults.items():
            for _ in range(count):
                fault = getattr(self.rnd.choice(services), name)
                self.loop.call_later(self.rnd.uniform(0.2, 2.0), fault, self.rnd.randrange(2))
        _, hanging = await asyncio.wait(clients, timeout=90)
        assert not hanging, "hang"
        for client in clients:
            assert client.exception() is None, client.exception()
        # Longer than any freeze, restart and lease.
        await asyncio.sleep(12)
        self.check()

    def lose(self, site: Site, for_ever: bool) -> None:
        """A router dies, or loses all its workers for a while and its clients for ever."""
        site.gone.set()
        if for_ever:
            site.service.kill_router()
            site.service.routers.remove(site.service)
            return
        for i in range(len(site.service.workers)):
            site.service.break_connection(i)

    async def client(self, i: int) -> None:
        prompt = self.tokens(self.rnd.randrange(1, 150))
        params = SamplingParams(max_tokens=self.rnd.randrange(1, MAX_MODEL_LEN - len(prompt)))
        by_ids = self.rnd.random() < 0.5
        answer = Answer(prompt, params, i, by_ids, 0 if by_ids else i % 3, self.rnd.uniform(0.15, 0.4))
        self.answers.append(answer)
        await asyncio.sleep(self.rnd.uniform(0, 0.8))
        for site in self.sites:
            with contextlib.suppress(RouterGoneError):
                await self.ask(site, answer)
                return
            answer.moves += 1
            await asyncio.sleep(answer.pause_s if self.calm else self.rnd.choice([0.0, 0.02, answer.pause_s]))

    async def ask(self, site: Site, answer: Answer) -> None:
        if site.gone.is_set():
            raise RouterGoneError
        now, service = self.loop.time(), site.service
        chain = hash_chain(answer.prompt, service.block_size)
        ids = array("I", answer.prompt)
        request = RoutedRequest(
            model=MODEL,
            identity=service.identity,
            token_ids=ids,
            params=answer.params,
            seed=answer.seed,
            chain_hash=chain[-1] if chain else 0,
            arrival=now,
            deadline=now + 60 if answer.seed % 2 else None,
            receipt=ReceiptTerms(NO_REQUEST, "", "", answer.logits_every),
            resumed_from="" if answer.token_ids else None,
        )
        keys = AdoptionKeys("t", f"r{answer.seed}", service.identity, ids)
        key = keys.of_answer(request.to_record(0, must_keep=False, has_generated=False))
        request = replace(request, adoption_key=key)
        logits = LogitChain(len(answer.prompt), answer.logits_every) if answer.logits_every else None
        assembly = StreamAssembly(len(answer.prompt), text=AnswerText(None), return_token_ids=True, logit_chain=logits)
        before = list(answer.token_ids)
        if answer.by_ids and before:
            assembly.resume_behind(before)
        elif before:
            answer.token_ids = []
        if answer.moves:
            await service.requests.wait_for_orphans([request.adoption_key])
            if site.gone.is_set():
                answer.token_ids = before
                raise RouterGoneError
        stream = service.requests.open(request, assembly, lambda worker, choice: None)
        try:
            while answer.reason is None:
                answer.reason = await site.next(stream)
                answer.token_ids.extend(site.taken)
        except RouterGoneError:
            if len(answer.token_ids) < len(before):
                answer.token_ids = before
            raise
        finally:
            # A router that is alive finds out that its client is gone.
            late_s = 0 if answer.reason is not None else self.rnd.uniform(0, 1)
            self.loop.call_later(late_s, service.requests.close, stream)
        answer.logits = None if logits is None else logits.of_answer(assembly.delivered)

    def check(self) -> None:
        for answer in self.answers:
            runner = self.sites[0].service.workers[0].runner
            full = runner.reference(answer.prompt, answer.params.max_tokens, answer.seed)
            full = full[: full.index(EOS_ID) + 1] if EOS_ID in full else full
            assert answer.token_ids == full
            assert answer.reason is not None
            if answer.logits_every:
                assert answer.logits is not None, "digests are missing"
        for site in self.sites:
            if site.service in site.service.routers:
                site.service.check_nothing_left()
        for worker in self.sites[0].service.workers:
            assert len(worker.orphans) == 0, "orphans are left"
        self.sites[-1].service.check_workers_idle()

    @property
    def adopted(self) -> int:
        return sum(site.service.requests.running.num_adopted for site in self.sites)

    @property
    def computed(self) -> int:
        """Prompt tokens of sequences that have begun on any worker."""
        workers = self.sites[0].service.workers
        return sum(worker.core.scheduler.lifecycle.totals.prompt_tokens for worker in workers)


def lived(make: Callable[[], Fleet]) -> Fleet:
    fleet = make()
    run(fleet.loop, fleet.live())
    return fleet


def calm(seed: int) -> None:
    """One router dies and nothing else fails: started sequences are adopted and computed once."""
    fleet = lived(partial(Fleet, seed, calm=True))
    assert fleet.adopted, "nothing is adopted"
    assert fleet.computed == sum(len(answer.prompt) for answer in fleet.answers), "computed twice"


def stormy(seed: int) -> None:
    """Routers die or come back, and everything else breaks too."""
    lived(partial(Fleet, seed, breaks=5, crashes=seed % 2, freezes=seed % 2))


CAUGHT = [
    (Mutant("nobody-is-told", Orphans, "news_after", "news.number > number", "False"), calm),
    (Mutant("no-rewind", Outbox, "take_in", "self.rewind(rid, have)", "self._unsent[rid] = None"), calm),
    (Mutant("end-of-the-old-rid", Outbox, "take_in", "told.rid = rid", "pass"), calm),
    (Mutant("output-under-the-old-rid", ActiveSequence, "move", "self.rid, self.owner =", "_, self.owner ="), calm),
    (Mutant("orphans-of-who-is-back", RouterSequences, "attach", "self.orphans.remove(self)", "pass"), stormy),
    (Mutant("not-given-back", WorkerSession, "_adopt", "self._sequences.outbox.give_back(wanted.rid)", "pass"), stormy),
    (
        Mutant(
            "not-queued-again",
            RunningRequests,
            "_arrive_unadopted",
            "self._dispatcher.rejoin(stream.queued, self._clock())",
            "pass",
        ),
        stormy,
    ),
]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_dead_simulated_router_are_adopted_once(seed: int) -> None:
    calm(seed)


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(4)))
def test_answers_survive_any_fault_without_residue(seed: int) -> None:
    stormy(seed)


@pytest.mark.parametrize(("mutant", "life"), CAUGHT, ids=[mutant.trap for mutant, _ in CAUGHT])
def test_mutation_is_detected(mutant: Mutant, life: Callable[[int], None]) -> None:
    assert_noticed(mutant, life, range(4))


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("part", range(4))
def test_fresh_fleets(part: int, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    stormy(draw.getrandbits(48))
