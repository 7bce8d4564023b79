"""Sequences of routers whose streams have broken, which other routers may adopt (rule S12). Pure.

Invariants:
  * A key is found exactly while the router of its sequence has no stream and its lease has not ended.
  * A sequence is adopted once: who comes second finds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.limits import MAX_ORPHANS_PER_FRAME
from common.wire.adoption import delivered_digest


@dataclass(frozen=True, slots=True)
class Adoptable:
    """Facts by which an adopter shows that it goes on with the same answer.

    Attributes:
        key: of the sequence.
        prompt_len: length of its prompt.
        given: tokens behind it that an earlier attempt has generated, uint32.
    """

    key: bytes
    prompt_len: int
    given: array[int]

    def is_behind(self, own: array[int], have: int, digest: bytes) -> bool:
        """True if the first `have` tokens, of which `own` are those that the sequence has added, have this digest."""
        count = have - self.prompt_len - len(self.given)
        return 0 <= count <= len(own) and delivered_digest(self.given + own[:count]) == digest


class Abandoned(Protocol):
    """The sequences of a router without a stream."""

    def adoptables(self) -> Iterable[tuple[bytes, int]]:
        """Adoption keys and rids of what may be adopted."""
        ...


T = TypeVar("T", bound=Abandoned)


@dataclass(frozen=True, slots=True)
class OrphanNews:
    """Keys that have come, at most as many as a frame takes, and when their lease ends (monotonic seconds)."""

    number: int
    keys: tuple[bytes, ...]
    lease_end: float


class Orphans(Generic[T]):
    """All orphans of one worker, by their keys, and what the routers are told of them."""

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[T, int]] = {}
        # By number, oldest first: the news, and whose they are.
        self._news: dict[int, tuple[T, OrphanNews]] = {}
        self._number = 0
        self._watchers: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, owner: T, lease_end: float) -> None:
        """The stream of a router is gone."""
        named = {key: rid for key, rid in owner.adoptables() if key}
        if not named:
            return
        self._found.update((key, (owner, rid)) for key, rid in named.items())
        keys = list(named)
        for start in range(0, len(keys), MAX_ORPHANS_PER_FRAME):
            self._number += 1
            part = tuple(keys[start : start + MAX_ORPHANS_PER_FRAME])
            self._news[self._number] = owner, OrphanNews(self._number, part, lease_end)
        for wake in list(self._watchers.values()):
            wake()

    def remove(self, owner: T) -> None:
        """The router is back, or its lease has ended."""
        mine = [number for number, (whose, _) in self._news.items() if whose is owner]
        for number in mine:
            for key in self._news.pop(number)[1].keys:
                if key in self._found and self._found[key][0] is owner:
                    del self._found[key]

    def find(self, key: bytes) -> tuple[T, int] | None:
        """The router that a sequence belongs to, and its rid there."""
        return self._found.get(key)

    def adopted(self, key: bytes) -> None:
        """Finds a sequence no more."""
        self._found.pop(key, None)

    def watch(self, number: int, wake: Callable[[], None]) -> None:
        """Wakes a session, by its number, whenever there are news."""
        self._watchers[number] = wake

    def unwatch(self, number: int) -> None:
        """Wakes it no more."""
        self._watchers.pop(number, None)

    def news_after(self, number: int) -> OrphanNews | None:
        """The first news behind those of this number; None when there are none."""
        return next((news for _, news in self._news.values() if news.number > number), None)
