"""Deferred output together with speculation.

How many drafts are accepted decides where a sequence's next step begins. A runner that drafts finds that out before the
scheduler does, so the steps of a sequence overlap, but for one whose logits depend on its tokens in other ways.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from itertools import repeat

import pytest

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from kernels.no_token import NO_TOKEN
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.step import Step
from worker.simulation.runner import SimulatedRunner

VOCAB, EOS, SIZE = 40, 0, 16


class TwoInFlight:
    """A scheduler that is always one step ahead of the tokens, as the engine is, with its batches open to view."""

    def __init__(self, k: int, policy: str, num_blocks: int) -> None:
        config = Config(
            eos_token_id=EOS,
            num_kvcache_blocks=num_blocks,
            max_model_len=96,
            max_num_batched_tokens=24,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            deferred_output=True,
            speculative_config=SpeculativeConfig(num_speculative_tokens=k),
        )
        self.runner = SimulatedRunner(VOCAB, EOS, num_blocks=num_blocks, eos_every=60, num_drafts=k)
        self.sched = Scheduler(config)
        self.flights: deque[tuple[ScheduledBatch, list[Sequence], ScheduledBatchOutput]] = deque()
        self.seen: Counter[str] = Counter()
        self.steered: set[int] = set()

    def step(self) -> None:
        scheduled = self.sched.schedule(0.0)
        if scheduled is not None:
            batch, seqs = scheduled
            self._look(batch)
            self.flights.append((batch, list(seqs.values()), self.runner.forward(batch)))
        if self.flights and (scheduled is None or len(self.flights) > 1):
            self.land()
        self.sched.check_integrity()

    def land(self) -> None:
        batch, landed, output = self.flights.popleft()
        self.sched.postprocess(landed, output, batch=batch, now=0.0)

    def _look(self, batch: ScheduledBatch) -> None:
        drafts = batch.scheduled_spec_decode_tokens
        late = {seq_id for seq_id, is_late in zip(batch.req_ids, batch.from_last_output, strict=True) if is_late}
        steered = {batch.req_ids[i] for i in batch.histories}
        verified, made = self._in_flight()
        assert batch.drafts_in_flight == {seq_id: verified[seq_id] for seq_id in batch.req_ids if seq_id in verified}
        assert not steered & (verified | made).keys(), "its logits follow from tokens that nobody knows yet"
        for seq_id in late & drafts.keys():
            assert drafts[seq_id] == [NO_TOKEN] * len(drafts[seq_id])
            assert len(drafts[seq_id]) <= made[seq_id]
        self.seen["late drafts"] += len(late & drafts.keys())
        self.seen["drafts behind drafts in flight"] += len(drafts.keys() & verified.keys())
        self.seen["steered ones that wait"] += len(self.steered & (verified | made).keys())

    def _in_flight(self) -> tuple[dict[int, int], dict[int, int]]:
        """Drafts that the step in flight verifies, and those that it makes, by sequence."""
        assert len(self.flights) <= 1
        verified, made = dict[int, int](), dict[int, int]()
        for before, _, _ in self.flights:
            verified |= {seq_id: len(own) for seq_id, own in before.scheduled_spec_decode_tokens.items()}
            made |= before.drafts_wanted
        return verified, made


def workload(seed: int) -> list[Sequence]:
    rnd = random.Random(seed)
    beginnings = [[], [5] * 16, [5] * 32]
    prompts = [rnd.choice(beginnings) + [rnd.randrange(1, VOCAB) for _ in range(rnd.randint(1, 25))] for _ in range(7)]
    params = [
        SamplingParams(max_tokens=count, repetition_penalty=rnd.choice([1.0] * 5 + [1.3]), min_tokens=min(3, count))
        for count in [rnd.randint(1, 40) for _ in prompts]
    ]
    return [Sequence(*made, seed=rnd.randrange(99)) for made in zip(prompts, repeat(SIZE), params)]


@pytest.mark.each_value
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_streams_equal_with_other_steps_in_between(k: int, policy: str) -> None:
    seen: Counter[str] = Counter()
    accepted = preempted = 0
    for seed in range(60):
        engine, rnd = TwoInFlight(k, policy, num_blocks=6 if seed % 2 else 30), random.Random(seed)
        seqs = workload(seed)
        engine.steered = {seq.id for seq in seqs if seq.sampling_params.penalized}
        coming = deque(seqs)
        while coming or engine.sched.has_unfinished() or engine.flights:
            if coming and rnd.random() < 0.3:
                engine.sched.add(coming.popleft())
            if rnd.random() < 0.02:
                engine.sched.abort(rnd.choice(seqs).id, now=0.0)
            engine.step()
            engine.sched.take_outputs()
        for seq in seqs:
            tokens = seq.output_tokens
            assert tokens == engine.runner.reference(seq.prompt_token_ids, len(tokens), seq.seed)
        assert engine.sched.block_manager.num_free_blocks == engine.sched.block_manager.num_blocks
        seen += engine.seen
        accepted += engine.sched.spec_stats.total_accepted_tokens
        preempted += engine.sched.lifecycle.num_preemptions
    events = ("late drafts", "drafts behind drafts in flight", "steered ones that wait")
    assert min(map(seen.__getitem__, events)) > 50
    assert accepted > 0
    assert preempted > 0


def test_drafts_in_flight_cause_no_preemption() -> None:
    """A sequence waits for its output where it needs a further block only if all of its drafts in flight are right."""

    def step_beside(num_inflight_drafts: int) -> tuple[Scheduler, list[Sequence], Step]:
        engine = TwoInFlight(4, SCHEDULING_POLICIES[0], num_blocks=6)
        late, other = (Sequence([5 + i] * 11, SIZE, SamplingParams(max_tokens=60)) for i in range(2))
        engine.sched.add_group([other, late])
        engine.step()
        engine.land()
        manager = engine.sched.block_manager
        manager.may_append(other, 16 * (manager.num_free_blocks + 1) - other.next_position)
        # As if a step were in flight that computes up to the end of its last slot.
        late.num_inflight_tokens, late.num_placeholder = late.num_slots - late.num_computed_tokens, 1
        late.num_inflight_drafts = num_inflight_drafts
        step = Step(64, math.inf)
        engine.sched.in_flight.append(step)
        engine.sched._decode(step)
        return engine.sched, [other, late], step

    sched, (other, _), step = step_beside(2)
    assert list(step.seqs) == [other.id]
    assert sched.lifecycle.num_preemptions == 0
    sched, _, _ = step_beside(0)
    assert sched.lifecycle.num_preemptions == 1
