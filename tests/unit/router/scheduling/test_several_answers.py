"""Several answers to one prompt go to one worker with room for them, which computes the prompt once."""

from __future__ import annotations

import pytest

from common.delay_gate import DelayGate
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.placement import PLACEMENTS
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_dispatcher

PROMPT, SHARED = 1000, 999


def fleet(policy: str, *workers: str, places: int = 100, caches_prefixes: bool = True) -> Dispatcher:
    made = make_dispatcher(DelayGate(0.0), PLACEMENTS[policy](), 1000)
    for worker in workers:
        report = LoadReport(0.0, room_tokens=100_000, room_seqs=places)
        made.lane_up(worker, "m", report, 0.0, caches_prefixes=caches_prefixes)
    return made


def answers(count: int, shared: int = SHARED) -> list[QueuedRequest]:
    """Requests of one prompt, the first one first."""
    made = [QueuedRequest(key, "m", PROMPT, 0.0, shared_tokens=shared) for key in range(count)]
    for further in made[1:]:
        further.lead = made[0]
    return made


def arrive(dispatcher: Dispatcher, requests: list[QueuedRequest]) -> list[str]:
    """The worker of each request."""
    for request in requests:
        dispatcher.arrive(request, 0.0)
    return [request.worker for request in requests]


@pytest.mark.parametrize("policy", sorted(PLACEMENTS))
def test_answers_go_to_worker_of_first(policy: str) -> None:
    d, asked = fleet(policy, "a", "b", "c"), answers(8)
    assert len(set(arrive(d, asked))) == 1
    assert [request.work for request in asked] == [PROMPT] + [PROMPT - SHARED] * 7
    (release,) = d.decide(0.0)
    assert [request.key for request in release.requests] == list(range(8))


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_answers_without_place_go_to_other_workers(policy: str) -> None:
    d, asked = fleet(policy, "a", "b", places=3), answers(6)
    workers = arrive(d, asked)
    assert workers[:3] == [workers[0]] * 3
    assert set(workers) == {"a", "b"}


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_answers_without_shared_prefix_spread(policy: str) -> None:
    """Workers without a prefix cache, and prompts of one token."""
    assert len(set(arrive(fleet(policy, "a", "b", "c", caches_prefixes=False), answers(6)))) == 3
    assert len(set(arrive(fleet(policy, "a", "b", "c"), answers(6, shared=0)))) == 3


def test_later_answer_follows_the_first() -> None:
    d, (first, second) = fleet("round_robin", "a", "b"), answers(2)
    arrive(d, [first])
    assert d.decide(0.0)
    assert first.lane is None
    assert arrive(d, [second]) == [first.worker]
    assert d.decide(1.0)
    d.lane_down(first.worker, 2.0)
    d.requeue(second, 2.0)
    assert d.decide(2.0)
    assert second.worker != first.worker


def test_waiting_answers_stay_with_first() -> None:
    """An idle worker gets none of them, and they follow the first when it is released."""
    busy = LoadReport(0.0, decoding_seqs=5, waiting_seqs=9, waiting_tokens=90_000, room_tokens=0, room_seqs=100)
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS["prefix_aware"](), 1000)
    d.lane_up("a", "m", busy, 0.0)
    asked = answers(4)
    assert arrive(d, asked) == ["a"] * 4
    assert d.decide(0.0) == []
    d.lane_up("b", "m", LoadReport(0.0, room_tokens=100_000, room_seqs=100), 0.0)
    for now in (0.1, 0.3, 0.6, 0.9):
        released = d.decide(now)
        assert len({request.worker for request in asked}) == 1
        if released:
            break
    assert [release.worker for release in released] == ["b"]


def test_answers_leave_worker_filled_by_others() -> None:
    """The worker had room at first, then requests of other routers took it."""
    d, (first, *others) = fleet("prefix_aware", "a", places=8), answers(3)
    arrive(d, [first])
    assert [release.worker for release in d.decide(0.0)] == ["a"]
    d.report("a", LoadReport(0.0, decoding_seqs=5, room_tokens=0, room_seqs=8, submit_seen=1))
    assert arrive(d, others) == ["a"] * 2
    full = LoadReport(0.1, decoding_seqs=13, waiting_seqs=9, waiting_tokens=50_000, room_tokens=0, submit_seen=1)
    d.report("a", full)
    d.lane_up("b", "m", LoadReport(0.1, room_tokens=100_000, room_seqs=100), 0.1)
    released = [release.worker for now in (0.2, 0.4, 0.6, 0.8) for release in d.decide(now)]
    assert set(released) == {"b"}
    assert {request.worker for request in others} == {"b"}


@pytest.mark.parametrize(
    ("workers", "caches_prefixes", "charged"),
    [("a", True, PROMPT + 7), ("a", False, 8 * PROMPT), ("abcdefgh", False, 8 * PROMPT)],
)
def test_tenant_is_charged_for_computed_tokens(workers: str, caches_prefixes: bool, charged: int) -> None:
    """The prompt once and a token for each further answer that shares it; without sharing, all of it."""
    d = fleet("round_robin", *workers, caches_prefixes=caches_prefixes)
    other = QueuedRequest(100, "none", 1, 0.0, tenant="other")
    asked = answers(8)
    arrive(d, [*asked, other])
    assert sum(len(release.requests) for release in d.decide(0.0)) == 8
    assert d.shares.start(asked[0].priority, "") == charged


def test_answers_away_from_first_are_charged_prompt() -> None:
    d = fleet("round_robin", "a", "b", places=3)
    asked = answers(6)
    arrive(d, [*asked, QueuedRequest(100, "none", 1, 0.0, tenant="other")])
    released = [request for release in d.decide(0.0) for request in release.requests]
    beside = sum(request.worker == asked[0].worker for request in released) - 1
    assert 0 < beside < len(released) - 1
    assert d.shares.start(asked[0].priority, "") == (len(released) - beside) * PROMPT + beside
