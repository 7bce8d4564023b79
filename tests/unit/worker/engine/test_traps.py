"""Mistakes that are easily made in an engine, one by one. Those of model and text are in test_model_traps.py.

Each test is shown to fail against the mistake (tests/unit/mutants.py, tests/unit/test_mutants.py).
"""

from __future__ import annotations

import threading

import pytest

from common.config import Config
from common.errors import InvalidFieldError, PromptTooLongError
from common.params.sampling_params import SamplingParams
from tests.unit.worker.engine.test_deferred import SIZE, Flight, land, launch, prompt, scheduler
from tests.unit.worker.session.support import LIMITS, record, submit
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Priority, Sequence
from worker.session.intake import Inbox
from worker.session.output_protos import PROTO_REASONS
from worker.simulation.runner import SimulatedRunner

EOS = 2


def step(sched: Scheduler, token: int = 50, drafts: list[int] | None = None) -> ScheduledBatch:
    """One whole step; every final row gets the same token."""
    flight = launch(sched)
    land(sched, flight, *[token] * sum(flight[0].is_final), drafts=drafts)
    return flight[0]


# Tests name the id 0, the first id of a process, so a sequence without a test takes it here.
Sequence([1], SIZE)


def decoding_for(last_prompt_latency: float) -> Scheduler:
    """A scheduler with a gate of half the latency; sequence 0 decodes. Steps may be scheduled and forgotten."""
    sched = scheduler(scheduler_delay_factor=0.5)
    sched.add(prompt(3, id=0))
    sched.record_step(step(sched), last_prompt_latency)
    return sched


def ids(scheduled: Flight | None) -> list[int]:
    return scheduled[0].req_ids if scheduled is not None else []


def test_t01_budget_counts_only_uncached_tokens() -> None:
    sched = scheduler(max_num_batched_tokens=48)
    sched.add(prompt(40))
    step(sched, EOS)
    sched.add_group([prompt(40), prompt(40, 200)])
    batch = step(sched)
    assert (batch.num_cached_tokens, batch.num_scheduled_tokens) == ([32, 0], [8, 40])
    assert [len(tokens) for tokens in batch.scheduled_tokens] == [8, 40]
    assert batch.context_lens == [40, 40]


def test_t02_fully_cached_prompt_computes_one_block() -> None:
    sched = scheduler()
    sched.add(prompt(32))
    step(sched, EOS)
    sched.add(prompt(32))
    batch = step(sched)
    assert (batch.num_cached_tokens, batch.num_scheduled_tokens) == ([16], [16])


def test_t03_a_free_hit_costs_a_block_and_a_hit_in_use_does_not() -> None:
    sched = scheduler(num_kvcache_blocks=3)
    sched.add(prompt(32))
    step(sched, EOS)
    holder = prompt(16, 500)
    sched.block_manager.allocate(holder)
    follower = prompt(33)
    assert not sched.block_manager.can_allocate(follower)
    sched.block_manager.deallocate(holder)
    sharer = prompt(17)
    sched.block_manager.allocate(sharer)
    assert sched.block_manager.can_allocate(prompt(17))


def test_t04_a_prompt_longer_than_a_step_is_cut() -> None:
    sched = scheduler(max_num_batched_tokens=16)
    sched.add(prompt(40))
    assert [step(sched).num_scheduled_tokens for _ in range(3)] == [[16], [16], [8]]


def test_t05_a_prompt_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(PromptTooLongError):
        scheduler(num_kvcache_blocks=2).add(prompt(33))


def test_t06_the_pool_holds_the_longest_sequence() -> None:
    with pytest.raises(InvalidFieldError):
        scheduler(num_kvcache_blocks=2, max_model_len=33)


