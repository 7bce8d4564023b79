"""Sets and queues of sequences by priority class, with removal in O(1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from worker.engine.sequence import Priority, Sequence


class SequenceSet:
    """Sequences ordered by class, highest first, and within a class by insertion.

    Every operation is O(1).
    """

    def __init__(self) -> None:
        self._classes: dict[Priority, OrderedDict[int, Sequence]] = {p: OrderedDict() for p in reversed(Priority)}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(seqs.values() for seqs in self._classes.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._classes[seq.priority]

    def by_class(self) -> Iterable[Iterable[Sequence]]:
        """The entries of each class, highest first."""
        return (seqs.values() for seqs in self._classes.values())

    def append(self, seq: Sequence) -> None:
        """Adds at the end of its class."""
        self._classes[seq.priority][seq.id] = seq
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Removes an entry at any place."""
        del self._classes[seq.priority][seq.id]
        self._size -= 1

    def first(self) -> Sequence:
        """The entry at the front; keeps it."""
        return next(iter(self))

    def last(self) -> Sequence:
        """The newest entry of the lowest class; keeps it."""
        return next(next(reversed(seqs.values())) for seqs in reversed(self._classes.values()) if seqs)


class SequenceQueue(SequenceSet):
    """Waiting sequences: first come, first served within a class.

    Attributes:
        num_tokens: tokens of all entries together; `grew` updates it when late output lengthens an entry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    def append(self, seq: Sequence) -> None:
        """Adds at the end of its class."""
        super().append(seq)
        self.num_tokens += seq.num_tokens

    def appendleft(self, seq: Sequence) -> None:
        """Adds at the front of its class."""
        self.append(seq)
        self._classes[seq.priority].move_to_end(seq.id, last=False)

    def popleft(self) -> Sequence:
        """Removes the entry at the front."""
        seq = self.first()
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes an entry at any place."""
        super().remove(seq)
        self.num_tokens -= seq.num_tokens

    def grew(self, num_tokens: int) -> None:
        """Counts `num_tokens` new tokens of an entry."""
        self.num_tokens += num_tokens
