"""The scheduler's decisions beyond the traps, which are in test_traps.py."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.config import Config, SpeculativeConfig
from common.errors import InvalidFieldError, PromptTooLongError
from common.params.sampling_params import SamplingParams
from tests.unit.mutants import FAULTS
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.outputs import RequestOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Priority, Sequence, SequenceStatus, SequenceType

EOS = 2


def scheduler(**options: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "kv_cache_block_size": 16,
        "num_kvcache_blocks": 64,
        "eos_token_id": EOS,
        "stop_token_ids": (3,),
        "enable_prefix_caching": True,
    }
    return Scheduler(Config(**(settings | options)))


def prompt(length: int, first: int = 100, max_tokens: int = 50, **params: Any) -> Sequence:
    return Sequence(list(range(first, first + length)), 16, SamplingParams(max_tokens=max_tokens, **params))


def batch_of(sched: Scheduler, now: float = 0.0) -> tuple[ScheduledBatch, dict[int, Sequence]]:
    scheduled = sched.schedule(now)
    assert scheduled is not None
    return scheduled


def step(sched: Scheduler, *tokens: int, now: float = 0.0) -> ScheduledBatch:
    """One step; `tokens` are sampled for the final rows in turn, 50 when there are no more."""
    batch, seqs = batch_of(sched, now)
    given = iter(tokens)
    final = [seq_id for seq_id, last in zip(batch.req_ids, batch.is_final, strict=True) if last]
    sched.postprocess(
        list(seqs.values()), ScheduledBatchOutput({i: (next(given, 50),) for i in final}), batch=batch, now=now
    )
    sched.check_integrity()
    return batch


def kinds(sched: Scheduler, steps: int) -> str:
    return "".join("P" if step(sched).total_tokens_num_prefill else "D" for _ in range(steps))


class TestAdmission:
    def test_fitting_prompts_share_one_prefill_step(self) -> None:
        sched = scheduler()
        seqs = [prompt(10), prompt(20, 200), prompt(1, 300)]
        sched.add_group(seqs)
        batch = step(sched)
        assert batch.req_ids == [s.id for s in seqs]
        assert (batch.total_tokens_num_prefill, batch.total_seqs_num_prefill, batch.total_tokens_num) == (31, 3, 31)
        batch = step(sched)
        assert (batch.total_tokens_num_decode, batch.total_seqs_num_decode, batch.num_scheduled_tokens) == (
            3,
            3,
            [1] * 3,
        )
        assert [s.type for s in seqs] == [SequenceType.DECODE] * 3
        assert batch.scheduled_tokens == [[50]] * 3

    def test_long_prompt_is_chunked_while_others_decode(self) -> None:
        sched = scheduler(max_num_batched_tokens=16, max_consecutive_prefill_steps=1)
        sched.add(prompt(5))
        step(sched)
        long = prompt(40, 200)
        sched.add_group([long, prompt(3, 300)])
        assert kinds(sched, 7) == "DPDPDPD"  # the short prompt shares the last chunk's step
        assert long.num_completion_tokens == 2  # nothing was sampled from its first two chunks

    @pytest.mark.parametrize(("most", "trace"), [(1, "DPDPDPDPDPD"), (2, "PDPPDPPDDDD"), (4, "PPPDPPDDDDD")])
    def test_decode_step_follows_max_consecutive_prefill_steps(self, most: int, trace: str) -> None:
        sched = scheduler(max_num_batched_tokens=16, max_consecutive_prefill_steps=most)
        sched.add(prompt(5))
        step(sched)
        sched.add_group([prompt(80, 200)])
        assert kinds(sched, 11) == trace

    def test_lone_long_prompt_uses_every_step(self) -> None:
        sched = scheduler(max_num_batched_tokens=16)
        sched.add(prompt(40))
        assert kinds(sched, 4) == "PPPD"

    def test_only_a_prompt_longer_than_a_step_is_cut(self) -> None:
        sched = scheduler(max_num_batched_tokens=32)
        sched.add_group([prompt(20), prompt(20, 200), prompt(2, 300)])
        assert step(sched).num_scheduled_tokens == [20]  # first come, first served: the third does not pass the second
        assert step(sched).num_scheduled_tokens == [20, 2]

    def test_burst_with_common_prefix_computes_prefix_once(self) -> None:
        sched = scheduler()
        burst = [prompt(40) for _ in range(4)]
        bystander = prompt(10, 500)
        sched.add_group([*burst, bystander])
        assert step(sched).req_ids == [burst[0].id, bystander.id]
        batch = step(sched)
        assert batch.req_ids == [s.id for s in burst[1:]]
        assert batch.num_scheduled_tokens == [8] * 3

    def test_sequence_waiting_for_hit_takes_no_slot(self) -> None:
        """Followers of a prefix that is being computed kept others from places that were free."""
        sched = scheduler(max_num_seqs=4)
        burst, others = [prompt(40) for _ in range(6)], [prompt(10, 500), prompt(10, 600)]
        sched.add_group([*burst, *others])
        assert step(sched).req_ids == [burst[0].id, *(seq.id for seq in others)]
        assert step(sched).req_ids == [burst[1].id]

    def test_long_hits_admitted_per_step_are_bounded(self) -> None:
        """Former fault: one step looked up the prefixes of all waiting sequences, and decodes waited for it."""
        sched = scheduler(num_kvcache_blocks=1000, max_num_seqs=64, max_num_batched_tokens=5000)
        shared = list(range(100, 4100))
        sched.add_group([Sequence(shared, 16, SamplingParams(max_tokens=1))])
        step(sched)
        sched.add_group([Sequence([*shared, 5000 + i], 16, SamplingParams(max_tokens=50)) for i in range(40)])
        admitted = [step(sched).total_seqs_num_prefill for _ in range(3)]
        # 250 blocks each.
        assert admitted == [17, 17, 6]

    def test_unrunnable_sequence_is_refused_without_state(self) -> None:
        sched = scheduler(num_kvcache_blocks=4, max_model_len=64)
        with pytest.raises(PromptTooLongError, match="at most 63"):
            sched.add_group([prompt(3), prompt(64)])
        with pytest.raises(InvalidFieldError, match="token_ids"):
            sched.add(Sequence([], 16))
        with pytest.raises(InvalidFieldError, match="block_size"):
            sched.add(Sequence([1], 32))
        assert not sched.has_unfinished()

    def test_longest_prompt_runs(self) -> None:
        sched = scheduler(num_kvcache_blocks=4, max_model_len=64)
        seq = prompt(63, max_tokens=50)
        sched.add(seq)
        step(sched)
        assert (seq.leave_reason, seq.num_tokens) == ("max_tokens", 64)
        assert sched.take_outputs()[-1].end_reason is EndReason.LENGTH

    def test_running_set_is_bounded_by_step_tokens(self) -> None:
        assert scheduler(max_num_seqs=99, max_num_batched_tokens=7).max_num_seqs == 7

    def test_schedule_without_work_is_none(self) -> None:
        assert scheduler().schedule(0.0) is None

    def test_known_id_is_ignored(self) -> None:  # S5
        sched = scheduler()
        seq = prompt(4)
        assert sched.add(seq)
        assert not sched.add(Sequence([9, 9], 16, id=seq.id))
        assert sched.add_group([seq, seq]) == []
        assert step(sched).num_scheduled_tokens == [4]


class TestMixed:
    def mixed(self, **options: Any) -> Scheduler:
        return scheduler(scheduling_policy="mixed", **options)

    def test_decodes_go_first_and_chunks_fill_the_budget(self) -> None:
        sched = self.mixed(max_num_batched_tokens=16)
        first, long, short = prompt(5), prompt(40, 200), prompt(3, 300)
        sched.add(first)
        step(sched)
        sched.add_group([long, short])
        batches = [step(sched) for _ in range(4)]
        assert [batch.num_scheduled_tokens for batch in batches] == [[1, 15], [1, 15], [1, 10, 3], [1, 1, 1]]
        assert [batch.req_ids[1] for batch in batches[:2]] == [long.id, long.id]
        batch = batches[2]
        assert (batch.total_seqs_num_decode, batch.total_seqs_num_prefill) == (1, 2)
        assert (batch.total_tokens_num_decode, batch.total_tokens_num_prefill) == (1, 13)

    def test_prompt_beyond_remaining_budget_is_chunked(self) -> None:
        sched = self.mixed(max_num_batched_tokens=32)
        sched.add_group([prompt(20), prompt(20, 200)])
        assert step(sched).num_scheduled_tokens == [20, 12]
        assert step(sched).num_scheduled_tokens == [1, 8]

    def test_partly_prefilled_sequence_can_be_preempted(self) -> None:
        sched = self.mixed(num_kvcache_blocks=6, max_num_batched_tokens=17, enable_prefix_caching=False)
        old, partial = prompt(31, max_tokens=40), prompt(62, 200, max_tokens=2)
        sched.add_group([old])
        step(sched)
        step(sched)
        sched.add_group([partial])
        batch = step(sched)
        assert batch.req_ids == [old.id]  # its blocks are not all there, so none is taken
        sched.abort(old.id, now=0.0)
        other = prompt(16, 500, max_tokens=60)
        sched.add_group([other])
        sched.waiting.remove(other)
        sched.waiting.appendleft(other)
        step(sched)
        step(sched)
        assert 0 < partial.num_computed_tokens < partial.num_tokens
        sched.preempt(partial)
        sched.check_integrity()
        assert (partial.status, partial.num_computed_tokens, partial.block_table) == (SequenceStatus.WAITING, 0, [])

    def test_both_policies_schedule_running_sequences(self) -> None:
        sched = self.mixed(max_num_batched_tokens=4, max_num_seqs=4)
        sched.add_group([prompt(3, 100 * i, max_tokens=9) for i in range(1, 4)])
        sched.add_group([prompt(30, 700, max_tokens=2)])
        while sched.has_unfinished():
            running = [s.id for s in sched.running if s.num_completion_tokens]
            batch = step(sched)
            assert batch.req_ids[: len(running)] == running
            assert batch.total_tokens_num <= 4
            sched.take_outputs()

    def test_prompt_has_budget_share_beside_decodes(self) -> None:
        """Former fault: a prompt got one token of a step beside 15 decodes with a budget of 16."""
        sched = self.mixed(max_num_batched_tokens=16, max_num_seqs=16)
        sched.add_group([prompt(1, 100 + i, max_tokens=1000) for i in range(15)])
        step(sched)
        sched.add_group([prompt(40, 200)])
        assert [step(sched).total_tokens_num_prefill for _ in range(20)] == [2] * 20
        assert step(sched).total_tokens_num_prefill == 0

    def test_prompt_without_share_starves(self) -> None:
        (mutant,) = [mutant for mutant in FAULTS if mutant.trap == "prompts-starve"]
        with mutant.applied(), pytest.raises(AssertionError):
            self.test_prompt_has_budget_share_beside_decodes()

    def test_decodes_beyond_budget_alternate(self) -> None:
        """A sequence left out for a prompt is in the next step, and all sequences are left out equally often."""
        sched = self.mixed(max_num_batched_tokens=32, max_num_seqs=32, num_kvcache_blocks=200)
        decodes = [prompt(1, 100 + i, max_tokens=1000) for i in range(31)]
        sched.add_group(decodes)
        step(sched)
        sched.add_group([prompt(4 * 31, 200)])
        lengths = [len(seq) for seq in decodes]
        missing: set[int] = set()
        for _ in range(31):
            present = {seq_id for seq_id in step(sched).req_ids if seq_id in {seq.id for seq in decodes}}
            assert not missing - present
            missing = {seq.id for seq in decodes} - present
            assert len(missing) == 3
        # 31 steps less 3 turns of each.
        assert [len(seq) - length for seq, length in zip(decodes, lengths, strict=True)] == [28] * 31

    def test_unadmitted_prompt_reserves_no_budget_of_others(self) -> None:
        """Nor is more kept for a prompt than it needs."""
        sched = self.mixed(max_num_batched_tokens=16, max_num_seqs=16, num_kvcache_blocks=20, max_model_len=320)
        decodes = [prompt(1, 100 + i, max_tokens=15) for i in range(16)]
        sched.add_group(decodes[:15])
        step(sched)
        too_long = prompt(200, 200)
        sched.add_group([too_long])
        assert step(sched).total_seqs_num_decode == 15
        sched.abort(too_long.id, now=0.0)
        sched.add_group(decodes[15:])
        assert step(sched).num_scheduled_tokens == [1] * 16
        assert step(sched).total_seqs_num_decode == 16

    def test_drafts_use_budget_left_by_prompts(self) -> None:
        spec = SpeculativeConfig(num_speculative_tokens=3)
        sched = self.mixed(max_num_batched_tokens=64, num_kvcache_blocks=200, speculative_config=spec)
        decodes = [prompt(1, 100 + i, max_tokens=1000) for i in range(15)]
        sched.add_group(decodes)
        step(sched)
        sched.add_group([prompt(40, 200)])
        for seq in decodes:
            seq.spec_token_ids = [1, 2, 3]
        batch = batch_of(sched)[0]
        assert (batch.total_seqs_num_decode, batch.total_tokens_num_prefill) == (15, 40)
        assert batch.num_scheduled_tokens == [4, 4, 4, *[1] * 12, 40]


class TestOverdue:
    def waiting(self, sched: Scheduler, *seqs: Sequence) -> None:
        for seq in seqs:
            seq.may_return = True
        sched.add_group(seqs)

    def test_sequence_waiting_for_hit_is_not_returned(self) -> None:
        """All followers of a long prefix were returned just before they would have hit it."""
        for deferred in (False, True):
            sched = scheduler(max_num_batched_tokens=32, scheduling_policy="mixed", deferred_output=deferred)
            leader, follower, other = prompt(200), prompt(210), prompt(20, 600)
            self.waiting(sched, leader, follower, other)
            while leader.first_token_time is None:
                scheduled = batch_of(sched, 1.0)
                assert sched.overdue(2.0, 0.25) == ([other] if other.first_scheduled_time is None else [])
                batch, seqs = scheduled
                final = [i for i, last in zip(batch.req_ids, batch.is_final, strict=True) if last]
                output = ScheduledBatchOutput(dict.fromkeys(final, (50,)))
                sched.postprocess(seqs.values(), output, batch=batch, now=1.0)
                if leader.first_token_time is None:
                    assert follower not in sched.overdue(2.0, 0.25)
            step(sched, now=1.0)
            assert follower.num_cached_tokens == 192

    def test_every_class_is_looked_at(self) -> None:
        """Former fault: while a new sequence of a higher class waited, no other sequence was ever returned."""
        sched = scheduler(max_num_seqs=1)
        sched.add_group([prompt(5, 900)])
        step(sched)
        old = [prompt(5, 100), prompt(5, 200)]
        old[1].priority = Priority.LOW
        young = prompt(5, 300)
        young.priority, young.arrive_time = Priority.HIGH, 9.9
        late = prompt(5, 400)
        late.arrive_time = 9.9
        self.waiting(sched, *old, young, late)
        assert sched.overdue(10.0, 0.25) == old


class TestGate:
    def gated(self) -> tuple[Scheduler, Sequence]:
        """One running sequence; the last prefill took 0.1 s."""
        sched = scheduler(scheduler_delay_factor=0.5)
        running = prompt(4)
        sched.add(running)
        batch = step(sched)
        sched.record_step(batch, 0.1)
        return sched, running

    def late(self, arrive: float, first: int) -> Sequence:
        seq = prompt(4, first)
        seq.arrive_time = arrive
        return seq

    def test_burst_is_admitted_together(self) -> None:
        sched, _ = self.gated()
        burst = [self.late(1.0 + i / 100, 100 * i) for i in range(2, 6)]
        for seq in burst:
            sched.add(seq)
        assert step(sched, now=1.05).total_tokens_num_prefill == 0
        assert step(sched, now=1.08).req_ids == [s.id for s in burst]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 90), st.sampled_from(Priority)), min_size=1, max_size=8), st.integers(0, 160)
    )
    def test_gate_opens_by_earliest_arrival(self, arrivals: list[tuple[int, Priority]], now_ms: int) -> None:
        """The 50 ms hold starts at the earliest arrival, whatever the order of additions and the priority classes."""
        sched, _ = self.gated()
        for number, (arrive_ms, priority) in enumerate(arrivals):
            seq = self.late(1.0 + arrive_ms / 1e3, 100 * (number + 2))
            seq.priority = priority
            sched.add(seq)
        age_ms = now_ms - min(arrive_ms for arrive_ms, _ in arrivals)
        assume(abs(age_ms - 50) > 1)
        prompts = step(sched, now=1.0 + now_ms / 1e3).total_seqs_num_prefill
        assert prompts == (len(arrivals) if age_ms > 50 else 0)

    def test_idle_engine_schedules_prompt_at_once(self) -> None:
        sched, running = self.gated()
        sched.abort(running.id, now=0.5)
        for i in range(2, 6):
            sched.add(self.late(1.0, 100 * i))
        assert step(sched, now=1.0).total_seqs_num_prefill == 4

    def test_router_group_is_not_delayed(self) -> None:
        sched, _ = self.gated()
        own, group = self.late(1.0, 200), self.late(1.0, 300)
        sched.add(own)
        sched.add_group([group])
        assert step(sched, now=1.0).req_ids == [group.id]
        assert sched.load().waiting_seqs == 1

    def test_prefill_rate_counts_only_steps_with_prompts(self) -> None:
        sched = scheduler(max_num_batched_tokens=64)
        sched.add(prompt(20))
        sched.record_step(step(sched), 0.5)
        sched.record_step(step(sched), 9.0)
        assert sched.load().prefill_rate == pytest.approx(40)


class TestPreemption:
    def test_preempted_sequence_resumes_from_all_tokens_and_own_blocks(self) -> None:
        sched = scheduler()
        seq = prompt(30)
        sched.add(seq)
        for token in (51, 52, 53):
            step(sched, token)
        sched.preempt(seq)
        batch = step(sched, 54)
        assert batch.num_cached_tokens == [32]
        assert batch.scheduled_tokens == [[53]]
        assert seq.output_tokens == [51, 52, 53, 54]

    def test_pressure_does_not_thrash(self) -> None:
        sched = scheduler(num_kvcache_blocks=12, enable_prefix_caching=False)
        seqs = [prompt(16, 100 * i, max_tokens=100, ignore_eos=True) for i in range(1, 9)]
        sched.add_group(seqs)
        prefills = sum(step(sched).total_seqs_num_prefill for _ in iter(lambda: len(sched.lifecycle.live), 0))
        assert all(s.num_completion_tokens == 100 for s in seqs)
        assert prefills <= 20  # 8 first prefills and few repeated ones


class TestStops:
    def ended(self, seq: Sequence, *tokens: int, **options: Any) -> RequestOutput:
        """Feeds the tokens one by one until the sequence ends."""
        sched = scheduler(**options)
        sched.add(seq)
        for token in tokens:
            step(sched, token)
            outputs = sched.take_outputs()
            if outputs[-1].finished:
                return outputs[-1]
        raise AssertionError("did not end")

    @pytest.mark.parametrize(
        ("params", "tokens", "reason", "end", "length"),
        [
            ({}, [9, EOS], "eos", EndReason.EOS, 2),
            ({}, [9, 3], "stop_3", EndReason.EOS, 2),
            ({"ignore_eos": True, "max_tokens": 3}, [EOS, 3, 9], "max_tokens", EndReason.LENGTH, 3),
            ({"stop_token_ids": (7,)}, [9, 7], "stop_7", EndReason.STOP_TOKEN, 2),
            ({"stop_token_ids": (EOS,)}, [EOS], "eos", EndReason.EOS, 1),
            # Ignore_eos does not disable the request's own ids
            ({"stop_token_ids": (EOS,), "ignore_eos": True}, [EOS], "stop_2", EndReason.STOP_TOKEN, 1),
            ({"stop_token_sequences": ((8, EOS),)}, [8, EOS], "stop_sequence", EndReason.STOP_SEQUENCE, 2),
            # Not across the border to the prompt, which ends in 109
            ({"stop_token_sequences": ((109, 8),), "max_tokens": 2}, [8, 9], "max_tokens", EndReason.LENGTH, 2),
            ({"min_tokens": 3}, [EOS, 3, EOS], "eos", EndReason.EOS, 3),
            ({"min_tokens": 9, "max_tokens": 2}, [EOS, EOS], "max_tokens", EndReason.LENGTH, 2),
            ({"max_tokens": 2}, [9, EOS], "eos", EndReason.EOS, 2),
        ],
    )
    def test_rules(self, params: dict[str, Any], tokens: list[int], reason: str, end: EndReason, length: int) -> None:
        seq = prompt(10, **params)
        output = self.ended(seq, *tokens)
        assert (output.finish_reason, output.end_reason, seq.num_completion_tokens) == (reason, end, length)
        assert seq.leave_reason == reason
        assert output.end is not None
        if end in (EndReason.EOS, EndReason.STOP_TOKEN):
            assert output.end.stop_token_id == tokens[length - 1]
        if end is EndReason.STOP_SEQUENCE:
            assert output.end.stop_token_sequence == (8, EOS)

    @pytest.mark.parametrize(
        ("delivered", "params", "reason"),
        [([9, EOS], {}, "eos"), ([9, 9], {"max_tokens": 2}, "max_tokens"), ([8], {"stop_token_ids": (8,)}, "stop_8")],
    )
    def test_resumed_finished_sequence_ends_at_once(
        self, delivered: list[int], params: dict[str, Any], reason: str
    ) -> None:  # S5
        sched = scheduler()
        seq = Sequence([20, 21, *delivered], 16, SamplingParams(**params), num_prompt_tokens=2)
        sched.add_group([seq])
        assert sched.schedule(0.0) is None
        (output,) = sched.take_outputs()
        assert (output.output_tokens, output.finished, output.finish_reason) == ([], True, reason)
        assert not sched.has_unfinished()

    def test_resumed_sequence_continues_at_its_position(self) -> None:
        sched = scheduler()
        seq = Sequence([20, 21, 50, 51], 16, SamplingParams(max_tokens=3), num_prompt_tokens=2)
        sched.add_group([seq])
        assert step(sched, 52).scheduled_tokens == [[20, 21, 50, 51]]
        (output,) = sched.take_outputs()
        assert (output.output_tokens, output.finish_reason, seq.output_tokens) == ([52], "max_tokens", [52])


class TestAborts:
    def test_anywhere_at_once_and_only_once(self) -> None:
        sched = scheduler(max_num_batched_tokens=32, max_num_seqs=2, scheduler_delay_factor=1.0)
        decoding, chunked, waiting, gated = prompt(4), prompt(40, 200), prompt(4, 300), prompt(4, 400)
        gated.arrive_time = 1e9
        sched.add_group([decoding])
        step(sched)
        sched.add_group([chunked, waiting])
        step(sched)
        sched.add(gated)
        sched.take_outputs()
        for seq in (gated, waiting, chunked, decoding):
            assert sched.abort(seq.id, now=5.0)
            assert not sched.abort(seq.id, now=5.0)
            assert (seq.status, seq.leave_reason, seq.leave_time) == (SequenceStatus.FINISHED, "aborted", 5.0)
            sched.check_integrity()
        assert sched.block_manager.num_free_blocks == 64
        outputs = sched.take_outputs()
        assert [o.request_id for o in outputs] == [s.id for s in (gated, waiting, chunked, decoding)]
        assert all(o.finished and o.end_reason is EndReason.CANCELLED for o in outputs)


class TestOutputs:
    def test_first_step_and_token_times_survive_preemption(self) -> None:
        sched = scheduler(max_num_batched_tokens=16)
        seq = prompt(20, max_tokens=3)
        sched.add_group([seq])
        for now in (1.0, 2.0, 3.0):
            step(sched, now=now)
        sched.preempt(seq)
        step(sched, now=4.0)
        assert (seq.first_scheduled_time, seq.first_token_time, seq.leave_time) == (1.0, 2.0, 4.0)

    def test_queue_and_callback_receive_equal_outputs(self) -> None:
        sched = scheduler()
        called: list[RequestOutput] = []
        seq = Sequence([4, 5], 16, stream_callback=called.append)
        sched.add(seq)
        batch, seqs = batch_of(sched)
        outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        sched.postprocess(seqs.values(), ScheduledBatchOutput({seq.id: (EOS,)}), outputs, batch=batch, now=0.0)
        assert outputs.get_nowait() == called
        assert (called[0].request_id, called[0].output_tokens, called[0].finished) == (seq.id, [EOS], True)
        assert sched.take_outputs() == []

    def test_load(self) -> None:
        sched = scheduler(max_num_batched_tokens=64, max_num_seqs=4)
        sched.add_group([prompt(10), prompt(100, 200)])
        step(sched)
        sched.add(prompt(7, 400))
        assert (sched.lifecycle.num_decoding, sched.load().waiting_seqs) == (1, 1)
        assert sched.load().waiting_tokens == 46 + 7
        assert (sched.load().room_tokens, sched.load().room_seqs) == (64 - 53, 1)

    def test_decodes_reduce_room_for_prompts(self) -> None:
        """Former fault: routers counted room that decodes already used."""
        sched = scheduler(scheduling_policy="mixed", max_num_batched_tokens=64, max_num_seqs=64, num_kvcache_blocks=200)
        assert sched.load().room_tokens == 64
        sched.add_group([prompt(1, 100 + i) for i in range(50)])
        step(sched)
        assert sched.load().room_tokens == 14
        sched.add_group([prompt(4, 300)])
        assert sched.load().room_tokens == 10
        step(sched)
        sched.add_group([prompt(1, 400 + i) for i in range(13)])
        step(sched)
        assert sched.load().room_tokens == 64 // 8
