"""Sequences of routers whose streams have broken; other routers may adopt them (rule S12). Pure.

Invariants:
  * A key is found exactly while its router has no stream and the router's lease has not ended.
  * A sequence is adopted once; a second adopter finds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.limits import MAX_ORPHANS_PER_FRAME
from common.wire.adoption import delivered_digest


@dataclass(frozen=True, slots=True)
class AdoptionFacts:
    """Facts that an adopter must match to continue a sequence.

    Attributes:
        key: of the sequence.
        prompt_len: length of its prompt.
        given: tokens after the prompt that an earlier attempt has generated, uint32.
    """

    key: bytes
    prompt_len: int
    given: array[int]

    def is_behind(self, own: array[int], have: int, digest: bytes) -> bool:
        """True if the first `have` tokens have this digest. `own` are the tokens that the sequence itself has
        generated."""
        count = have - self.prompt_len - len(self.given)
        return 0 <= count <= len(own) and delivered_digest(self.given + own[:count]) == digest


class OrphanOwner(Protocol):
    """The sequences of a router without a stream."""

    def adoptables(self) -> Iterable[tuple[bytes, int]]:
        """Adoption key and rid of each sequence that may be adopted."""
        ...


T = TypeVar("T", bound=OrphanOwner)


@dataclass(frozen=True, slots=True)
class OrphanNews:
    """New keys, at most as many as fit a frame, and when their lease ends (monotonic seconds)."""

    number: int
    keys: tuple[bytes, ...]
    lease_end: float


class Orphans(Generic[T]):
    """All orphans of one worker, by key, and the announcements of them to routers."""

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[T, int]] = {}
        # By number, oldest first: the announcement and the orphans' owner.
        self._news: dict[int, tuple[T, OrphanNews]] = {}
        self._number = 0
        self._watchers: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, owner: T, lease_end: float) -> None:
        """Adds the sequences of a router whose stream is gone."""
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
        """Removes the sequences of a router that is back, or whose lease has ended."""
        mine = [number for number, (whose, _) in self._news.items() if whose is owner]
        for number in mine:
            for key in self._news.pop(number)[1].keys:
                if key in self._found and self._found[key][0] is owner:
                    del self._found[key]

    def find(self, key: bytes) -> tuple[T, int] | None:
        """The router that a sequence belongs to, and its rid there; None if there is none."""
        return self._found.get(key)

    def adopted(self, key: bytes) -> None:
        """Removes an adopted sequence."""
        self._found.pop(key, None)

    def watch(self, number: int, wake: Callable[[], None]) -> None:
        """Calls `wake` on every announcement; `number` identifies the session."""
        self._watchers[number] = wake

    def unwatch(self, number: int) -> None:
        """Stops calling the `wake` of this session."""
        self._watchers.pop(number, None)

    def news_after(self, number: int) -> OrphanNews | None:
        """The first announcement after this number; None if there is none."""
        return next((news for _, news in self._news.values() if news.number > number), None)
