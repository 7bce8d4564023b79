"""How far this router knows the prefix cache of one worker (KvEvents; design-details section 2).

Invariant: what the frames that `take` has let pass add up to is what the instance's cache held after change `seq`; with
`seq` 0 it may be less, as in the middle of a snapshot.
"""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb


class KvFeed:
    """The KV events of one instance of a worker, over all streams to it."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._seq = 0
        # Granules that a snapshot has yet to bring.
        self._left = 0

    @property
    def seq(self) -> int:
        """What the next Hello says (`Hello.kv_seq`)."""
        return 0 if self._left else self._seq

    def goes_on_with(self, instance_id: str) -> bool:
        """Whether a stream to this instance continues what is known; otherwise that is to be forgotten."""
        return instance_id == self._instance_id and self.seq > 0

    def restarted(self) -> KvFeed:
        """The same instance's, as if nothing had come."""
        return KvFeed(self._instance_id)

    def take(self, events: wpb.KvEvents) -> bool:
        """Counts a frame. False when it does not continue those before it: a new stream has to begin from scratch."""
        if not (events.snapshot or self._continues(events)):
            self._seq = self._left = 0
            return False
        self._seq, self._left = events.seq, events.left
        return True

    def _continues(self, events: wpb.KvEvents) -> bool:
        if events.after != self._seq:
            return False
        is_piece = events.after == events.seq
        return self._left == (events.left + len(events.stored) if is_piece else 0)
