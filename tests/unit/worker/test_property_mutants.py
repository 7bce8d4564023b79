"""Faults put into the worker, one at a time: the property test that is there for each finds it, by a fixed seed.

As in tests/unit/router/test_mutants.py, within as many examples as the test takes in every run.
"""

from __future__ import annotations

import pytest

from tests.unit.mutants import Mutant
from tests.unit.property_tests import Test, modules_below, name_of, property_tests, run
from tests.unit.worker import session
from tests.unit.worker.engine import test_context_cost, test_draft_savings, test_drafter
from tests.unit.worker.session import test_cache_events, test_intake, test_outbox, test_session
from worker.engine.context_cost import ContextCost
from worker.engine.draft_savings import DraftSavings
from worker.engine.ngram_proposer import NgramProposer
from worker.engine.prefix_cache import PrefixCache
from worker.session import outbox
from worker.session.cache_events import KvCursor, KvLog
from worker.session.intake import Inbox
from worker.session.outbox import Outbox, Run

_EVERY = test_outbox.test_every_interleaving_delivers_every_token_once_in_order
_BREAK = test_outbox.test_streams_that_break_lose_frames_and_no_tokens
_LOGPROBS = test_outbox.test_logprobs_go_with_their_tokens_and_those_of_given_ones_before
_CUT = test_intake.test_any_cutting_and_interleaving_of_groups_gives_the_same_sequences
_STORM = test_session.test_cancel_storm_with_two_routers
_HOLDS = test_cache_events.test_the_engine_says_what_its_cache_holds
_LOST = test_draft_savings.test_no_more_is_lost_than_a_small_part
_LOOKUP = test_drafter.test_lookup_is_that_of_its_definition
_ALIKE = test_drafter.test_lookup_among_many_places_that_look_alike
_AFFORDED = test_context_cost.test_as_many_tokens_as_can_be_afforded

MUTANTS: list[tuple[Mutant, Test]] = [
    (Mutant("end_too_soon", Outbox, "_take_run", "whole = count == unsent", "whole = count <= unsent"), _EVERY),
    (Mutant("no_rewind", Outbox, "rewind", "run.sent = have - run.first_pos", "run.sent = max(run.sent, 0)"), _BREAK),
    (Mutant("given_once", Outbox, "rewind", "run.given_sent = 0", "pass"), _LOGPROBS),
    (Mutant("rows_of_others", Run, "rows", "(start - self.num_dropped)", "start"), _LOGPROBS),
    (Mutant("given_again", outbox, "_take_given", "run.given_sent += taken", "run.given_sent = taken"), _LOGPROBS),
    (Mutant("two_ends", Outbox, "_take_run", "ends.append(run.end)", "ends.extend([run.end, run.end])"), _STORM),
    (Mutant("half_a_group", Inbox, "submit", "group.more = frame.more", "group.more = False"), _CUT),
    (Mutant("never_gone", KvLog, "append", "self._present.discard(~change)", "pass"), test_cache_events.LogMachine),
    (Mutant("no_snapshot", KvCursor, "restart", "True, None", "False, None"), test_cache_events.LogMachine),
    (Mutant("silent_cache", PrefixCache, "take_granule_changes", "return", "return [] and"), _HOLDS),
    (Mutant("all_may_be_lost", DraftSavings, "step", "_ALLOWED * duration_s", "duration_s"), _LOST),
    (Mutant("oldest_place", NgramProposer, "_latest", "> length:\n", ">= length:\n"), _LOOKUP),
    (Mutant("oldest_of_many", NgramProposer, "_latest", "int(others[-1])", "int(others[0])"), _ALIKE),
    (Mutant("flat", ContextCost, "most_tokens", "1 + self.weight * start", "1"), _AFFORDED),
]


def test_each_property_test_of_a_session_has_a_fault_to_find() -> None:
    assert property_tests(modules_below(session)) <= {name_of(test) for _, test in MUTANTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "test"), MUTANTS, ids=[f"{mutant.trap}-{name_of(test)}" for mutant, test in MUTANTS]
)
def test_the_fault_is_found(mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        run(test, monkeypatch)