def test_t07_running_set_is_bounded_and_every_sequence_ends() -> None:
    sched = scheduler(max_num_seqs=2)
    seqs = [prompt(3, 100 * i, max_tokens=2) for i in range(1, 7)]
    sched.add_group(seqs)
    for _ in range(6):
        step(sched)
        assert len(sched.running) <= 2
    assert all(seq.is_finished for seq in seqs)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_t08_long_prompt_does_not_block_running_sequences(policy: str) -> None:
    sched = scheduler(max_num_batched_tokens=16, scheduling_policy=policy, max_consecutive_prefill_steps=2)
    running = prompt(3)
    sched.add(running)
    step(sched)
    sched.add(prompt(160, 300))
    for _ in range(6):
        step(sched)
    assert running.num_completion_tokens >= 3


def test_t09_new_sequence_gets_no_blocks_of_victim_in_same_step() -> None:
    sched = scheduler(num_kvcache_blocks=5, scheduling_policy="mixed", enable_prefix_caching=False)
    sched.add_group([prompt(32), prompt(32, 200)])
    step(sched)
    newcomer = prompt(3, 900, max_tokens=2, priority=Priority.HIGH)
    sched.add(newcomer)
    batch = step(sched)
    assert sched.lifecycle.num_preemptions == 1
    assert newcomer.id not in batch.req_ids
    assert newcomer.id in step(sched).req_ids


def test_t10_prompt_without_blocks_blocks_later_prompts() -> None:
    sched = scheduler(num_kvcache_blocks=4, enable_prefix_caching=False)
    sched.add(prompt(20, max_tokens=2))
    step(sched)
    large, small = prompt(50, 200, max_tokens=2), prompt(3, 300, max_tokens=2)
    sched.add_group([large, small])
    assert small.id not in step(sched).req_ids
    assert step(sched).req_ids[0] == large.id


def test_t11_the_gate_opens_once_for_the_whole_burst() -> None:
    sched = scheduler(scheduler_delay_factor=0.5)
    for i in range(1, 5):
        sched.add(prompt(3, 100 * i))
    assert step(sched).total_seqs_num == 4


def test_t12_latency_counts_only_steps_with_prompts() -> None:
    sched = scheduler()
    sched.add(prompt(3))
    sched.record_step(step(sched), 0.1)
    sched.record_step(step(sched), 9.0)
    assert sched.last_prompt_latency == 0.1


def test_t13_a_prompt_arrives_when_the_worker_receives_it() -> None:
    box = Inbox(LIMITS, is_live=lambda rid: False)
    box.submit(submit(1, record(10, deadline_left_ms=1500)).submit, 100.0)
    [group] = box.take_groups()
    seq = group.arrivals[0].seq
    assert (seq.arrive_time, seq.deadline) == (100.0, 101.5)
    sched = decoding_for(0.1)
    sched.add(seq)
    assert [ids(sched.schedule(now)) for now in (100.04, 100.06)] == [[0], [seq.id]]


def test_t14_aborted_sequence_opens_no_gate_and_router_group_passes() -> None:
    sched = decoding_for(0.1)
    gone, waits, released = prompt(3, 200), prompt(3, 300, arrive_time=9.0), prompt(3, 400, arrive_time=9.0)
    sched.add(gone)
    sched.add(waits)
    sched.abort(gone.id, now=9.0)
    sched.add_group([released])
    assert [ids(sched.schedule(now)) for now in (9.01, 9.06)] == [[released.id], [waits.id]]
    assert sched.last_prompt_latency == 0.1


@pytest.mark.parametrize("k", [1, 3, 7])
def test_t15_check_and_act_agree_with_drafts(k: int) -> None:
    sched = scheduler(k=k, num_kvcache_blocks=3)
    manager = sched.block_manager
    seq = prompt(16)
    manager.allocate(seq)
    seq.num_computed_tokens = 14
    manager.allocate(prompt(32, 500))
    assert not manager.can_append(seq, 2 + k)
    assert manager.can_append(seq, 2)


