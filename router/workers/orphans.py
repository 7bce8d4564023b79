"""Sequences of routers that are gone, as workers name them: what this router could adopt, and where (rule S12).

Invariants:
  * At most MAX_ORPHANS are known, the newest ones; none longer than its lease.
  * A key is handed out once: whoever asks again would find the sequence adopted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from common.limits import MAX_ORPHANS


class OrphanTable:
    """The adoption keys that workers have named.

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
        """A worker has orphans of these keys for so long."""
        now = self._clock()
        for key in keys:
            self._known[key] = address, now + lease_left_s
            self._known.move_to_end(key)
        while self._known and (len(self._known) > MAX_ORPHANS or self._is_over(next(iter(self._known)), now)):
            self._known.popitem(last=False)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def knows(self, key: bytes) -> bool:
        """True if a worker has named this key, and its lease has not ended."""
        return key in self._known and not self._is_over(key, self._clock())

    def take(self, key: bytes) -> str:
        """Address of the worker that has this key, which is forgotten; "" for none."""
        address, lease_end = self._known.pop(key, ("", 0.0))
        return address if lease_end > self._clock() else ""

    async def wait_for(self, keys: Iterable[bytes], timeout_s: float) -> None:
        """Waits until all of these keys are known, at most `timeout_s`: a client may be faster than the worker."""
        wanted, end = {key for key in keys if key}, self._clock() + timeout_s
        while any(not self.knows(key) for key in wanted) and (left_s := end - self._clock()) > 0:
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                return

    def _is_over(self, key: bytes, now: float) -> bool:
        return self._known[key][1] <= now
