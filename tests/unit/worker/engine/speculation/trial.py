"""A Scheduler and its oracle in one hand, and the random configurations and sequences that they are tried with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import hash_chain
from tests.unit.worker.engine.oracle import Oracle
from tests.unit.worker.engine.oracle_records import Life
from tests.unit.worker.engine.speculation.truth import EOS, TokenModel, Truth
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Priority, Sequence

STOP_ID = 3
# What `max_tokens` may be.
Sizes = tuple[int, ...]
_SALTS = [b"", b"", b"", b"", b"a", b"b"]


class Trial:
    """What an engine does with a Scheduler, one call at a time, with the oracle looking on.

    With deferred output two steps are in flight at most, as in EngineCore. `twins` draws who has the prompt of another
    one; nobody has without it.
    """

    def __init__(
        self,
        config: Config,
        model: TokenModel,
        lengths: Sizes,
        *,
        knows_hits: bool = True,
        twins: random.Random | None = None,
    ) -> None:
        self.lengths = lengths
        self.config = config
        self.twins = twins
        self.model = model
        self.scheduler = Scheduler(config)
        if config.hash_seed:
            # Few decodes leave prompts an eighth of any step; more than that they do not.
            self.scheduler.limits.min_prefill_tokens = config.max_num_batched_tokens // 2
        self.oracle = Oracle(self.scheduler, config, model, knows_hits=knows_hits)
        # Seconds of attention between two tokens.
        self.pair_s = 0.00001 * (config.max_num_batched_tokens % 4)
        self.depth = 2 if config.deferred_output else 1
        self.now = 100.0
        self._num_ids = 0

    @property
    def lives(self) -> list[Life]:
        """All sequences so far, ended ones too."""
        return self.oracle.all

    def new_id(self) -> int:
        """An id that no sequence of this trial has had: 0, 1, 2..."""
        self._num_ids += 1
        return self._num_ids - 1

    def add(self, seq: Sequence) -> None:
        """Through the scheduler's own gate."""
        assert self.scheduler.add(seq)
        self.oracle.entered(seq, gated=True, outputs=self.scheduler.take_outputs())

    def add_group(self, seqs: list[Sequence]) -> None:
        assert self.scheduler.add_group(seqs) == seqs
        outputs = self.scheduler.take_outputs()
        for seq in seqs:
            self.oracle.entered(seq, gated=False, outputs=[out for out in outputs if out.request_id == seq.id])

    def abort(self, seq_id: int, reason: EndReason = EndReason.CANCELLED) -> None:
        """Of any sequence, live or not."""
        done = self.scheduler.abort(seq_id, now=self.now, reason=reason)
        self.oracle.aborted(seq_id, done, self.scheduler.take_outputs(), reason)
        self.oracle.check()

    def expire(self) -> None:
        """Ends those whose deadline has passed, as EngineCore does before a step."""
        for life in list(self.oracle.lives.values()):
            if life.seq.deadline is not None and life.seq.deadline <= self.now:
                self.abort(life.seq.id, EndReason.DEADLINE)

    def preempt(self, life: Life) -> None:
        """Of any sequence that runs, in flight or not."""
        self.scheduler.preempt(life.seq)
        self.oracle.preempted(life)
        self.oracle.check()

    def running(self) -> list[Life]:
        """Those that can be preempted."""
        return [life for life in self.oracle.lives.values() if life.computed is not None]

    def schedule(self) -> bool:
        """One more step in flight, if there is work for it."""
        self.oracle.before_schedule(self.now)
        flight = self.oracle.scheduled(self.scheduler.schedule(self.now))
        self.oracle.check()
        return flight is not None

    def land(self) -> None:
        """The oldest flight's output comes."""
        flight = self.oracle.flights[0]
        duration = 0.001 * flight.batch.total_tokens_num + self.pair_s * flight.num_pairs
        self.now += duration
        self.scheduler.record_step(flight.batch, duration)
        if flight.batch.total_tokens_num_prefill:
            self.oracle.last_prompt_latency = duration
        self.oracle.before_landing()
        seqs = list(flight.seqs.values())
        finished = self.scheduler.postprocess(seqs, flight.output, batch=flight.batch, now=self.now)
        self.oracle.landed(self.now, finished, self.scheduler.take_outputs())
        self.oracle.check()
        self.scheduler.check_integrity()

    def discard(self) -> None:
        """The only flight was interrupted."""
        flight = self.oracle.flights[0]
        self.scheduler.discard(flight.seqs.values(), flight.batch)
        self.oracle.discarded()
        self.oracle.check()
        self.scheduler.check_integrity()

    def turn(self) -> None:
        """One turn of the engine: a step is scheduled, one lands."""
        self.expire()
        if len(self.oracle.flights) < self.depth and self.schedule() and len(self.oracle.flights) < self.depth:
            return
        self.land_any()

    def land_any(self) -> None:
        """Lands the oldest flight if there is one."""
        if self.oracle.flights:
            self.land()

    def finish(self) -> None:
        """Turns until everything is over, which takes no more than so many steps: nobody starves."""
        bound = self.oracle.num_batches + 50 + 4 * sum(life.truth.end for life in self.oracle.lives.values())
        while self.oracle.lives or self.oracle.flights:
            self.turn()
            assert self.oracle.num_batches <= bound, "no end"
        self.oracle.check_end()


