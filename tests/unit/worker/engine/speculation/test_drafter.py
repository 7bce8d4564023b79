"""Drafts of the engine: who gets them, how many, and that they cost nobody anything; by a proposer that is right for a
while, on the simulated runner, which knows every stream."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from tests.unit.worker.engine.test_deferred import land
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation import ngram_proposer
from worker.engine.speculation.drafter import Proposer
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.simulation.runner import SimulatedRunner

VOCAB, EOS, SIZE = 40, 0, 16


class Fixed(Proposer):
    """Proposes these drafts, whatever there is."""

    def __init__(self, *drafts: int) -> None:
        self.drafts = list(drafts)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return self.drafts[:most]


class Knowing(Proposer):
    """Proposes what comes, and something else after a while."""

    def __init__(self, runner: SimulatedRunner, rnd: random.Random) -> None:
        self._runner = runner
        self._rnd = rnd

    def propose(self, seq: Sequence, most: int) -> list[int]:
        count = self._rnd.randint(0, most)
        right = self._runner.reference(seq.token_ids, self._rnd.randint(0, count), seq.seed, seq.choice)
        return right + [self._rnd.randrange(VOCAB) for _ in range(count - len(right))]


def config(k: int = 3, **settings: Any) -> Config:
    given = {"eos_token_id": EOS, "num_kvcache_blocks": 30, "max_model_len": 96, "max_num_batched_tokens": 64}
    return Config(**{**given, **settings}, speculative_config=SpeculativeConfig(k, NGRAM, adaptive=False))


def drafting(*drafts: int, **settings: Any) -> Scheduler:
    sched = Scheduler(config(**settings))
    sched.drafter.proposer = Fixed(*drafts)
    return sched


def sequence(length: int = 10, first: int = 1, **params: Any) -> Sequence:
    return Sequence(list(range(first, first + length)), SIZE, SamplingParams(**{"max_tokens": 40, **params}))


def step(sched: Scheduler, *tokens: int) -> ScheduledBatch:
    """One step, whose sequences get the same tokens each; one by itself if none are given."""
    scheduled = sched.schedule(0.0)
    assert scheduled is not None
    land(sched, scheduled, *[tokens or (30,)] * sum(scheduled[0].is_final))
    return scheduled[0]


def test_drafts_follow_newest_token_in_step() -> None:
    sched, seq = drafting(31, 32, 33, 34), sequence()
    sched.add(seq)
    assert step(sched).num_spec_step == 0
    batch = step(sched, 31, 32, 9)
    assert batch.scheduled_spec_decode_tokens == {seq.id: [31, 32, 33]}
    assert (batch.scheduled_tokens, batch.context_lens) == ([[30, 31, 32, 33]], [14])
    assert (seq.output_tokens, seq.num_computed_tokens) == ([30, 31, 32, 9], 13)
    assert sched.spec_stats.by_position == ((1, 1), (1, 1), (1, 0))
    sched.take_outputs()
    sched.abort(seq.id, now=1.0)
    (ended,) = sched.take_outputs()
    assert ended.end is not None
    assert ended.end.times is not None
    assert ended.end.times.decode is not None
    assert ended.end.times.decode.drafts == ((1, 1), (1, 1), (1, 0))


@pytest.mark.parametrize("own", [0, 1, 2, 3, 9, None])
def test_num_drafts_of_request_bounds_its_drafts(own: int | None) -> None:
    sched, other = drafting(31, 32, 33, 34), sequence()
    sched.add_group([sequence(num_drafts=own), other])
    step(sched)
    drafts = step(sched).scheduled_spec_decode_tokens
    assert sorted(map(len, drafts.values())) == sorted({3, min(3, own)} - {0} if own not in (None, 3, 9) else [3, 3])


def test_step_without_drafts_equals_plain_decode() -> None:
    sched = drafting()
    sched.add_group([sequence(), sequence()])
    step(sched)
    assert step(sched).is_plain_decode


def test_drafts_use_only_remaining_token_budget() -> None:
    sched = drafting(31, 32, 33, max_num_batched_tokens=24, num_kvcache_blocks=64)
    sched.add_group([sequence(1, i) for i in range(1, 21)])
    step(sched)
    batch = step(sched)
    assert batch.num_scheduled_tokens == [4, 2, *[1] * 18]


def test_drafts_end_at_max_tokens() -> None:
    sched, seq = drafting(31, 32, 33), sequence(max_tokens=3)
    sched.add(seq)
    step(sched)
    assert step(sched, 31, 9).scheduled_spec_decode_tokens == {seq.id: [31]}
    assert (seq.output_tokens, seq.leave_reason) == ([30, 31, 9], "max_tokens")


def test_drafts_cause_no_preemption() -> None:
    """Two sequences of a block each in a pool of three: the third draft needs a further one, and there is one."""
    sched = drafting(31, 32, 33, num_kvcache_blocks=3, max_model_len=48)
    first, second = sequence(13), sequence(13, 2)
    sched.add_group([first, second])
    step(sched)
    assert step(sched, 9).num_scheduled_tokens == [4, 3]
    assert sched.lifecycle.num_preemptions == 0


def test_block_filled_by_wrong_drafts_is_not_published() -> None:
    sched = drafting(31, 32, 33, enable_prefix_caching=True)
    seq = sequence(13)
    sched.add(seq)
    step(sched)
    assert step(sched, 31, 9).context_lens == [17]
    cached = sched.block_manager.prefixes.cached_blocks
    assert not cached(Sequence([*seq.prompt_token_ids, 30, 31, 32, 33], SIZE))
    step(sched, 31, 9)
    assert seq.num_computed_tokens == 17
    assert len(cached(Sequence([*seq.token_ids, 1], SIZE))) == 1


def test_digests_of_tokens_after_stop_are_dropped() -> None:
    sched = drafting(31, 5, 33)
    seq = sequence(stop_token_ids=(5,))
    sched.add(seq)
    step(sched)
    batch, seqs = sched.schedule(0.0) or (None, {})
    assert batch is not None
    output = ScheduledBatchOutput({seq.id: (31, 5, 33, 7)}, logit_digests={seq.id: {11: 1, 12: 2, 13: 3, 14: 4}})
    sched.take_outputs()
    sched.postprocess(seqs.values(), output, batch=batch, now=0.0)
    (out,) = sched.take_outputs()
    assert (out.output_tokens, out.logit_digests) == ([31, 5], {11: 1, 12: 2})


def test_sequence_that_awaits_drafts_is_not_scheduled() -> None:
    sched = drafting(31, 32, 33, deferred_output=True)
    eager, waiting = sequence(num_drafts=0), sequence()
    sched.add_group([eager, waiting])
    flights = [sched.schedule(0.0), sched.schedule(0.0)]
    assert [batch.req_ids for batch, _ in filter(None, flights)] == [[eager.id, waiting.id], [eager.id]]


@pytest.mark.each_value
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_streams_equal_plain_decoding_with_random_drafts(policy: str, deferred: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        rnd = random.Random(seed)
        settings = config(
            rnd.choice([1, 3, 8]),
            num_kvcache_blocks=6 if seed % 2 else 30,
            max_num_batched_tokens=24,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            deferred_output=deferred,
        )
        runner = SimulatedRunner(VOCAB, EOS, num_blocks=settings.num_kvcache_blocks, eos_every=60)
        core = EngineCore(settings, runner)
        core.scheduler.drafter.proposer = Knowing(runner, rnd)
        seqs = [
            Sequence(
                rnd.choice([[], [5] * 16, [5] * 32]) + [rnd.randrange(1, VOCAB) for _ in range(rnd.randint(1, 25))],
                SIZE,
                SamplingParams(max_tokens=rnd.randint(1, 40), num_drafts=rnd.choice([None, None, 0, 2])),
                seed=rnd.randrange(99),
            )
            for _ in range(7)
        ]
        core.add_group(seqs)
        while core.has_unfinished():
            core.step()
            core.scheduler.check_integrity()
        core.close()
        for seq in seqs:
            tokens = seq.output_tokens
            assert tokens == runner.reference(seq.prompt_token_ids, len(tokens), seq.seed)
            assert seq.leave_reason in ("eos", "max_tokens")
        stats = core.scheduler.spec_stats
        seen += Counter(drafts=stats.total_draft_tokens, right=stats.total_accepted_tokens)
        seen["preemptions"] += core.scheduler.lifecycle.num_preemptions
    assert 0 < seen["right"] < seen["drafts"]
    assert seen["preemptions"] > 0


def brute_force(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """Prompt lookup by its definition."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                behind = tokens[end:]
                return (behind * most)[:most]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 4).flatmap(lambda shortest: st.tuples(st.just(shortest), st.integers(shortest, 6))),
    st.integers(1, 9),
    st.integers(1, 10),
)
def test_lookup_equals_brute_force(tokens: list[int], controller: tuple[int, int], most: int, start: int) -> None:
    proposer, seq = NgramProposer(*controller), Sequence(tokens[:start], SIZE)
    for token in [*tokens[start:], 0]:
        assert proposer.propose(seq, most) == brute_force(seq.token_ids, *controller, most)
        seq.append_token(token)


