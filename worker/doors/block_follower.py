"""Changes of the cached blocks for one subscriber of a door.

Invariant: the batches of a subscriber add up to the cache, from the snapshot or from the batch that it began with. A
subscriber that is too slow for the log, or asks for a forgotten batch, gets the whole cache anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from common.errors import ApiError
from common.limits import HEARTBEAT_S
from worker.engine.prefix_cache import BlockChange
from worker.session.engine_loop import EngineLoop, EngineState


@dataclass(frozen=True, slots=True)
class FollowedBatch:
    """Changes up to batch `number`, in order.

    Attributes:
        number: of the newest batch in it.
        is_whole: True if `changes` are all cached blocks, and earlier ones no longer count.
        changes: stored blocks, and hashes of removed ones.
    """

    number: int
    is_whole: bool
    changes: Sequence[BlockChange]


class BlockFollower:
    """A subscriber's place in the log of cached blocks.

    Args:
        engine: has the log; it is kept from the first subscriber on.
        start: number of the first wanted batch; 0 for the next.
        wants_snapshot: True to begin with all blocks if `start` is 0.
    """

    def __init__(self, engine: EngineLoop, start: int, *, wants_snapshot: bool) -> None:
        self._engine = engine
        self._log = engine.watch_blocks()
        self._number = self._log.number if start == 0 else start - 1
        self._needs_whole = wants_snapshot if start == 0 else not self._log.remembers(start - 1)
        self._news = asyncio.Event()

    async def next_batches(self) -> list[FollowedBatch]:
        """The batches since the last call; waits until there are some.

        Raises:
            ApiError: the engine failed or was replaced, and its cache with it.
        """
        while True:
            log = self._log
            if log is not self._engine.block_log or self._engine.state is EngineState.FAILED:
                raise ApiError(grpc.StatusCode.ABORTED, "the engine and its cache are lost", reason="WORKER_LOST")
            if self._needs_whole or not log.remembers(self._number):
                self._needs_whole, self._number = False, log.number
                return [FollowedBatch(log.number, is_whole=True, changes=log.snapshot())]
            if batches := log.after(self._number):
                self._number = log.number
                return [FollowedBatch(batch.number, is_whole=False, changes=batch.changes) for batch in batches]
            log.wait(self._news.set)
            try:
                # A lost engine does not wake the log's subscribers.
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)
            except TimeoutError:
                continue
            finally:
                log.leave(self._news.set)
                self._news.clear()