def random_setting(rnd: random.Random) -> tuple[Config, TokenModel, Sizes]:
    """What a Trial takes: small pools, down to one for a single sequence, every policy, with and without the rest."""
    size, k = rnd.choice([1, 16, 16, 32]), rnd.choice([0, 0, 1, 2, 3, 4])
    num_blocks = rnd.randint(*{1: (2, 90), 16: (1, 14), 32: (1, 8)}[size])
    tokens = num_blocks * size
    config = Config(
        eos_token_id=EOS,
        stop_token_ids=rnd.choice([(), (STOP_ID,)]),
        kv_cache_block_size=size,
        num_kvcache_blocks=num_blocks,
        max_model_len=rnd.choice([tokens, rnd.randint(2, tokens), rnd.randint(2, tokens)]),
        enable_prefix_caching=rnd.random() < 0.7,
        hash_seed=rnd.randrange(2),
        max_num_seqs=rnd.choice([1, 2, 4, 8, 8]),
        max_num_batched_tokens=rnd.choice([1, 6, 8, 17, 32, 32, 64, 64, 500, 500]),
        scheduling_policy=rnd.choice(SCHEDULING_POLICIES),
        max_consecutive_prefill_steps=rnd.choice([1, 2, 4]),
        scheduler_delay_factor=rnd.choice([0.0, 0.0, 0.5, 3.0]),
        deferred_output=rnd.random() < 0.4,
        speculative_config=SpeculativeConfig(num_speculative_tokens=k) if k else None,
    )
    return config, TokenModel(draft_errors=rnd.choice([0, 1, 3, 8])), rnd.choice([(1, 3, 8), (3, 16), (20,)])


def random_group(rnd: random.Random, trial: Trial, count: int) -> list[Sequence]:
    """Sequences that have nothing to do with each other, or several answers to one prompt."""
    first = random_sequence(rnd, trial)
    lead = first if first.shares_prompt and count > 1 else None
    return [first, *(random_sequence(rnd, trial, lead) for _ in range(count - 1))]


