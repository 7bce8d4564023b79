"""How far this router knows the prefix cache of one worker (KvEvents; design-details section 2).

Invariant: what the frames that `take` has let pass add up to is what the instance's cache held after change `seq`; with
`seq` 0 it may be less, as in the middle of a snapshot.
"""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb


class KvFeed:
    """The KV events of one instance of a worker, over all streams to it.

    Attributes:
        seq: what the next Hello says (`Hello.kv_seq`).
    """

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self.seq = 0

    def goes_on_with(self, instance_id: str) -> bool:
        """Whether a stream to this instance continues what is known; otherwise that is to be forgotten."""
        return instance_id == self._instance_id and self.seq > 0

    def take(self, events: wpb.KvEvents) -> bool:
        """Counts a frame. False when it does not continue those before it: a new stream has to begin from scratch."""
        if not events.snapshot and events.after != self.seq:
            self.seq = 0
            return False
        self.seq = events.seq
        return True
