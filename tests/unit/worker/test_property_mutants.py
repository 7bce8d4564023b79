"""Faults put into the worker, one at a time: the property test for each finds it, with a fixed seed.

As in tests/unit/router/test_mutants.py, within as many examples as the test takes in every run.
"""

from __future__ import annotations

import itertools

import pytest

from common.wire import peer_numbers
from tests.unit.mutants import OBJECTIONS, Mutant
from tests.unit.property_tests import Test, modules_below, name_of, property_tests, run
from tests.unit.router.test_mutants import CAUGHT
from tests.unit.worker import engine, ranks, session
from tests.unit.worker.engine import (
    test_block_manager,
    test_context_cost,
    test_lockstep,
    test_prefill_slice,
    test_state_machine,
    test_step_record,
)
from tests.unit.worker.engine.speculation import (
    test_draft_controller,
    test_drafter,
    test_forced_text,
    test_model_drafts,
    test_step_costs,
)
from tests.unit.worker.ranks import test_batch_delta, test_frames
from tests.unit.worker.session import (
    test_block_log,
    test_cache_events,
    test_extreme_numbers,
    test_intake,
    test_outbox,
    test_session,
    test_step_protos,
)
from worker.engine.block_manager import BlockManager
from worker.engine.lifecycle import Lifecycle
from worker.engine.prefill_meter import ContextCost
from worker.engine.prefix_cache import PrefixCache
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.engine.speculation.step_costs import StepCosts
from worker.engine.step import StepLimits
from worker.engine.step_record import StepRing
from worker.model.forward_context import DPMetadata
from worker.ranks import frames
from worker.ranks.batch_delta import BatchDecoder, BatchEncoder
from worker.ranks.frames import FrameReader
from worker.session import outbox, step_protos
from worker.session.block_log import BlockLog
from worker.session.cache_events import KvCursor, KvLog
from worker.session.intake import Inbox
from worker.session.outbox import Outbox, OutboxRun

_EVERY = test_outbox.test_every_interleaving_delivers_every_token_once_in_order
_BREAK = test_outbox.test_broken_streams_lose_frames_and_no_tokens
_LOGPROBS = test_outbox.test_logprobs_accompany_tokens_after_given_rows
_CUT = test_intake.test_split_and_interleaved_groups_give_equal_sequences
_STORM = test_session.test_cancel_storm_with_two_routers
_HOLDS = test_cache_events.test_kv_log_equals_engine_cache
_BLOCKS = test_block_log.test_log_adds_up_to_cache_of_engine
_LOOKUP = test_drafter.test_lookup_equals_brute_force
_ALIKE = test_drafter.test_lookup_with_many_equal_ngrams_equals_brute_force
_AFFORDED = test_context_cost.test_chunk_has_largest_affordable_size
_CACHE, _WEAK = test_block_manager.CacheMachine, test_block_manager.WeakHashMachine
_SCHEDULER = test_state_machine.SchedulerMachine
_CHUNKS = test_lockstep.test_chunks_cover_each_engines_rows_once
_CUTS = test_frames.test_messages_survive_any_cut
_ANY_BYTES = test_frames.test_any_bytes_are_a_message_or_a_frame_error
_ALL_WAITING = test_extreme_numbers.test_waiting_tokens_of_all_routers_fit_field
_BATCHES = test_batch_delta.test_batches_arrive_unchanged
_FORCED = test_forced_text.test_rates_of_forced_text_equal_brute_force
_CHOICES = test_draft_controller.test_chosen_drafts_are_prefixes_of_all_drafts
_NEVER_LONGER = test_draft_controller.test_drafts_never_take_longer_than_plain_decoding
_BEST_NUMBER = test_draft_controller.test_chosen_number_has_most_tokens_per_second
_HARDLY_LONGER = test_draft_controller.test_forced_text_lengthens_mixed_steps_by_at_most_5_percent
_KEPT = test_step_record.test_ring_keeps_longest_tail_within_bounds
_PAGES = test_step_protos.test_pages_have_every_step_of_request_once
_OF_EACH = test_step_costs.test_longer_is_cost_ratio_of_each_number_of_drafts
_FREE_ROWS = Mutant(
    "free_rows", DraftController, "_count", "self.costs.longer(rows, num_drafts)", "np.ones(num_drafts)"
)
_NEVER_LONGER_WITH_A_MODEL = test_model_drafts.test_drafts_never_take_longer_than_plain_decoding

_SIZE, _LEFT = "min(max_chunk_size, size - chunk * max_chunk_size)", "size - chunk * max_chunk_size"
_TO_FRONT = "self.free_block_ids.move_to_end(block.block_id, last=False)"
_CLAIM = "for block_id in cached:\n        self._claim(block_id)\n"
_TAKE = "cached + [self._take() for _ in range(seq.num_blocks - len(cached))]"
# Takes new blocks before the cached ones.
_HITS_LAST = (
    "new = [self._take() for _ in range(seq.num_blocks - len(cached))]\n    "
    + _CLAIM
    + "    seq.block_table = cached + new"
)
_ENDS = "seq.publish_at = math.inf\n            return\n        block = found"
_GOES_ON = "chain.num_published += 1; seq.publish_at += self.block_size\n            return\n        block = found"