def random_sequence(rnd: random.Random, trial: Trial, lead: Sequence | None = None) -> Sequence:
    """Prompts with common beginnings, or that go on where another conversation was, or that of `lead`; some resumed in
    mid-stream."""
    limit = trial.oracle.max_model_len
    salt = rnd.choice(_SALTS)
    prompt = _beginning(rnd, trial) + [rnd.randrange(1, 24) for _ in range(rnd.randint(1, 10))]
    if lead is None and trial.twins is not None and trial.lives and trial.twins.random() < 0.2:
        lead = trial.twins.choice(trial.lives).seq
    if lead is not None:
        prompt, salt = lead.prompt_token_ids, lead.cache_salt
    max_tokens = rnd.choice(trial.lengths)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rnd.choice([0, 0, 0, 3]) % (max_tokens + 1),
        ignore_eos=rnd.random() < 0.4,
        stop_token_ids=rnd.choice([(), (), (4,), (EOS,)]),
        stop_token_sequences=rnd.choice([(), (), ((5, 6), (7,))]),
        repetition_penalty=rnd.choice([1.0, 1.0, 1.0, 1.2]),
    )
    new_id = trial.new_id()
    seq = Sequence(
        prompt[: limit - 1],
        trial.config.kv_cache_block_size,
        params,
        id=new_id,
        seed=rnd.randrange(3),
        choice=rnd.randrange(2),
        arrive_time=trial.now,
        deadline=trial.now + rnd.random() if rnd.random() < 0.06 else None,
        # Where hashes collide, those of the salts do too.
        hash_root=(salt[0] if trial.oracle.cache is not None else 7) if salt else None,
        cache_salt=salt,
        priority=rnd.choice([*Priority, Priority.NORMAL]),
        shares_prompt=trial.twins is not None and (lead is not None or trial.twins.random() < 0.5),
    )
    assert seq.id == new_id
    if rnd.random() < 0.1:
        truth = Truth(seq, trial.model, limit, trial.config)
        seq.token_ids = truth.tokens[: rnd.randint(seq.num_prompt_tokens, truth.end)]
        seq.num_given_tokens = len(seq.token_ids)
    return seq


def _beginning(rnd: random.Random, trial: Trial) -> list[int]:
    """Nothing, a system prompt, or the whole of an earlier conversation."""
    if trial.lives and rnd.random() < 0.15:
        tokens = rnd.choice(trial.lives).truth.tokens
        return tokens[: rnd.randint(0, len(tokens))]
    return [9, 8, 7, 6] * rnd.choice([0, 0, 0, 2, 2, 9])


def run_workload(number: int, *, weak_hashes: bool = False) -> Trial:
    """One random life of an engine. Repeat what fails with its number."""
    rnd = random.Random(number)
    with _weak_hashes() if weak_hashes else _as_they_are():
        # Not in all of them, so that a change of this changes not all that happens.
        twins = random.Random(number) if number % 3 == 0 else None
        trial = Trial(*random_setting(rnd), knows_hits=not weak_hashes, twins=twins)
        for _ in range(rnd.randint(1, 5)):
            _happen(rnd, trial)
        trial.finish()
    return trial


def _happen(rnd: random.Random, trial: Trial) -> None:
    """Something happens to the engine, then it works on for a while, perhaps up to the middle of a step."""
    event = rnd.random()
    if event < 0.55:
        trial.add_group(random_group(rnd, trial, rnd.choice([1, 2, 4])))
    elif event < 0.75:
        for _ in range(rnd.choice([1, 3])):
            trial.add(random_sequence(rnd, trial))
    elif event < 0.87 and trial.lives:
        trial.abort(rnd.choice(trial.lives).seq.id)
    elif event < 0.93 and trial.running():
        trial.preempt(rnd.choice(trial.running()))
    elif len(trial.oracle.flights) == 1:
        trial.discard()
    for _ in range(rnd.choice([0, 0, 0, 1, 3])):
        trial.turn()
        if rnd.random() < 0.05:
            trial.land_any()
    if rnd.random() < 0.3 and not trial.oracle.flights:
        trial.schedule()


@contextmanager
def _weak_hashes() -> Iterator[None]:
    """Every block's hash is one of three, so that most keys of the prefix cache collide."""

    def weak(tokens: list[int], size: int, *, root: int | None = None, seed: int = 0) -> list[int]:
        return [value % 3 for value in hash_chain(tokens, size, root=root, seed=seed)]

    with mock.patch("worker.engine.prefix_cache.hash_chain", weak):
        yield


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield
