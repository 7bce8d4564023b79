"""Faults put into the service, one at a time: the test that is there for each finds it, property tests by fixed seeds.

A property test that needs a thousand examples for a fault finds it once in ten runs, and then looks like a test that
fails by chance. So each finds its faults here within as many examples as it takes in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings

from common.text import stop_strings
from router.scheduling.admission import AdmissionQueue, _ClassRequests
from router.scheduling.fair_queue import FairQueue, TenantShares
from router.scheduling.worker_queue import Lane
from router.text.stream_assembly import StreamAssembly
from tests.unit.common.text import test_stop_strings
from tests.unit.mutants import Mutant
from tests.unit.router.scheduling import test_dispatcher, test_fair_queue
from tests.unit.router.text import test_stream_assembly
from tests.unit.worker.engine import test_block_manager
from worker.engine.block_manager import BlockManager

Test = Callable[[], None]

_ORDER = test_fair_queue.test_the_order_of_service_is_the_references
_AWAY = test_fair_queue.test_who_was_away_gets_no_more_than_its_share
_BACK = test_fair_queue.test_what_comes_back_from_a_worker_is_paid_for_once
_BEHIND = test_fair_queue.test_a_lane_that_is_behind_does_not_turn_time_back
_OUTPUT = test_fair_queue.test_output_is_charged_as_it_comes_and_only_while_others_wait
_SHARE = test_fair_queue.test_a_tenant_within_its_share_of_the_queue_loses_nothing

_FRAMING = test_stream_assembly.test_any_framing_gives_the_reference
_START = test_stream_assembly.test_what_a_later_attempt_says_first_is_not_the_streams_start
_MIN = test_stream_assembly.test_a_stop_string_may_end_with_the_last_of_min_tokens
_REST = test_stream_assembly.test_a_stop_string_that_the_end_completes_counts
_BRUTE = test_stop_strings.test_equals_brute_force
_GATE = test_dispatcher.test_a_group_on_its_way_counts_as_waiting_at_the_worker
_SALTS = test_block_manager.test_a_salt_in_use_is_not_forgotten_for_new_ones

_SET = "account.start = max(account.start, accounts.virtual_time)"
_TIME = "max(accounts.virtual_time, account.start)"
_SAID, _PAYS = "tokens, request.output =", "if tokens and accounts.waiting"
_PROMOTED = "request.tokens * (1 / PROMOTED_SHARE - 1)"
_MORE = "waiting.share(tenant, more=1)"

_UNSEARCHED = "self._min_tokens - 1 - self.delivered"
_OWN = "child.match or child.fail.match"

_SETTINGS, _SEED = "_hypothesis_internal_use_settings", "_hypothesis_internal_use_seed"

MUTANTS: list[tuple[Mutant, tuple[Test, ...]]] = [
    (Mutant("saves_up", TenantShares, "enter", _SET, "pass"), (_ORDER, _AWAY)),
    (Mutant("pays_twice", TenantShares, "charge", "if request.is_retry:", "if False:"), (_ORDER, _BACK)),
    (Mutant("time_goes_back", TenantShares, "charge", _TIME, "account.start"), (_BEHIND,)),
    (Mutant("output_twice", TenantShares, "charge_output", _SAID, "tokens, _ ="), (_ORDER, _OUTPUT)),
    (Mutant("output_free", TenantShares, "charge_output", _PAYS, "if False"), (_ORDER, _OUTPUT)),
    (Mutant("output_idle", TenantShares, "charge_output", _PAYS, "if tokens"), (_OUTPUT,)),
    (Mutant("output_unweighted", TenantShares, "charge_output", "/ self.weight(request.tenant)", "/ 1"), (_ORDER,)),
    (
        Mutant("a_ninth", FairQueue, "pop", _PROMOTED, "request.tokens / PROMOTED_SHARE"),
        (test_fair_queue.test_promoted,),
    ),
    (Mutant("drops_own", AdmissionQueue, "place_for", _MORE, "waiting.share(tenant)"), (_SHARE, _ORDER)),
    (Mutant("drops_all", AdmissionQueue, "place_for", _MORE, "0"), (_SHARE, _ORDER)),
    (Mutant("drops_none", AdmissionQueue, "place_for", "if largest is not None and", "if False and"), (_SHARE, _ORDER)),
    (Mutant("drops_oldest", _ClassRequests, "newest", "next(reversed(", "next(iter("), (_SHARE, _ORDER)),
    (Mutant("unweighted", _ClassRequests, "share", "/ self._shares.weight(tenant)", ""), (_SHARE, _ORDER)),
    (Mutant("old_shares", _ClassRequests, "largest", "== entry", "is not None"), (_ORDER,)),
    (Mutant("on_its_way", Lane, "_work_waits", " or self.unseen_seqs > 0", ""), (_GATE,)),
    (Mutant("last_start", StreamAssembly, "begin", "if not self.delivered", "if True"), (_START,)),
    (Mutant("min", StreamAssembly, "_deliver", _UNSEARCHED, "self._min_tokens - self.delivered"), (_FRAMING, _MIN)),
    (Mutant("rest", StreamAssembly, "_close", "if self._search(rest):", "if self._text.append(rest):"), (_REST,)),
    (Mutant("no_links", stop_strings, "_link", "_step(root, node.fail, char)", "root"), (_FRAMING,)),
    (Mutant("own_match_only", stop_strings, "_link", _OWN, "child.match"), (_BRUTE,)),
    (Mutant("shortest", stop_strings, "_link", _OWN, "child.fail.match or child.match"), (_FRAMING,)),
    (Mutant("salts", BlockManager, "_root", "self._salts.move_to_end(seq.cache_salt)", "pass"), (_SALTS,)),
]
CAUGHT = [(mutant, test) for mutant, tests in MUTANTS for test in tests]


def run(test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest runs it, from a fixed seed, without making a failing example small."""
    if hasattr(test, "hypothesis"):
        own = getattr(test, _SETTINGS)
        quick = settings(own, database=None, phases=[Phase.generate], report_multiple_bugs=False)
        monkeypatch.setattr(test, _SETTINGS, quick)
        monkeypatch.setattr(test, _SEED, 0, raising=False)
    test()


@pytest.mark.parametrize(("mutant", "test"), CAUGHT, ids=[f"{mutant.trap}-{test.__name__}" for mutant, test in CAUGHT])
def test_the_fault_is_found(mutant: Mutant, test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        run(test, monkeypatch)