@given(
    # Some of which have the same marks.
    st.lists(st.sampled_from([1, 2, 1 + (1 << 16), 2 + (1 << 16)]), min_size=1, max_size=120),
    st.integers(1, 3).flatmap(lambda shortest: st.tuples(st.just(shortest), st.integers(shortest, 5))),
    st.integers(0, 4),
    st.integers(1, 60),
)
def test_lookup_with_many_equal_ngrams_equals_brute_force(
    tokens: list[int], controller: tuple[int, int], few: int, start: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_proposer, "_FEW_PLACES", few)
        patch.setattr(ngram_proposer, "_SMALLEST", 16)
        proposer, seq = NgramProposer(*controller), Sequence(tokens[:start], SIZE)
        for i, token in enumerate([*tokens[start:], 1]):
            if i % 3 != 1:
                assert proposer.propose(seq, 4) == brute_force(seq.token_ids, *controller, 4)
            seq.append_token(token)


def test_lookup_arrays_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_proposer, "MOST_KEPT", 2000)
    proposer, rnd = NgramProposer(2, 4), np.random.default_rng(1)
    seqs = [Sequence(rnd.integers(0, 5, 300).tolist(), SIZE) for _ in range(9)]
    for seq in seqs * 2:
        assert proposer.propose(seq, 4) == brute_force(seq.token_ids, 2, 4, 4)
        assert sum(kept.size for kept in proposer._kept.values()) <= 2000


