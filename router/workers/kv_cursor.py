"""This router's knowledge of one worker's prefix cache (KvEvents; docs/explanation/architecture.md).

Invariant: what the frames that `accept` has let pass add up to is what the instance's cache held after change `seq`;
with `seq` 0 it may be less, as in the middle of a snapshot. From an `ask` on that counts anew: nothing passes until the
snapshot comes that answers the newest ask.
"""

from __future__ import annotations

import enum

from fissile.worker.v1 import worker_pb2 as wpb


class Continuity(enum.Enum):
    """Fit of a frame of KV events with those before it."""

    NEXT = enum.auto()
    """It continues them, or begins a snapshot."""
    OUTDATED = enum.auto()
    """It was written before the worker had read the newest ask, and says nothing that is still wanted."""
    GAP = enum.auto()
    """Something is missing: a new stream has to begin from scratch."""


class KvEventCursor:
    """The KV events of one instance of a worker, over all streams to it."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._seq = 0
        # Granules that a snapshot has yet to bring.
        self._left = 0
        # Asks on this stream, and whether the newest waits for its snapshot.
        self._epoch = 0
        self._awaits = False

    @property
    def seq(self) -> int:
        """Sequence number for the next Hello (`Hello.kv_seq`)."""
        return 0 if self._left else self._seq

    def goes_on_with(self, instance_id: str) -> bool:
        """True if a stream to this instance continues what is known; otherwise that is to be forgotten."""
        return instance_id == self._instance_id and self.seq > 0

    def open(self) -> None:
        """A new stream begins, on which nothing has been asked for."""
        self._epoch, self._awaits = 0, False

    def reset(self) -> None:
        """Counts what has come as nothing: the next frame leaves a gap, unless it begins a snapshot."""
        self._seq = self._left = 0

    def ask(self) -> int:
        """Counts what has come as nothing, and waits for a snapshot. Returns what the worker must be told
        (`Lane.kv_epoch`)."""
        self.reset()
        self._epoch, self._awaits = self._epoch + 1, True
        return self._epoch

    def accept(self, events: wpb.KvEvents) -> Continuity:
        """Counts a frame, unless it is outdated."""
        if events.epoch < self._epoch:
            return Continuity.OUTDATED
        if not (events.snapshot or self._continues(events)):
            self.reset()
            return Continuity.GAP
        self._seq, self._left, self._awaits = events.seq, events.left, False
        return Continuity.NEXT

    def _continues(self, events: wpb.KvEvents) -> bool:
        if self._awaits or events.after != self._seq:
            return False
        is_piece = events.after == events.seq
        return self._left == (events.left + len(events.stored) if is_piece else 0)
