"""Sequences of routers that are gone, as named by workers; this router may adopt them (rule S12).

Invariants:
  * At most MAX_ORPHANS sequences are known, the newest ones, and none longer than its lease.
  * A key is returned by `take` once, because its sequence can be adopted once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from common.limits import MAX_ORPHANS


class OrphanTable:
    """The adoption keys of sequences that workers have named.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By key: the worker's address, and when the lease ends. Newest last.
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, address: str, keys: Iterable[bytes], lease_left_s: float) -> None:
        """Adds keys that a worker has named, for the rest of their lease."""
        now = self._clock()
        for key in keys:
            self._known[key] = address, now + lease_left_s
            self._known.move_to_end(key)
        while self._known and (len(self._known) > MAX_ORPHANS or self._is_over(next(iter(self._known)), now)):
            self._known.popitem(last=False)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def knows(self, key: bytes) -> bool:
        """True if a worker has named this key and the lease has not ended."""
        return key in self._known and not self._is_over(key, self._clock())

    def take(self, key: bytes) -> str:
        """Removes a key and returns its worker's address; "" if the key is not known."""
        address, lease_end = self._known.pop(key, ("", 0.0))
        return address if lease_end > self._clock() else ""

    async def wait_for(self, keys: Iterable[bytes], timeout_s: float) -> None:
        """Waits up to `timeout_s` until all keys are known: a client may reconnect before a worker names them."""
        wanted, end = {key for key in keys if key}, self._clock() + timeout_s
        while any(not self.knows(key) for key in wanted) and (left_s := end - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                return

    def _is_over(self, key: bytes, now: float) -> bool:
        return self._known[key][1] <= now