MUTANTS: list[tuple[Mutant, Test]] = [
    (Mutant("end_too_soon", Outbox, "_take_run", "whole = count == unsent", "whole = count <= unsent"), _EVERY),
    (Mutant("no_rewind", Outbox, "rewind", "run.sent = have - run.first_pos", "run.sent = max(run.sent, 0)"), _BREAK),
    (Mutant("given_once", Outbox, "rewind", "run.given_sent = 0", "pass"), _LOGPROBS),
    (Mutant("rows_of_others", OutboxRun, "rows", "(start - self.num_dropped)", "start"), _LOGPROBS),
    (Mutant("given_again", outbox, "_take_given", "run.given_sent += taken", "run.given_sent = taken"), _LOGPROBS),
    (Mutant("two_ends", Outbox, "_take_run", "ends.append(run.end)", "ends.extend([run.end, run.end])"), _STORM),
    (Mutant("half_a_group", Inbox, "submit", "group.more = frame.more", "group.more = False"), _CUT),
    (Mutant("never_gone", KvLog, "append", "self._present.discard(~change)", "pass"), test_cache_events.LogMachine),
    (Mutant("no_snapshot", KvCursor, "restart", "True, None", "False, None"), test_cache_events.LogMachine),
    (Mutant("block_stays", BlockLog, "_apply", ".pop(change, None)", ".get(change)"), _BLOCKS),
    (Mutant("silent_cache", PrefixCache, "take_granule_changes", "return", "return [] and"), _HOLDS),
    (Mutant("oldest_place", NgramProposer, "_latest", "> length:\n", ">= length:\n"), _LOOKUP),
    (Mutant("oldest_of_many", NgramProposer, "_latest", "int(others[-1])", "int(others[0])"), _ALIKE),
    (Mutant("flat", ContextCost, "most_tokens", "1 + self.weight * start", "1"), _AFFORDED),
    # The pool: blocks are held, counted, lost.
    (Mutant("claim_resets", BlockManager, "_claim", "ref_count += 1", "ref_count += 1; block.reset()"), _CACHE),
    (Mutant("equal_not_held", BlockManager, "_go_on_with", "self._claim(present)", "pass"), _CACHE),
    (Mutant("equal_not_freed", BlockManager, "_go_on_with", "self._release(seq.block_table[i])", "pass"), _CACHE),
    (Mutant("blocks_lost", BlockManager, "deallocate", "reversed(seq.block_table)", "seq.block_table[1:]"), _CACHE),
    (Mutant("hits_are_free", BlockManager, "can_allocate", "- in_use", "- len(cached)"), _CACHE),
    (Mutant("hits_are_dear", BlockManager, "can_allocate", "- in_use", ""), _CACHE),
    (Mutant("hits_last", BlockManager, "allocate", f"{_CLAIM}    seq.block_table = {_TAKE}", _HITS_LAST), _CACHE),
    (Mutant("one_slot", BlockManager, "_blocks_needed", "if missing > 0", "if missing > 1"), _CACHE),
    # The pool: what dies first.
    (Mutant("from_front", BlockManager, "deallocate", "reversed(seq.block_table)", "seq.block_table"), _CACHE),
    (Mutant("newest_first", BlockManager, "_take", "last=False", "last=True"), _CACHE),
    (Mutant("cached_first", BlockManager, "_release", "not block.is_cached", "False"), _CACHE),
    (Mutant("spoilt_last", BlockManager, "forget_unproved", _TO_FRONT, "pass"), _CACHE),
    # Cached prefixes.
    (Mutant("not_forgotten", BlockManager, "_take", "self.prefixes.forget(block)", "pass"), _CACHE),
    (Mutant("index_kept", PrefixCache, "forget", "del self.hash_to_block_id[block.hash]", "pass"), _CACHE),
    (Mutant("too_early", BlockManager, "publish", "seq.num_computed_tokens", "seq.num_tokens"), _CACHE),
    (Mutant("never_cached", BlockManager, "publish", "self._publish_next(seq, chain)", "break"), _CACHE),
    (Mutant("parent_gone", BlockManager, "_publish_next", "if i and ", "if False and "), _CACHE),
    (Mutant("old_node", BlockManager, "_publish_next", "if block.node is not None:", "if i == 0:"), _CACHE),
    (Mutant("last_token", PrefixCache, "_hittable", "seq.num_reusable_tokens", "seq.num_tokens"), _CACHE),
    (Mutant("from_root", PrefixCache, "cached_blocks", "node = block.node", "pass"), _CACHE),
    (Mutant("held_too", BlockManager, "flush", "in self.free_block_ids", "in range(self.num_blocks)"), _CACHE),
    (Mutant("no_flush", BlockManager, "flush", "self.prefixes.forget(block)", "pass"), _CACHE),
    (Mutant("last_proved", BlockManager, "prove", "is_proved = True", "is_proved = True; return"), _CACHE),
    (Mutant("none_proved", BlockManager, "prove", "self.num_published(seq)", "len(seq.block_table)"), _CACHE),
    (Mutant("spoils_one", PrefixCache, "unproved_from", "nodes.add(block.node)", "pass"), _CACHE),
    (Mutant("spoils_all", PrefixCache, "unproved_from", "block.parent in nodes", "True"), _CACHE),
    (Mutant("spoils_good", BlockManager, "forget_unproved", "if not block.is_proved", "if True"), _CACHE),
    # Hashes that collide.
    (Mutant("any_parent", PrefixCache, "find", "block.parent == parent and ", ""), _WEAK),
    (Mutant("any_tokens", PrefixCache, "find", " and block.tokens == tokens", ""), _WEAK),
    (Mutant("any_salt", PrefixCache, "root", "if not cache_salt:", "if True:"), _WEAK),
    (Mutant("gap", BlockManager, "_publish_next", _ENDS, _GOES_ON), _WEAK),
    (Mutant("node_again", PrefixCache, "add", "next(self._next_node)", "i + 1"), _WEAK),
    (Mutant("to_the_back", Lifecycle, "preempt", "appendleft(seq)", "append(seq)"), _SCHEDULER),
    (Mutant("rows_stay", StepRing, "append", "self._num_rows -= ", ""), _KEPT),
    (Mutant("all_newest", StepRing, "newest", "max(0, len(records) - count)", "-count"), _KEPT),
    (Mutant("page_again", step_protos, "newest_steps", "record.number >= before", "record.number > before"), _PAGES),
    (Mutant("over_budget", StepLimits, "chunk", "<= budget", "<= budget + 1"), _SCHEDULER),
    (Mutant("no_end", DPMetadata, "chunked_sizes", _SIZE, _LEFT), _CHUNKS),
    (Mutant("less_than_none", DPMetadata, "chunked_sizes", f"max(0, {_SIZE})", _SIZE), _CHUNKS),
    (Mutant("chunk_stays", DPMetadata, "chunked_sizes", "self.local_sizes = whole", "pass"), _CHUNKS),
    (Mutant("rest_lost", FrameReader, "feed", "del self._buffer[:end]", "self._buffer.clear()"), _CUTS),
    (Mutant("one_frame", FrameReader, "feed", "self.has_extensions)", "self.has_extensions); return"), _CUTS),
    (Mutant("some_errors", frames, "decode", "except Exception", "except KeyError"), _ANY_BYTES),
    (Mutant("unbounded", peer_numbers, "_within", "0 <= value <= most", "0 <= value"), _ALL_WAITING),
    (Mutant("a_byte_late", FrameReader, "feed", "< end", "<= end"), _CUTS),
    (Mutant("not_replaced", BatchDecoder, "decode", "*table[:stays], *follows", "*table, *follows"), _BATCHES),
    (Mutant("sent_whole", BatchEncoder, "_grown", "= (table, needed)", "= (table, len(table))"), _BATCHES),
    *((mutant, test_prefill_slice.test_no_gap_is_longer_than_a_slice) for mutant in test_prefill_slice.MUTANTS[:1]),
    *((mutant, _FORCED) for mutant in test_forced_text.MUTANTS),
    (_FREE_ROWS, _CHOICES),
    (_FREE_ROWS, _NEVER_LONGER),
    (_FREE_ROWS, _BEST_NUMBER),
    (_FREE_ROWS, _HARDLY_LONGER),
    (Mutant("a_row_less", StepCosts, "longer", "rows + 1, longest + 1", "rows, longest"), _OF_EACH),
    (Mutant("free_drafts", StepCosts, "drafting_s", "self.making_s(proposal)", "0.0"), _NEVER_LONGER_WITH_A_MODEL),
]
# A machine that is another one for longer.
_LONGER = {test_state_machine.LongMachine.__name__}


def test_sequence_property_tests_have_mutants() -> None:
    listed = {name_of(test) for _, test in [*MUTANTS, *CAUGHT]} | _LONGER
    packages = (engine, ranks, session)
    assert sorted(property_tests(itertools.chain(*map(modules_below, packages))) - listed) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "test"), MUTANTS, ids=[f"{mutant.trap.replace(' ', '_')}-{name_of(test)}" for mutant, test in MUTANTS]
)
def test_property_test_finds_fault(mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutant.applied(), pytest.raises(OBJECTIONS):
        run(test, monkeypatch)
