"""Ledgers of sequences: which part of a worker's time each stage gets, and who is blamed."""

from __future__ import annotations

import pytest

from common.telemetry.names import Stage
from worker.engine.sequence_ledger import SequenceLedger, StepAccount


def _ledger(name: str, arrived: float = 0.0) -> SequenceLedger:
    ledger = SequenceLedger(arrived)
    ledger.request_id = name
    return ledger


def test_lone_sequence_has_queue_prefill_and_decode_of_its_own() -> None:
    account, ledger = StepAccount(), _ledger("a")
    account.begin_step(1.0, is_first=True)
    ledger.start(account, 1.0)
    account.add_prompt(ledger, account.end_step(3.0, 2.0, 2.0, 0, 0))
    ledger.produce(account, 3.0)
    account.begin_step(3.05, is_first=True)
    account.end_step(4.0, 0.95, 0.0, 1, 1)
    ledger.move(Stage.DECODE, account, 4.0)
    parts = {Stage.WORKER_QUEUE: 1.0, Stage.PREFILL: 2.0, Stage.DECODE: 0.95, Stage.BETWEEN_STEPS: 0.05}
    assert ledger.parts(4.0) == pytest.approx(parts)
    assert ledger.blames == {}


def test_neighbours_prompt_inside_decode_steps_is_found_and_blamed() -> None:
    account, mine, long, short = StepAccount(), _ledger("mine"), _ledger("long"), _ledger("short")
    mine.start(account, 0.0)
    account.add_prompt(mine, account.end_step(1.0, 1.0, 1.0, 0, 0))
    mine.produce(account, 1.0)
    account.end_step(2.0, 1.0, 0.0, 1, 1)
    for ledger, tokens in ((short, 1.0), (long, 5.0)):
        end = account.ended + tokens + 1.0
        account.add_prompt(ledger, account.end_step(end, tokens + 1.0, tokens, 1, 1))
    mine.move(Stage.DECODE, account, account.ended)
    assert mine.parts(account.ended) == pytest.approx(
        {Stage.PREFILL: 1.0, Stage.OTHERS_PREFILL: 6.0, Stage.DECODE: 3.0}
    )
    blame = mine.blames[Stage.OTHERS_PREFILL]
    assert (blame.request_id, blame.seconds) == ("long", 5.0)


def test_wait_behind_a_prompt_blames_it() -> None:
    account, first, second = StepAccount(), _ledger("first"), _ledger("second")
    first.start(account, 0.0)
    account.add_prompt(first, account.end_step(4.0, 4.0, 4.0, 0, 0))
    second.start(account, 4.0)
    assert second.parts(4.0) == {Stage.WORKER_QUEUE: 4.0}
    assert second.blames[Stage.WORKER_QUEUE].request_id == "first"


def test_wait_at_a_worker_full_of_answers_blames_the_one_that_decoded_longest() -> None:
    """Former fault: without a prompt beside it nobody was blamed."""
    account, first, second = StepAccount(), _ledger("first"), _ledger("second", 1.0)
    first.start(account, 0.0)
    first.produce(account, 1.0)
    account.end_step(5.0, 4.0, 0.0, 1, 1)
    second.start(account, 5.0)
    blame = second.blames[Stage.WORKER_QUEUE]
    assert (blame.request_id, blame.seconds) == ("first", 4.0)


def test_steps_are_longer_by_neighbours_than_alone() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    ledger.produce(account, 0.0)
    account.end_step(1.0, 1.0, 0.0, 1, 1)
    account.end_step(4.0, 3.0, 0.0, 8, 8)
    ledger.move(Stage.DECODE, account, 4.0)
    assert ledger.parts(4.0) == pytest.approx({Stage.DECODE: 2.0, Stage.NEIGHBOURS: 2.0})


def test_drafts_get_their_share_of_the_extra_time() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    ledger.produce(account, 0.0)
    account.end_step(1.0, 1.0, 0.0, 1, 1)
    account.end_step(3.5, 2.5, 0.0, 1, 4)
    account.end_step(7.5, 4.0, 0.0, 2, 4)
    ledger.move(Stage.DECODE, account, 7.5)
    # Two sequences verify one draft each: of 3 extra tokens one is the own draft.
    expected = {Stage.DECODE: 3.0, Stage.SPECULATION: 1.5 + 1.0, Stage.NEIGHBOURS: 2.0}
    assert ledger.parts(7.5) == pytest.approx(expected)


def test_preemption_lasts_until_the_next_token() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    account.end_step(1.0, 1.0, 1.0, 0, 0)
    ledger.produce(account, 1.0)
    ledger.move(Stage.PREEMPTED, account, 1.0)
    ledger.start(account, 3.0)
    account.end_step(4.0, 1.0, 1.0, 0, 0)
    ledger.produce(account, 4.0)
    assert ledger.parts(4.0)[Stage.PREEMPTED] == 3.0
    assert ledger.stage is Stage.DECODE


def test_step_far_beyond_the_usual_is_a_stall_and_teaches_nothing() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    ledger.produce(account, 0.0)
    account.end_step(0.125, 0.125, 0.0, 1, 1, 0.125)
    account.end_step(5.125, 5.0, 0.0, 1, 1, 0.125)
    account.end_step(5.25, 0.125, 0.0, 1, 1, 0.125)
    ledger.move(Stage.DECODE, account, account.ended)
    assert ledger.parts(account.ended) == pytest.approx({Stage.DECODE: 0.375, Stage.STALL: 4.875})


def test_engine_that_pauses_between_steps_stalls() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    ledger.produce(account, 0.0)
    account.end_step(1.0, 1.0, 0.0, 1, 1)
    account.begin_step(3.0, is_first=True)
    ledger.move(Stage.DECODE, account, account.ended)
    assert ledger.parts(3.0) == pytest.approx({Stage.DECODE: 1.0, Stage.STALL: 2.0})


def test_neighbour_that_decoded_longest_beside_is_blamed() -> None:
    account, mine, short, long = StepAccount(), _ledger("mine", 1.0), _ledger("short", 1.0), _ledger("long", 1.0)
    account.end_step(1.0, 1.0, 0.0, 1, 1)
    for ledger in (mine, short, long):
        ledger.start(account, 1.0)
        ledger.produce(account, 1.0)
    account.end_step(3.0, 2.0, 0.0, 3, 3)
    short.move(Stage.DECODE, account, 3.0)
    account.end_step(5.0, 2.0, 0.0, 2, 2)
    mine.move(Stage.DECODE, account, 5.0)
    assert mine.parts(5.0) == pytest.approx({Stage.DECODE: 2.0, Stage.NEIGHBOURS: 2.0})
    blame = mine.blames[Stage.NEIGHBOURS]
    # It was there for 4 s of the 6 s of both.
    assert blame.request_id == "long"
    assert blame.seconds == pytest.approx(2.0 * 4 / 6)


def test_sequence_that_took_the_blocks_is_blamed_for_the_preemption() -> None:
    account, ledger = StepAccount(), _ledger("a")
    ledger.start(account, 0.0)
    ledger.produce(account, 0.0)
    ledger.move(Stage.PREEMPTED, account, 1.0)
    ledger.evictor = _ledger("taker")
    ledger.produce(account, 4.0)
    blame = ledger.blames[Stage.PREEMPTED]
    assert (blame.request_id, blame.seconds) == ("taker", 3.0)
