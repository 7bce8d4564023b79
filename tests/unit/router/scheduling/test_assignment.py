"""Requests that no worker can serve: how long they wait, and when they are reviewed."""

from __future__ import annotations

from router.scheduling.assignment import ParkedRequests
from router.scheduling.queued_request import QueuedRequest


def parked(*keys: int) -> ParkedRequests:
    made = ParkedRequests(10.0)
    for key in keys:
        made.add(QueuedRequest(key, "m", 1, 0.0), float(key))
    return made


def test_parked_requests_become_overdue_in_order() -> None:
    made = parked(1, 2)
    assert made.next_overdue() == 11.0
    assert [made.is_overdue(request, 11.0) for request in made] == [True, False]
    made.discard(next(iter(made)))
    assert (made.next_overdue(), len(made), 1 in made) == (12.0, 1, False)
    made.discard(next(iter(made)))
    assert made.next_overdue() is None


def test_parked_request_is_reviewed_once_per_fleet_change() -> None:
    made = parked(1, 2, 3)
    assert made.take_to_review(2) == [1, 2]
    assert made.has_to_review
    gone = made.get(3)
    assert gone is not None
    made.discard(gone)
    assert (made.take_to_review(2), made.has_to_review) == ([], False)
    made.review_all()
    assert made.take_to_review(9) == [1, 2]