def test_t16_blocks_of_one_token() -> None:
    sched = scheduler(kv_cache_block_size=1, num_kvcache_blocks=4)
    manager = sched.block_manager
    seq = Sequence([5, 6, 7, 8], 1)
    manager.allocate(seq)
    seq.num_computed_tokens = 4
    assert not manager.can_append(seq)


def test_t17_eviction_drops_the_index_entry() -> None:
    sched = scheduler(num_kvcache_blocks=2)
    sched.add(prompt(17))
    step(sched, EOS)
    sched.add(prompt(31, 500))
    step(sched)
    assert len(sched.block_manager.hash_to_block_id) == 1
    sched.check_integrity()


def test_t18_a_batch_is_a_copy() -> None:
    sched = scheduler()
    seq = prompt(16)
    sched.add(seq)
    flight = launch(sched)
    table = list(seq.block_table)
    land(sched, flight, 50)
    step(sched)
    sched.abort(seq.id, now=0.0)
    assert flight[0].block_tables == [table]


def test_t19_a_block_is_published_when_it_is_written() -> None:
    sched = scheduler()
    sched.add(prompt(20))
    flight = launch(sched)
    assert sched.block_manager.hash_to_block_id == {}
    land(sched, flight, 50)
    assert len(sched.block_manager.hash_to_block_id) == 1


def test_t20_block_without_kv_of_last_token_is_not_published() -> None:
    sched = scheduler()
    sched.add(prompt(15))
    step(sched)
    assert sched.block_manager.hash_to_block_id == {}


def test_t21_a_hit_keeps_the_identity_of_a_free_block() -> None:
    sched = scheduler()
    for _ in range(3):
        sched.add(prompt(20))
        batch = step(sched, EOS)
    assert batch.num_cached_tokens == [16]


def test_t22_suffixes_die_before_prefixes() -> None:
    sched = scheduler(num_kvcache_blocks=3)
    sched.add(prompt(33))
    step(sched, EOS)
    sched.add(prompt(17, 500))
    step(sched, EOS)
    sched.add(prompt(33))
    assert step(sched).num_cached_tokens == [16]


def test_t23_a_hash_is_only_a_hint() -> None:
    manager = scheduler().block_manager
    first, second = (Sequence([*[prefix] * SIZE, *[9] * SIZE, 1], SIZE) for prefix in (5, 6))
    for seq, prefix_hash in ((first, 11), (second, 12)):
        seq.block_hashes = [prefix_hash, 77]
        manager.allocate(seq)
        seq.num_computed_tokens = 33 if seq is first else 16
        manager.publish(seq)
    manager.deallocate(second)
    second.block_hashes = [12, 77]
    assert len(manager.prefixes.cached_blocks(second)) == 1


def test_t24_a_preempted_sequence_resumes_from_all_its_tokens() -> None:
    sched = scheduler(enable_prefix_caching=False)
    seq = prompt(20)
    sched.add(seq)
    step(sched)
    sched.preempt(seq)
    assert step(sched).scheduled_tokens == [[*range(100, 120), 50]]


def test_t25_a_preempted_sequence_gets_its_late_token() -> None:
    sched = scheduler()
    seq = prompt(3)
    sched.add(seq)
    flight = launch(sched)
    sched.preempt(seq)
    land(sched, flight, 51)
    assert seq.token_ids == [100, 101, 102, 51]


def test_t26_rejected_drafts_leave_no_tokens() -> None:
    sched = scheduler(k=3)
    seq = prompt(3)
    sched.add(seq)
    step(sched, drafts=[51, 52, 53])
    flight = launch(sched)
    assert seq.num_tokens == 4
    land(sched, flight, (51, 60))
    assert (seq.output_tokens, seq.num_computed_tokens) == ([50, 51, 60], 5)


def test_t27_an_end_of_sequence_id_in_the_prompt_stays() -> None:
    sched = scheduler()
    seq = Sequence([11, 12, EOS], SIZE)
    sched.add(seq)
    step(sched)
    assert seq.token_ids == [11, 12, EOS, 50]


