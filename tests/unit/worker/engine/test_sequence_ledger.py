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
    account.begin_step(3.5, is_first=True)
    account.end_step(4.0, 0.5, 0.0, 1, 1)
    ledger.move(Stage.DECODE, account, 4.0)
    parts = {Stage.WORKER_QUEUE: 1.0, Stage.PREFILL: 2.0, Stage.DECODE: 0.5, Stage.BETWEEN_STEPS: 0.5}
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
