"""A queue of sequences in which any of them can be found and removed at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from worker.sequence import Sequence


class SequenceQueue:
    """First in, first out, by sequence id; every operation is O(1).

    Attributes:
        num_tokens: sum of the tokens of all entries when they entered. A sequence does not grow while it is here.
    """

    def __init__(self) -> None:
        self._seqs: OrderedDict[int, Sequence] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._seqs

    def append(self, seq: Sequence) -> None:
        """Adds at the end."""
        self._seqs[seq.id] = seq
        self.num_tokens += seq.num_tokens

    def appendleft(self, seq: Sequence) -> None:
        """Adds at the front."""
        self.append(seq)
        self._seqs.move_to_end(seq.id, last=False)

    def first(self) -> Sequence:
        """The entry at the front, which stays."""
        return next(iter(self._seqs.values()))

    def popleft(self) -> Sequence:
        """Removes the entry at the front."""
        seq = self.first()
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes an entry from wherever it is."""
        del self._seqs[seq.id]
        self.num_tokens -= seq.num_tokens