def test_t28_a_prompt_of_one_chunk_has_its_output_in_flight() -> None:
    sched = scheduler()
    seq = prompt(3)
    sched.add(seq)
    flight = launch(sched)
    assert seq.num_placeholder == 1
    land(sched, flight, 50)
    assert seq.num_placeholder == 0


def test_t29_output_is_read_by_sequence_id() -> None:
    class Unlisted(ScheduledBatchOutput):
        @property
        def req_ids(self) -> list[int]:
            raise AssertionError("a search in a list for every sequence")

    assert ScheduledBatchOutput({7: (1,)}).req_ids == [7]
    sched = scheduler()
    seq = prompt(3)
    sched.add(seq)
    batch, seqs = launch(sched)
    output = Unlisted({seq.id: (5,)})
    sched.postprocess(seqs.values(), output, batch=batch, now=0.0)
    assert seq.output_tokens == [5]


def test_t30_victims_are_the_newest_and_keep_their_order() -> None:
    sched = scheduler(num_kvcache_blocks=6, enable_prefix_caching=False)
    seqs = [prompt(16, 100 * i) for i in range(1, 4)]
    sched.add_group(seqs)
    while sched.lifecycle.num_preemptions < 2:
        step(sched)
    assert [seq.id for seq in sched.running] == [seqs[0].id]
    assert [seq.id for seq in sched.waiting] == [seqs[1].id, seqs[2].id]


def test_t31_only_the_last_chunk_is_sampled() -> None:
    sched = scheduler(max_num_batched_tokens=16)
    sched.add(prompt(40))
    assert [step(sched).is_final for _ in range(3)] == [[False], [False], [True]]


def test_t32_zero_is_an_id() -> None:
    sched = scheduler()
    sched.add(Sequence([1, 4], SIZE, id=0))
    assert step(sched).req_ids == [0]
    assert sched.abort(0, now=0.0)


def test_t33_accepted_is_one_less_than_the_tokens() -> None:
    sched = scheduler(k=3)
    sched.add(prompt(3))
    step(sched, drafts=[51, 52, 53])
    for tokens in [(60,), (51, 60), (51, 52, 60), (51, 52, 53, 60)]:
        land(sched, launch(sched), tokens, drafts=[51, 52, 53])
    assert (sched.spec_stats.total_draft_tokens, sched.spec_stats.total_accepted_tokens) == (12, 6)


def test_t34_tokens_after_stop_are_dropped() -> None:
    sched = scheduler(k=3)
    seq = prompt(3)
    sched.add(seq)
    step(sched, drafts=[EOS, 52, 53])
    sched.take_outputs()
    land(sched, launch(sched), (EOS, 52, 53, 54))
    assert seq.output_tokens == [50, EOS]
    assert [out.output_tokens for out in sched.take_outputs()] == [[EOS]]


def test_t35_a_stop_sequence_does_not_reach_into_the_prompt() -> None:
    sched = scheduler()
    seq = Sequence([11, 30], SIZE, SamplingParams(max_tokens=9), [[30, 31]])
    sched.add(seq)
    step(sched, 31)
    assert not seq.is_finished


def test_t36_ignore_eos_keeps_request_stop_ids() -> None:
    sched = scheduler()
    seq = Sequence([11], SIZE, SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(7,)))
    sched.add(seq)
    step(sched, EOS)
    assert not seq.is_finished
    step(sched, 7)
    assert (seq.leave_reason, sched.take_outputs()[-1].end_reason) == ("stop_7", EndReason.STOP_TOKEN)


