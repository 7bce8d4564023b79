"""Deferred output and speculation: steps scheduled before the tokens of the previous step arrive."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.config import Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore, EngineDeadError
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Priority, Sequence, SequenceStatus
from worker.engine.speculation.spec_stats import SpecStats
from worker.simulation.runner import SimulatedRunner

EOS, SIZE = 2, 16
Flight = tuple[ScheduledBatch, dict[int, Sequence]]


def scheduler(k: int = 0, **options: Any) -> Scheduler:
    settings: dict[str, Any] = {"num_kvcache_blocks": 16, "eos_token_id": EOS, "enable_prefix_caching": True}
    if k:
        settings["speculative_config"] = SpeculativeConfig(num_speculative_tokens=k)
    return Scheduler(Config(**(settings | options)))


def prompt(length: int, first: int = 100, max_tokens: int = 50, **options: Any) -> Sequence:
    return Sequence(list(range(first, first + length)), SIZE, SamplingParams(max_tokens=max_tokens), **options)


def launch(sched: Scheduler) -> Flight:
    scheduled = sched.schedule(0.0)
    assert scheduled is not None
    sched.check_integrity()
    return scheduled


def land(sched: Scheduler, flight: Flight, *tokens: int | tuple[int, ...], drafts: list[int] | None = None) -> None:
    """The tokens of the final rows, in batch order; `drafts` for each of them."""
    batch, seqs = flight
    final = [seq_id for seq_id, last in zip(batch.req_ids, batch.is_final, strict=True) if last]
    given = {i: t if isinstance(t, tuple) else (t,) for i, t in zip(final, tokens, strict=True)}
    output = ScheduledBatchOutput(given, None if drafts is None else dict.fromkeys(final, drafts))
    sched.postprocess(list(seqs.values()), output, batch=batch, now=0.0)
    sched.check_integrity()


def test_batches_of_same_sequences_share_columns() -> None:
    sched = scheduler()
    for i in range(3):
        sched.add(prompt(4, 100 * i, max_tokens=3 if i else 20))
    flights = [launch(sched), launch(sched)]
    for _ in range(2):
        land(sched, flights[-2], 50, 50, 50)
        flights.append(launch(sched))
    decodes = [batch for batch, _ in flights[1:]]
    assert [len(batch.req_ids) for batch in decodes] == [3, 3, 1]
    assert decodes[0].columns is decodes[1].columns


class TestInFlight:
    def test_next_step_is_scheduled_before_token_arrives(self) -> None:
        sched = scheduler()
        seq = prompt(3)
        sched.add(seq)
        first = launch(sched)
        second = launch(sched)
        batch = second[0]
        assert (batch.scheduled_tokens, batch.from_last_output, batch.is_final) == ([[]], [True], [True])
        assert (batch.num_computed_tokens, batch.context_lens) == ([3], [4])
        assert batch.input_tokens(ScheduledBatchOutput({seq.id: (7,)})) == [[7]]
        assert (seq.num_tokens, seq.num_placeholder, seq.num_inflight_tokens) == (3, 2, 4)
        land(sched, first, 7)
        assert (seq.token_ids[3:], seq.num_computed_tokens, seq.num_placeholder) == ([7], 3, 1)
        third = launch(sched)
        land(sched, second, 8)
        land(sched, third, 9)
        assert seq.output_tokens == [7, 8, 9]

    def test_known_length_schedules_no_extra_step(self) -> None:
        sched = scheduler()
        seq = prompt(3, max_tokens=2)
        sched.add(seq)
        first, second = launch(sched), launch(sched)
        assert sched.schedule(0.0) is None
        land(sched, first, 7)
        assert sched.schedule(0.0) is None
        land(sched, second, 8)
        assert (seq.output_tokens, seq.leave_reason) == ([7, 8], "max_tokens")

    def test_stop_drops_later_step_in_flight(self) -> None:
        sched = scheduler()
        seq = prompt(3)
        sched.add(seq)
        first, second = launch(sched), launch(sched)
        land(sched, first, EOS)
        assert (seq.is_finished, sched.block_manager.num_free_blocks) == (True, 16)
        land(sched, second, 9)
        assert seq.output_tokens == [EOS]
        assert [out.output_tokens for out in sched.take_outputs()] == [[EOS]]

    def test_abort_drops_step_in_flight(self) -> None:
        sched = scheduler()
        seq, again = prompt(3, id=5), prompt(3, id=5)
        sched.add(seq)
        first = launch(sched)
        sched.abort(5, now=0.0)
        assert sched.add(again)
        second = launch(sched)
        land(sched, first, 9)
        land(sched, second, 8)
        assert (seq.output_tokens, again.output_tokens) == ([], [8])

    def test_preempted_sequence_receives_late_token(self) -> None:
        sched = scheduler()
        seq = prompt(20)
        sched.add(seq)
        first = launch(sched)
        sched.preempt(seq)
        assert sched.schedule(0.0) is None  # what it has to compute is not known yet
        land(sched, first, 7)
        assert (seq.status, seq.output_tokens) == (SequenceStatus.WAITING, [7])
        assert sched.load().waiting_tokens == 21
        flight = launch(sched)
        assert flight[0].scheduled_tokens[0] == seq.token_ids
        land(sched, flight, 8)
        assert seq.output_tokens == [7, 8]

    def test_preempted_sequence_can_end_while_waiting(self) -> None:
        sched = scheduler()
        seq = prompt(3)
        sched.add(seq)
        first = launch(sched)
        sched.preempt(seq)
        land(sched, first, EOS)
        assert (seq.leave_reason, sched.has_unfinished(), len(sched.waiting)) == ("eos", True, 0)
        assert len(sched.take_outputs()) == 1
        assert not sched.has_unfinished()

    def test_chunk_in_flight_of_preempted_sequence_is_discarded(self) -> None:
        sched = scheduler(max_num_batched_tokens=16)
        seq = prompt(40)
        sched.add(seq)
        first, second = launch(sched), launch(sched)
        assert (second[0].num_computed_tokens, second[0].is_final) == ([16], [False])
        sched.preempt(seq)
        land(sched, first)
        land(sched, second)
        assert (seq.num_computed_tokens, seq.output_tokens) == (0, [])
        assert launch(sched)[0].num_computed_tokens == [0]

    def test_follower_waits_for_block_in_flight(self) -> None:
        sched = scheduler()
        first, second = prompt(40), prompt(40)
        sched.add(first)
        flight = launch(sched)
        sched.add(second)
        assert second.id not in launch(sched)[0].req_ids
        land(sched, flight, 7)
        assert launch(sched)[0].num_cached_tokens == [32]

    def test_blocks_are_not_published_before_written(self) -> None:
        sched = scheduler()
        seq = prompt(15)
        sched.add(seq)
        first, second = launch(sched), launch(sched)
        land(sched, first, 7)
        assert sched.block_manager.hash_to_block_id == {}
        land(sched, second, 8)
        assert len(sched.block_manager.hash_to_block_id) == 1


def test_interrupted_step_is_recomputed() -> None:
    sched = scheduler()
    decoding, new = prompt(3), prompt(20, 300)
    sched.add(decoding)
    land(sched, launch(sched), 7)
    for first in (new, None):  # a prefill, then a decode of both
        if first is not None:
            sched.add(first)
        batch, seqs = launch(sched)
        sched.discard(seqs.values(), batch)
        sched.check_integrity()
        again = launch(sched)
        assert again[0].scheduled_tokens == batch.scheduled_tokens
        land(sched, again, *[8] * len(seqs))


class TestEngine:
    def engine(self, runner: Any = None, **options: Any) -> EngineCore:
        config = Config(num_kvcache_blocks=16, eos_token_id=EOS, deferred_output=True, **options)
        return EngineCore(config, runner or SimulatedRunner(50, EOS, num_blocks=16))

    def test_deferred_tokens_are_equal_one_step_later(self) -> None:
        core = self.engine()
        seq = prompt(3, 10, max_tokens=5)
        core.add_request(seq)
        assert core.step().new_tokens == {}
        counts = [len(core.step().outputs) for _ in range(5)]
        assert counts == [1] * 5
        assert not core.has_unfinished()
        assert core.num_steps == 5
        assert seq.output_tokens == SimulatedRunner(50, EOS).reference([10, 11, 12], 5)

    def test_runner_thread_computes_while_next_step_is_scheduled(self) -> None:
        entered, threads = threading.Event(), set()

        class Slow(SimulatedRunner):
            def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
                threads.add(threading.current_thread())
                entered.set()
                return super().forward(batch)

        core = self.engine(Slow(50, EOS))
        core.add_request(prompt(3, 10, max_tokens=2))
        core.step()
        assert entered.wait(60)
        while core.has_unfinished():
            core.step()
        assert len(threads) == 1
        assert threading.current_thread() not in threads

    def test_failure_ends_every_sequence(self) -> None:
        class Failing(SimulatedRunner):
            def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
                raise RuntimeError("out of memory")

        core = self.engine(Failing(50, EOS))
        core.add_request(prompt(3, 10))
        core.step()
        with pytest.raises(EngineDeadError, match="out of memory"):
            core.step()
        assert [out.end_reason for out in core.abort_all(EndReason.ERROR)] == [EndReason.ERROR]
        assert not core.has_unfinished()

    def test_abort_ends_step_in_flight(self) -> None:
        core = self.engine()
        seq = prompt(3, 10)
        core.add_request(seq)
        core.step()
        core.abort(seq.id)
        assert [out.finished for out in core.step().outputs] == [True]
        assert not core.has_unfinished()
        assert core.load().free_blocks == 16


class TestSpeculation:
    def decode(self, k: int, drafts: list[int], **options: Any) -> tuple[Scheduler, Sequence]:
        """A prompt of 10 that has one token and drafts for the next step."""
        sched = scheduler(k=k, **options)
        seq = prompt(10)
        sched.add(seq)
        land(sched, launch(sched), 50, drafts=drafts)
        return sched, seq

    def test_drafts_follow_the_last_token(self) -> None:
        sched, seq = self.decode(3, [51, 52, 53])
        assert seq.spec_token_ids == [51, 52, 53]
        batch, _ = flight = launch(sched)
        assert batch.scheduled_spec_decode_tokens == {seq.id: [51, 52, 53]}
        assert (batch.scheduled_tokens, batch.num_spec_step) == ([[50, 51, 52, 53]], 3)
        assert (batch.num_computed_tokens, batch.context_lens, batch.is_final) == ([10], [14], [True])
        land(sched, flight, (51, 60))
        assert (seq.output_tokens, seq.num_computed_tokens) == ([50, 51, 60], 12)
        assert seq.spec_token_ids == []

    @pytest.mark.parametrize("k", [1, 2, 3, 7])
    @pytest.mark.parametrize("size", [1, 16])
    def test_drafts_and_next_drafts_have_blocks(self, k: int, size: int) -> None:
        sched = scheduler(k=k, kv_cache_block_size=size, num_kvcache_blocks=64)
        for length in range(1, 20):
            seq = Sequence(list(range(100, 100 + length)), size)
            sched.add(seq)
            land(sched, launch(sched), 50, drafts=[51] * k)
            launch(sched)
            # The prompt, a token and k drafts; of the next k drafts the last one has no KV yet.
            assert len(seq.block_table) == -(-(length + 1 + k + k - 1) // size)
            sched.abort(seq.id, now=0.0)
            sched.in_flight.clear()

    def test_no_blocks_beyond_the_longest_sequence(self) -> None:
        sched, seq = self.decode(7, [51] * 7, num_kvcache_blocks=1)
        batch, _ = flight = launch(sched)
        assert batch.num_scheduled_tokens == [5]  # 16 tokens at most, 11 are there, the last is not computed
        land(sched, flight, (51, 51, 51, 51, 60))
        assert (seq.num_tokens, seq.leave_reason) == (16, "max_tokens")

    def test_max_tokens_is_not_overshot(self) -> None:
        sched = scheduler(k=5)
        seq = prompt(10, max_tokens=3)
        sched.add(seq)
        land(sched, launch(sched), 50, drafts=[51] * 5)
        flight = launch(sched)
        assert flight[0].num_scheduled_tokens == [2]
        land(sched, flight, (51, 60))
        assert (seq.output_tokens, seq.leave_reason) == ([50, 51, 60], "max_tokens")

    def test_drafts_of_a_preempted_sequence_are_forgotten(self) -> None:
        sched, seq = self.decode(3, [51, 52, 53])
        sched.preempt(seq)
        flight = launch(sched)
        assert flight[0].scheduled_tokens == [seq.token_ids]
        assert flight[0].scheduled_spec_decode_tokens == {}

    def test_sequence_with_drafts_in_flight_waits(self) -> None:
        sched, _ = self.decode(2, [51, 52])
        flight = launch(sched)
        assert sched.schedule(0.0) is None
        land(sched, flight, (51, 52, 60))
        assert launch(sched)[0].num_computed_tokens == [13]

    def test_accepted_drafts_publish_full_blocks(self) -> None:
        sched, seq = self.decode(7, [51, 52, 53, 54, 55, 56, 57])
        land(sched, launch(sched), (51, 52, 53, 54, 55, 56, 57, 60))
        assert seq.num_computed_tokens == 18
        follower = Sequence(seq.token_ids, SIZE)
        assert len(sched.block_manager.prefixes.cached_blocks(follower)) == 1

    def test_rejected_drafts_are_not_published(self) -> None:
        sched, seq = self.decode(5, [51, 52, 53, 54, 55])
        land(sched, launch(sched), (60,))
        assert sched.block_manager.hash_to_block_id == {}
        assert seq.num_computed_tokens == 11

    def test_steps_without_drafts_do_not_count(self) -> None:
        sched, _ = self.decode(3, [])
        land(sched, launch(sched), 60)
        assert (sched.spec_stats.total_draft_tokens, sched.spec_stats.acceptance_rate) == (0, 0.0)

    def test_draft_statistics_are_logged_every_thousand_drafts(self) -> None:
        stats = SpecStats()
        with capture_logs() as logs:
            for _ in range(667):
                stats.take({(3, 2): 1})
        assert [line["event"] for line in logs] == [
            "[MTP Stats] Total draft tokens: 1002, Accepted: 668, Acceptance rate: 66.67%",
            "[MTP Stats] Total draft tokens: 2001, Accepted: 1334, Acceptance rate: 66.67%",
        ]


class TestPriority:
    def test_priority_classes_run_in_order_with_fifo_within_class(self) -> None:
        sched = scheduler(max_num_seqs=2)
        classes = [Priority.LOW, Priority.NORMAL, Priority.HIGH, Priority.NORMAL, Priority.HIGH]
        seqs = [prompt(3, 100 * i, max_tokens=1, priority=p) for i, p in enumerate(classes, 1)]
        sched.add_group(seqs)
        order: list[int] = []
        while sched.waiting:
            flight = launch(sched)
            order += flight[0].req_ids
            land(sched, flight, *[7] * len(flight[0].req_ids))
        assert order == [seqs[i].id for i in (2, 4, 1, 3, 0)]

    def test_newest_of_lowest_class_is_preempted_and_keeps_order(self) -> None:
        sched = scheduler(num_kvcache_blocks=5, enable_prefix_caching=False)
        low, high, second_low = (
            prompt(16, 100 * i, priority=p) for i, p in enumerate([Priority.LOW, Priority.HIGH, Priority.LOW], 1)
        )
        sched.add_group([low])
        land(sched, launch(sched), 7)
        sched.add_group([second_low])
        land(sched, launch(sched), 7)
        sched.add_group([high])
        land(sched, launch(sched), 7)
        flight = launch(sched)
        assert flight[0].req_ids == [high.id, low.id]
        assert [seq.id for seq in sched.waiting] == [second_low.id]
        land(sched, flight, 7, 7)
        newcomer = prompt(3, 900, priority=Priority.LOW)
        sched.add_group([newcomer])
        sched.preempt(low)
        assert [seq.id for seq in sched.waiting] == [low.id, second_low.id, newcomer.id]

    def test_running_sequence_is_not_preempted_for_new_one(self) -> None:
        sched = scheduler(num_kvcache_blocks=2, enable_prefix_caching=False)
        low, high = prompt(20, max_tokens=3, priority=Priority.LOW), prompt(20, 500, priority=Priority.HIGH)
        sched.add_group([low])
        land(sched, launch(sched), 7)
        sched.add_group([high])
        assert launch(sched)[0].req_ids == [low.id]
