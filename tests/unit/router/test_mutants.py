"""Each mutant of the service is found by its property tests, with fixed seeds.

A property test that needs a thousand examples for a fault finds it once in ten runs, and then looks flaky. So each
property test has a mutant here and finds it with the number of examples that every run has.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from functools import partial

import pytest

from common.delay_gate import DelayGate
from common.process.restart_policy import RestartPolicy
from common.text import chat_template, stop_strings
from common.text.answer_text import AnswerText
from common.text.detokenizer import Detokenizer, TokenBytes
from common.text.pieces import Cuts, TokenFloor
from common.text.tokenizer import Tokenizer
from common.wire import peer_numbers
from router.answers.channel_reader import ChannelReader
from router.answers.channels import parser
from router.answers.channels.markers import SpelledMarkers
from router.answers.channels.parser import ResponseParser
from router.answers.delivered import DeliveredText
from router.answers.stream_assembly import StreamAssembly
from router.api import open_inference_tensors, pages
from router.audit.decide import AuditCase
from router.audit.kv_check import KvCheck
from router.cli import top_frame
from router.prompts.text_queue import TextQueue
from router.requests.stream import WritePacer
from router.scheduling.admission import AdmissionQueue, _ClassRequests
from router.scheduling.assignment import LaneAssignment, ReassignmentQueue
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.failover import Attempts
from router.scheduling.fair_queue import FairQueue, LazyMinHeap, TenantShares
from router.scheduling.placement import LeastLoad, LoadOrder, PrefixAware
from router.scheduling.prefix_index import PrefixIndex, TieredIndex, _ExpectedPrefixes
from router.scheduling.worker_load import WorkerLoad
from router.workers import session_state
from router.workers.worker_record import AddressHistory
from tests.unit import router
from tests.unit.common import process, test_delay_gate, text
from tests.unit.common.process import test_restart_policy
from tests.unit.common.text import (
    test_answer_text,
    test_chat_template,
    test_detokenizer,
    test_pieces,
    test_stop_strings,
    test_tokenizer,
)
from tests.unit.common.wire import test_block_hash
from tests.unit.mutants import Mutant
from tests.unit.property_tests import Test, modules_below, name_of, property_tests, run
from tests.unit.router import test_validation
from tests.unit.router.answers import test_channel_reader, test_logit_digests, test_stream_assembly
from tests.unit.router.answers.channels import test_response, test_response_reference
from tests.unit.router.answers.channels.responses import FAMILIES
from tests.unit.router.api import test_open_inference, test_pages
from tests.unit.router.audit import test_decide as test_audit
from tests.unit.router.audit import test_kv_check
from tests.unit.router.cli import test_top_frame
from tests.unit.router.prompts import test_prompts, test_text_queue
from tests.unit.router.requests import test_write_pacer
from tests.unit.router.scheduling import (
    test_dispatcher,
    test_dispatcher_machine,
    test_failover,
    test_fair_queue,
    test_placement,
    test_prefix_index,
)
from tests.unit.router.workers import test_address_history, test_extreme_numbers, test_session_state
from tests.unit.worker.engine import test_block_manager
from worker.engine.prefix_cache import PrefixCache
from worker.llm_engine import EngineAnswer

# A test, a test bound to arguments, or a state machine.

_ORDER = test_fair_queue.test_fair_queue_order_equals_reference
_AWAY = test_fair_queue.test_returning_tenant_gets_only_its_share
_BACK = test_fair_queue.test_returned_request_is_charged_once
_BEHIND = test_fair_queue.test_lagging_lane_does_not_reverse_virtual_time
_OUTPUT = test_fair_queue.test_output_is_charged_only_while_others_wait
_SHARE = test_fair_queue.test_tenant_within_queue_share_is_never_dropped

_FRAMING = test_stream_assembly.test_stream_text_is_independent_of_framing
_START = test_stream_assembly.test_later_attempt_does_not_change_stream_start
_MIN = test_stream_assembly.test_stop_string_may_end_at_min_tokens
_REST = test_stream_assembly.test_stop_string_completed_at_end_matches
_BRUTE = test_stop_strings.test_stop_string_search_equals_brute_force
_GATE = test_dispatcher.test_group_in_transit_counts_as_waiting_at_worker
_SALTS = test_block_manager.test_salt_in_use_is_not_evicted_for_new_salts

_SET = "account.start = max(account.start, accounts.virtual_time)"
_TIME = "max(accounts.virtual_time, account.start)"
_SAID, _PAYS = "tokens, request.output =", "if tokens and accounts.waiting"
_PROMOTED = "request.charged_tokens * (1 / PROMOTED_SHARE - 1)"
_IS_PARKED = "if request.key in self._assignment.parked"
_MORE = "waiting.share(tenant, more=1)"

_UNSEARCHED = "min_tokens - 1"
_OWN = "child.match or child.fail.match"

_DISPATCHER, _PIECEMEAL = test_dispatcher_machine.DispatcherMachine, test_dispatcher_machine.PiecemealMachine
_INDEX = test_prefix_index.IndexMachine
_LOADS, _LOOK = test_placement.test_load_order_equals_sorting, test_placement.test_no_request_could_gain_after_rebinding
_TIERED = test_prefix_index.test_tiered_index_equals_sets_of_each_worker_and_tier
_AT_REST = test_placement.test_waiting_requests_come_to_rest_between_memory_tiers
_LEAST_WORK = test_placement.test_prompt_goes_where_cache_and_memory_tier_leave_least_work
_COUNT = test_failover.test_attempts_equal_plain_count
_WAITS = test_failover.test_waits_and_attempts_cover_request_time
_EARLIEST = test_fair_queue.test_lazy_heap_top_is_least_live_entry
_PROMOTION = test_fair_queue.test_overdue_class_gets_exactly_its_promoted_share
_TWO = test_fair_queue.test_waiting_tenants_differ_by_at_most_one_request
_FRAMES = test_session_state.test_frames_are_bounded_and_complete
_PAUSES = test_address_history.test_redial_pauses_are_bounded_and_grow_with_failure_time
_TURNS = test_write_pacer.test_write_turns_are_in_order_and_skip_cancelled
_BOOKS = test_text_queue.test_text_queue_counts_are_right_after_any_operations
_CHANNELS = test_channel_reader.test_streamed_channels_equal_whole_text
_GOES_ON = test_channel_reader.test_stream_resumes_after_each_message
_COMES_AGAIN = test_stream_assembly.test_resumed_answer_omits_delivered_part
_BEHIND_A_PROMPT = test_stream_assembly.test_continuation_text_depends_only_on_prompt_and_tokens
_CLIP = test_validation.test_clip_leaves_room_for_at_least_one_token
_PAGES, _NO_TOKEN = test_pages.test_pages_join_to_whole_list, test_pages.test_unknown_page_token_is_refused
_FRAME = test_top_frame.test_frame_fits_terminal_of_any_size
_TENSORS = test_open_inference.test_tensors_read_as_they_were_written
_RAW_BYTES = test_open_inference.test_any_raw_bytes_are_read_or_refused_by_name
_CERTAIN = test_audit.test_audit_convicts_only_faulty_worker
_ODD_ONE = test_kv_check.test_kv_check_of_three_blames_differing_worker
_COMPACT = test_prompts.test_token_ids_become_compact_from_a_list_and_from_a_message
_RETURNED = test_dispatcher.test_returned_requests_keep_their_order
_NO_SPECIAL = test_tokenizer.test_mixed_pieces_never_become_special_tokens
_NO_MARK = test_chat_template.test_no_input_adds_a_special_token
_AT_ONCE = partial(test_detokenizer.test_text_streams_as_it_decodes_at_once, "sentencepiece")
_ANY_IDS = test_detokenizer.test_byte_level_stream_equals_whole_decode
_ANY_PIECES = partial(test_detokenizer.test_result_does_not_depend_on_the_pieces, "byte_level")
_FALLBACK = test_detokenizer.test_byte_fallback_equals_the_library_outside_of_invalid_bytes
_CONTINUED = test_detokenizer.test_streamed_text_equals_text_added_to_prompt
_VISIBLE = test_detokenizer.test_decode_stream_context_is_visible_text
_CUT_TEXT = partial(test_pieces.test_pieces_have_the_tokens_of_the_whole, "llama3")
_FLOOR = partial(test_pieces.test_no_text_has_fewer_tokens_than_the_floor, "llama3")

_BEHIND_ANCHOR = "self._decode(*self._anchor, id)[len(self._anchor_text) :]"
_NEXT_CUT = "found = None if self._cut is None else self._cut.search(text, near, min(near + PIECE, len(text)))"
_UNLOOKED = "delivered.left -= len(token_ids)"
_FITS = "tokens + taken > MAX_FRAME_TOKENS or size > room"

MUTANTS: list[tuple[Mutant, tuple[Test, ...]]] = [
    (Mutant("saves_up", TenantShares, "enter", _SET, "pass"), (_ORDER, _AWAY)),
    (Mutant("pays_twice", TenantShares, "charge", "if request.is_retry:", "if False:"), (_ORDER, _BACK)),
    (Mutant("time_goes_back", TenantShares, "charge", _TIME, "account.start"), (_BEHIND,)),
    (Mutant("output_twice", TenantShares, "charge_output", _SAID, "tokens, _ ="), (_ORDER, _OUTPUT)),
    (Mutant("output_free", TenantShares, "charge_output", _PAYS, "if False"), (_ORDER, _OUTPUT)),
    (Mutant("output_idle", TenantShares, "charge_output", _PAYS, "if tokens"), (_OUTPUT,)),
    (Mutant("output_unweighted", TenantShares, "charge_output", "/ self.weight(request.tenant)", "/ 1"), (_ORDER,)),
    (
        Mutant("a_ninth", FairQueue, "pop", _PROMOTED, "request.charged_tokens / PROMOTED_SHARE"),
        (test_fair_queue.test_overdue_class_gets_an_eighth,),
    ),
    (Mutant("drops_own", AdmissionQueue, "place_for", _MORE, "waiting.share(tenant)"), (_SHARE, _ORDER)),
    (Mutant("drops_all", AdmissionQueue, "place_for", _MORE, "0"), (_SHARE, _ORDER)),
    (Mutant("drops_none", AdmissionQueue, "place_for", "if largest is not None and", "if False and"), (_SHARE, _ORDER)),
    (Mutant("drops_oldest", _ClassRequests, "newest", "next(reversed(", "next(iter("), (_SHARE, _ORDER)),
    (Mutant("unweighted", _ClassRequests, "share", "/ self._shares.weight(tenant)", ""), (_SHARE, _ORDER)),
    (Mutant("old_shares", _ClassRequests, "largest", "== entry", "is not None"), (_ORDER,)),
    (Mutant("on_its_way", WorkerLoad, "has_waiting", " or self.unseen_seqs > 0", ""), (_GATE,)),
    (Mutant("last_start", StreamAssembly, "begin", "if self.first_token_time is None", "if True"), (_START,)),
    (Mutant("min", AnswerText, "__init__", _UNSEARCHED, "min_tokens"), (_FRAMING, _MIN)),
    (Mutant("spelled", ChannelReader, "read", "self._spelled.mark(piece.text)", "piece.text"), (_CHANNELS,)),
    (Mutant("twice", DeliveredText, "push", "data[self.left :], min", "data, min"), (_GOES_ON,)),
    (Mutant("left_in", StreamAssembly, "_append_repeated", "self.unread.clear()", "pass"), (_COMES_AGAIN,)),
    (Mutant("any_tokens", StreamAssembly, "_check_repeated", "delivered.push(token_ids)", _UNLOOKED), (_COMES_AGAIN,)),
    (
        Mutant("all_left_out", StreamAssembly, "_append_repeated", "min(delivered.left, len", "max(0, len"),
        (_COMES_AGAIN,),
    ),
    (Mutant("rest", AnswerText, "flush", "text = self._search(decoded)", "text = decoded"), (_REST,)),
    (
        Mutant("run_min", AnswerText, "push", "self._unsearched -= start", "pass"),
        (test_answer_text.test_pieces_per_token_add_up_to_the_text_of_runs,),
    ),
    (
        Mutant("stop_token_text", EngineAnswer, "take", "(EndReason.EOS, EndReason.STOP_TOKEN)", "(EndReason.EOS,)"),
        (test_answer_text.test_router_and_engine_give_the_same_text,),
    ),
    (Mutant("no_links", stop_strings, "_link", "_step(root, node.fail, char)", "root"), (_FRAMING,)),
    (Mutant("own_match_only", stop_strings, "_link", _OWN, "child.match"), (_BRUTE,)),
    (Mutant("shortest", stop_strings, "_link", _OWN, "child.fail.match or child.match"), (_FRAMING,)),
    (Mutant("salts", PrefixCache, "root", "self._salts.move_to_end(cache_salt)", "pass"), (_SALTS,)),
    (Mutant("weights_forgotten", TenantShares, "charge", "/ self.weight(request.tenant)", "/ 1"), (_TWO, _ORDER)),
    (Mutant("promoted_for_ever", FairQueue, "_next_class", "or self._promotion_debt > 0", ""), (_PROMOTION,)),
    (Mutant("gone_is_earliest", LazyMinHeap, "top", "not in self._alive", "is None"), (_EARLIEST,)),
    (Mutant("comes_back_last", LaneAssignment, "bind", "first=first", "first=False"), (_RETURNED,)),
    (
        Mutant("sleeps_on", ReassignmentQueue, "refill", "if request.key in self._assignment.parked", "if False"),
        (_DISPATCHER,),
    ),
    (Mutant("shut_for_ever", Dispatcher, "share", "self.lanes.update(lane)", "pass"), (_DISPATCHER,)),
    (Mutant("cancelled_returns", ReassignmentQueue, "work_off", "returned.key in self._queue and ", ""), (_PIECEMEAL,)),
    (Mutant("vacated_too_soon", ReassignmentQueue, "work_off", "if not len(lane):", "if True:"), (_PIECEMEAL,)),
    (Mutant("evicts_for_all", PrefixIndex, "evict", "owners[owners == slot] = 0", "owners[:] = 0"), (_INDEX,)),
    (Mutant("sent_once", _ExpectedPrefixes, "_drop_oldest", "found.get(slot) == end", "slot in found"), (_INDEX,)),
    (Mutant("one_tier", TieredIndex, "depths", "depth + (self.memory", "depth + 0 * (self.memory"), (_TIERED,)),
    (Mutant("over_holes", PrefixIndex, "run", "is_held[: ends[0]] if ends.size else is_held", "is_held"), (_TIERED,)),
    (Mutant("from_start", TieredIndex, "depths", "granules[depth:]", "granules"), (_TIERED,)),
    (
        Mutant("free_reads", PrefixAware, "_hits", "(1 - self._read_share", "(1 - 0 * self._read_share"),
        (_LEAST_WORK,),
    ),
    (Mutant("stale_loads", LoadOrder, "least", "== entry[0]", "is not None"), (_LOADS,)),
    (Mutant("no_row_before", LeastLoad, "find_better_lane", "ahead.get(other.worker, 0)", "0"), (_LOOK,)),
    (Mutant("to_and_fro", LeastLoad, "find_better_lane", "here - max(", "here + max("), (_AT_REST,)),
    (Mutant("one_death_more", Attempts, "verdict", ">= MAX_SUSPICIONS", "> MAX_SUSPICIONS"), (_COUNT,)),
    (Mutant("no_excuse", Attempts, "_suspicions", " and not attempt.excused", ""), (_COUNT,)),
    (Mutant("first_class", Attempts, "numerics_wanted", "attempt.tokens or", "attempt.ended or"), (_COUNT,)),
    (Mutant("last_wait", Attempts, "waits", "if not waits or loss is not None", "if not waits"), (_WAITS,)),
    (Mutant("long_frames", session_state, "_submit_frame", _FITS, "size > room"), (_FRAMES,)),
    (Mutant("fat_frames", session_state, "_submit_frame", _FITS, "tokens + taken > MAX_FRAME_TOKENS"), (_FRAMES,)),
    (Mutant("unbounded", AddressHistory, "redial_after_s", "min(wait_s, longest_s)", "wait_s"), (_PAUSES,)),
    (Mutant("idle_turns", WritePacer, "_next", "        woken += 1", "    woken += 1"), (_TURNS,)),
    (Mutant("keeps_bytes", TextQueue, "add", "for out in made_room:", "for out in made_room[:1]:"), (_BOOKS,)),
    (Mutant("one_of_tail", Detokenizer, "__init__", "-TAIL:", "-1:"), (_CONTINUED, _BEHIND_A_PROMPT)),
    (Mutant("no_first", TokenBytes, "first", "self._decode(id).encode()", "inner"), (_AT_ONCE,)),
    (Mutant("no_half", Detokenizer, "_decode", "self._begun = data[used:]", "pass"), (_ANY_IDS, _ANY_PIECES)),
    (Mutant("no_anchor", TokenBytes, "_compute", _BEHIND_ANCHOR, "self._decode(id)"), (_FALLBACK, _VISIBLE)),
    (
        Mutant("room_off", test_validation, "clip_to_length", "min(params.min_tokens, room)", "params.min_tokens"),
        (_CLIP,),
    ),
    (
        Mutant("last_all", open_inference_tensors, "_elements", "yield data[start:at]", "yield data[start:]"),
        (_TENSORS,),
    ),
    (Mutant("cut_short", open_inference_tensors, "_elements", "if at > len(data):", "if False:"), (_RAW_BYTES,)),
    (Mutant("last_page", test_pages, "page_of", "if end < len(items)", "if end < len(items) - 1"), (_PAGES,)),
    (Mutant("any_token", pages, "_key_in", "if token != _token_of(key):", "if False:"), (_NO_TOKEN,)),
    (Mutant("wide", top_frame, "_cut", "get_cwidth(text) <= width", "True"), (_FRAME,)),
    (Mutant("certain", AuditCase, "_suspect", "is_certain=False", "is_certain=True"), (_CERTAIN,)),
    (Mutant("no_third", KvCheck, "take", "third[:1]", "third[:0]"), (_ODD_ONE,)),
    (Mutant("narrow", test_prompts, "_compact", "np.uint32).", "np.uint16).astype(np.uint32)."), (_COMPACT,)),
    (Mutant("parses", Tokenizer, "_text_pieces", "self._plain", "self._parsing"), (_NO_SPECIAL,)),
    (Mutant("unmarked", chat_template, "mark_special", "pattern.sub", "(lambda new, text: text)"), (_NO_MARK,)),
    (Mutant("cuts_words", Cuts, "_next", _NEXT_CUT, "return near"), (_CUT_TEXT,)),
    (Mutant("too_many", TokenFloor, "tokens", "int(total * (1 - 1e-9))", "int(total + 1)"), (_FLOOR,)),
    (
        Mutant("late_timer", DelayGate, "opens_in", " + _AFTER_S", ""),
        (test_delay_gate.test_delay_gate_is_open_when_its_timer_fires,),
    ),
    (
        Mutant("unchained", test_block_hash, "hash_chain", "+ width], parent, seed", "+ width], root, seed"),
        (
            test_block_hash.test_chain_is_compute_hash_block_by_block,
            test_block_hash.test_hash_chain_can_be_continued,
        ),
    ),
    (
        Mutant("window", RestartPolicy, "died", "now - death <= WINDOW_S", "now - death < WINDOW_S + 1"),
        (test_restart_policy.test_gives_up_exactly_when_the_window_holds_too_many_deaths,),
    ),
    (
        Mutant("unbounded", peer_numbers, "_within", "0 <= value <= most", "0 <= value"),
        (test_extreme_numbers.test_clamped_numbers_fit_their_proto_field,),
    ),
    (
        Mutant("streak", RestartPolicy, "died", "self._streak = 0", "pass"),
        (test_restart_policy.test_restart_delays_double_within_window,),
    ),
    (
        Mutant("reasoning", ResponseParser, "_text", "Part(channel, ", "Part(Channel.CONTENT, "),
        (partial(test_response.test_written_answer_is_parsed_like_transformers, FAMILIES[0]),),
    ),
    (
        Mutant(
            "lost",
            ResponseParser,
            "_text",
            "[ChannelPart(channel, _plain(out))]",
            '[] if "<" in out else [ChannelPart(channel, _plain(out))]',
        ),
        (
            partial(test_response.test_broken_answer_loses_no_text, FAMILIES[0]),
            partial(test_response_reference.test_answers_differ_from_transformers_only_in_named_ways, FAMILIES[0]),
        ),
    ),
    (
        Mutant("blanks", parser._Text, "push", "text[len(body) :]", '""'),
        (
            partial(test_response.test_parsing_is_independent_of_pieces, FAMILIES[0]),
            partial(test_response.test_thousands_of_answers, FAMILIES[0]),
        ),
    ),
    (
        Mutant("first_type", test_response, "typed", "in types:", "in types[1:]:"),
        (test_response.test_arguments_get_types_as_in_transformers,),
    ),
    (
        Mutant(
            "any_seal",
            test_logit_digests,
            "contradiction",
            "if receipt.receipt_sha256 != receipt_sha256",
            "if not receipt_sha256",
        ),
        (test_logit_digests.test_altered_receipt_field_contradicts_digest,),
    ),
    (
        Mutant("spelled", SpelledMarkers, "_is_token", "[0] == place", "[0] != place"),
        (test_response.test_only_spelled_delimiters_are_marked,),
    ),
]
CAUGHT = [(mutant, test) for mutant, tests in MUTANTS for test in tests]


def test_each_property_test_has_a_fault_to_find() -> None:
    listed = {name_of(test) for _, test in CAUGHT}
    packages = (router, text, process)
    modules = [test_block_hash, test_delay_gate, *itertools.chain(*map(modules_below, packages))]
    assert sorted(property_tests(modules) - listed) == []


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=[f"{mutant.trap}-{name_of(test)}" for mutant, test in CAUGHT])
def test_each_mutant_fails_its_property_tests(mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_kept(), mutant.applied(), pytest.raises(AssertionError):
        run(test, monkeypatch)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Clears the tokenizers' cached token bytes, because a mutant's results would reach other tests."""
    forget_tokens()
    try:
        yield
    finally:
        forget_tokens()


def forget_tokens() -> None:
    # The collector does not see frozen objects (tests/conftest.py).
    gc.unfreeze()
    for found in gc.get_objects():
        if type(found) is TokenBytes:
            found._inner.clear()
            found._whole.clear()
    gc.freeze()