def test_t37_end_reason_is_typed_and_names_stop() -> None:
    sched = scheduler(stop_token_ids=(9,))
    found = []
    for tokens, params in [
        ([EOS], SamplingParams(max_tokens=9)),
        ([9], SamplingParams(max_tokens=9)),
        ([7], SamplingParams(max_tokens=9, stop_token_ids=(7,))),
        ([5, 6], SamplingParams(max_tokens=9, stop_token_sequences=((5, 6),))),
        ([5], SamplingParams(max_tokens=1)),
    ]:
        sched.add(Sequence([11], SIZE, params))
        for token in tokens:
            step(sched, token)
        out = sched.take_outputs()[-1]
        assert out.end is not None
        found.append((out.finish_reason, out.end.reason, out.end.stop_token_id, out.end.stop_token_sequence))
    assert found == [
        ("eos", EndReason.EOS, EOS, None),
        ("stop_9", EndReason.EOS, 9, None),
        ("stop_7", EndReason.STOP_TOKEN, 7, None),
        ("stop_sequence", EndReason.STOP_SEQUENCE, None, (5, 6)),
        ("max_tokens", EndReason.LENGTH, None, None),
    ]
    assert set(PROTO_REASONS) == set(EndReason)
    assert len(set(PROTO_REASONS.values())) == len(EndReason)


def test_t38_the_first_token_time_with_several_tokens() -> None:
    sched = scheduler()
    seq = prompt(3)
    sched.add(seq)
    batch, seqs = launch(sched)
    sched.postprocess(seqs.values(), ScheduledBatchOutput({seq.id: (5, 6)}), batch=batch, now=3.0)
    assert seq.first_token_time == 3.0


def test_t41_token_after_abort_is_dropped() -> None:
    sched = scheduler()
    seq, other = prompt(3), prompt(3, 200)
    sched.add_group([seq, other])
    batch, seqs = launch(sched)
    assert sched.abort(seq.id, now=0.0)
    assert not sched.abort(seq.id, now=0.0)
    output = ScheduledBatchOutput({seq.id: (5,), other.id: (6,)})
    sched.postprocess(seqs.values(), output, batch=batch, now=0.0)
    assert (seq.output_tokens, other.output_tokens) == ([], [6])
    assert sched.block_manager.num_free_blocks == 15


@pytest.mark.parametrize("patience_s", [0.3])
def test_t42_blocks_freed_in_flight_are_reused_after_step(patience_s: float) -> None:
    """The first step waits `patience_s` for the second one to begin beside it."""
    running: list[int] = []
    overlapped = threading.Event()

    class Slow(SimulatedRunner):
        def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
            if running:
                overlapped.set()
                raise AssertionError("two steps at a time")
            running.append(1)
            if batch.req_ids == [first.id]:
                overlapped.wait(patience_s)
            output = super().forward(batch)
            running.pop()
            return output

    config = Config(num_kvcache_blocks=2, deferred_output=True)
    core = EngineCore(config, Slow(50, EOS, num_blocks=2))
    first, second = prompt(30, 10), prompt(30, 15, max_tokens=2)
    core.add_request(first)
    core.step()
    table = list(first.block_table)
    core.abort(first.id)
    core.add_request(second)
    core.step()
    assert set(second.block_table) == set(table)
    while core.has_unfinished():
        core.step()
    assert second.output_tokens == SimulatedRunner(50, EOS).reference(second.prompt_token_ids, 2)


def test_t43_rows_are_in_the_order_of_admission() -> None:
    sched = scheduler(num_kvcache_blocks=80)
    seqs = [prompt(3, 100 * i) for i in range(1, 33)]
    sched.add_group(seqs)
    for _ in range(3):
        assert step(sched).req_ids == [seq.id for seq in seqs]


def test_t44_every_sequence_ends_in_one_output() -> None:
    sched = scheduler(max_num_seqs=1)
    running, waiting = prompt(3, max_tokens=1), prompt(3, 200)
    sched.add_group([running, waiting])
    step(sched)
    sched.abort(waiting.id, now=0.0)
    assert [(out.request_id, out.finished) for out in sched.take_outputs()] == [(running.id, True), (waiting.id, True)]
