"""Waiting requests that no worker can serve, since when, and which of them are to be looked at again.

Pure. Invariant: they are in the order in which they were parked, so that the first one has waited longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from router.scheduling.queued_request import QueuedRequest


class ParkedRequests:
    """The requests without a lane.

    Args:
        wait_s: how long a request waits while there is no worker for it, seconds.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._requests: dict[int, QueuedRequest] = {}
        self._to_review: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The longest parked first."""
        return iter(self._requests.values())

    def add(self, request: QueuedRequest, now: float) -> None:
        """Parks a request."""
        request.parked = now
        self._requests[request.key] = request
        self._to_review.append(request.key)

    def get(self, key: int) -> QueuedRequest | None:
        """A request that is parked; None when it is not."""
        return self._requests.get(key)

    def discard(self, request: QueuedRequest) -> None:
        """Takes a request out; a no-op when it is not here."""
        self._requests.pop(request.key, None)

    def is_overdue(self, request: QueuedRequest, now: float) -> bool:
        """True if a request has been parked for too long."""
        return self._until(request) <= now

    def next_overdue(self) -> float | None:
        """Time at which the first one has been parked for too long, monotonic seconds; None when nothing is parked."""
        return next(map(self._until, self), None)

    @property
    def has_to_review(self) -> bool:
        """True if `take_to_review` has more to give."""
        return bool(self._to_review)

    def review_all(self) -> None:
        """Has all looked at again: workers have come or gone."""
        self._to_review = deque(self._requests)

    def take_to_review(self, most: int) -> list[int]:
        """Keys of requests to look at, among the next `most`: parked since this was asked last, or `review_all`."""
        keys = [self._to_review.popleft() for _ in range(min(most, len(self._to_review)))]
        return [key for key in keys if key in self._requests]

    def _until(self, request: QueuedRequest) -> float:
        assert request.parked is not None
        return request.parked + self._wait_s