def test_lookup_ignores_old_sequence_with_same_id() -> None:
    proposer = NgramProposer(1, 2)
    assert proposer.propose(Sequence([1, 2, 1], SIZE, id=7), 1) == [2]
    assert proposer.propose(Sequence([1, 3, 1], SIZE, id=7), 1) == [3]


@pytest.mark.parametrize("deferred", [False, True])
def test_lookup_keeps_only_live_sequences(deferred: bool) -> None:
    """With preemptions, aborts and steps in flight, ended sequences keep no arrays, and the token count is right."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        rnd = random.Random(seed)
        settings = config(3, num_kvcache_blocks=6, max_num_batched_tokens=24, deferred_output=deferred)
        core = EngineCore(settings, SimulatedRunner(3, EOS, num_blocks=6, eos_every=60))
        proposer, lifecycle = core.scheduler.drafter.proposer, core.scheduler.lifecycle
        assert isinstance(proposer, NgramProposer)
        seqs = [Sequence([1, 2] * 9, SIZE, SamplingParams(max_tokens=rnd.randint(9, 40)), seed=i) for i in range(6)]
        core.add_group(seqs)
        while core.has_unfinished():
            if rnd.random() < 0.03:
                seen["aborts"] += core.abort(rnd.choice(seqs).id)
            core.step()
            assert proposer._kept.keys() <= lifecycle.live.keys()
            assert proposer._num_kept == sum(kept.size for kept in proposer._kept.values())
            seen["kept"] += len(proposer._kept)
        core.close()
        assert not proposer._kept
        seen["preemptions"] += lifecycle.num_preemptions
    assert min(seen["aborts"], seen["kept"], seen["preemptions"]) > 0
