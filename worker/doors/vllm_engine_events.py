"""Load records and KV events of `vllm.grpc.engine.VllmEngine`. Pure.

Invariants of a stream of KV events:
  * It begins with a snapshot, unless the subscriber has a number whose successors are kept. Numbers rise by one.
  * A subscriber that applies all batches has the blocks of the log. One that has fallen behind gets a new snapshot.
  * Every batch has the load. A batch of load alone repeats the last number. It comes when the load has changed and
    LOAD_HEARTBEAT_S after the last batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.limits import LOAD_HEARTBEAT_S, MAX_KV_FRAME_CHANGES, THROUGHPUT_WINDOW_S
from worker.doors.door_request import DoorLoad
from worker.engine.figures import EngineFigures
from worker.engine.prefix_cache import BlockChange, StoredBlock
from worker.session.block_log import BlockLog

_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """Load of the worker, in the terms of both messages that report it.

    Attributes:
        running, waiting: sequences.
        waiting_tokens: prompt tokens to compute.
        usage: share of the KV cache that sequences hold.
        used_tokens, total_tokens: of the KV cache.
        tokens_per_s: generated tokens.
        hit_rate: share of prompt tokens found in the prefix cache.
        max_running: most sequences that run at once.
        silence_ms: how long the current step has run; None when idle.
    """

    running: int
    waiting: int
    waiting_tokens: int
    usage: float
    used_tokens: int
    total_tokens: int
    tokens_per_s: float
    hit_rate: float
    max_running: int
    silence_ms: int | None

    def scheduler_load(self) -> pb.SchedulerLoad:
        """The record as GetLoads reports it."""
        return pb.SchedulerLoad(
            num_running_reqs=self.running,
            num_waiting_reqs=self.waiting,
            num_total_reqs=self.running + self.waiting,
            num_used_tokens=self.used_tokens,
            max_total_num_tokens=self.total_tokens,
            token_usage=self.usage,
            gen_throughput=self.tokens_per_s,
            cache_hit_rate=self.hit_rate,
            utilization=self.running / self.max_running,
            max_running_requests=self.max_running,
            num_waiting_uncached_tokens=self.waiting_tokens,
        )

    def engine_load(self, sample: int, *, load_only: bool) -> common.EngineLoad:
        """The record as a stream of KV events pushes it."""
        return common.EngineLoad(
            running_requests=self.running,
            waiting_requests=self.waiting,
            waiting_uncached_tokens=self.waiting_tokens,
            token_usage=self.usage,
            active_token_usage=self.usage,
            gen_throughput=self.tokens_per_s,
            max_running_requests=self.max_running,
            sample=sample,
            load_only=load_only,
            cache_hit_rate=self.hit_rate,
            num_used_tokens=self.used_tokens,
            max_total_num_tokens=self.total_tokens,
            engine_silence_ms=self.silence_ms,
            engine_reports_steps=True,
            prefill_pending_tokens=self.waiting_tokens,
        )


class LoadRecorder:
    """Makes load records, with rates over the last THROUGHPUT_WINDOW_S.

    Args:
        max_num_seqs: most sequences that run at once.
        block_size: tokens per KV block.
    """

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        # Times and totals of generated tokens; the first is the newest before the window, or the oldest in it.
        self._totals: deque[tuple[float, int]] = deque()

    def record(self, load: DoorLoad, figures: EngineFigures, now: float) -> LoadRecord:
        """The record at `now`; calls in the order of time."""
        running = load.running_seqs
        return LoadRecord(
            running=running,
            waiting=load.waiting_seqs,
            waiting_tokens=load.waiting_tokens,
            usage=load.used_blocks / max(1, load.total_blocks),
            used_tokens=load.used_blocks * self._block_size,
            total_tokens=load.total_blocks * self._block_size,
            tokens_per_s=self._rate(figures.generated_tokens, now),
            hit_rate=figures.cached_tokens / max(1, figures.prompt_tokens),
            max_running=self._max_num_seqs,
            silence_ms=round(load.busy_s * 1000) if running or load.waiting_seqs else None,
        )

    def _rate(self, total: int, now: float) -> float:
        totals = self._totals
        if totals and total < totals[-1][1]:
            # The counts of a new engine begin at 0.
            totals.clear()
        totals.append((now, total))
        while len(totals) > 1 and totals[1][0] <= now - THROUGHPUT_WINDOW_S:
            totals.popleft()
        began, before = totals[0]
        return (total - before) / (now - began) if now > began else 0.0


class KvEventStream:
    """Batches of one subscription.

    Args:
        log: the cached blocks of an engine.
        start: `start_sequence_number` of the subscriber: 0, or the number of a batch that it wants again.
    """

    def __init__(self, log: BlockLog, start: int) -> None:
        self._log = log
        # Number of the last batch that the subscriber has; None if it needs a snapshot.
        self._number: int | None = start - 1 if start else None
        self._sample = 0
        self._sent: LoadRecord | None = None
        self._sent_at = 0.0

    def batches(self, load: LoadRecord, now: float, timestamp: float) -> Iterator[common.KvEventBatch]:
        """Yields the batches that are due.

        Args:
            load: at `now`.
            now: monotonic seconds.
            timestamp: seconds since 1970.
        """
        made = self._changes() if self._remembers else self._snapshot()
        for batch in made:
            self._number = batch.sequence_number
            yield self._stamped(batch, load, now, timestamp, load_only=False)
        if load != self._sent or now >= self._sent_at + LOAD_HEARTBEAT_S:
            batch = common.KvEventBatch(sequence_number=self._number)
            yield self._stamped(batch, load, now, timestamp, load_only=True)

    @property
    def _remembers(self) -> bool:
        return self._number is not None and self._log.remembers(self._number)

    def _changes(self) -> Iterator[common.KvEventBatch]:
        assert self._number is not None
        for batch in self._log.after(self._number):
            yield common.KvEventBatch(sequence_number=batch.number, events=_events(batch.changes))

    def _snapshot(self) -> Iterator[common.KvEventBatch]:
        """All cached blocks, in chunks; the last one has the number of the log."""
        number, blocks = self._log.number, self._log.snapshot()
        chunks = [blocks[i : i + MAX_KV_FRAME_CHANGES] for i in range(0, len(blocks), MAX_KV_FRAME_CHANGES)] or [[]]
        for i, chunk in enumerate(chunks):
            cleared = [common.KvCacheEvent(cleared=common.KvCacheCleared())] if i == 0 else []
            yield common.KvEventBatch(
                sequence_number=number - len(chunks) + 1 + i,
                events=[*cleared, *_events(chunk)],
                snapshot=common.KvSnapshotChunk(index=i, count=len(chunks), blocks=len(blocks)),
            )

    def _stamped(
        self, batch: common.KvEventBatch, load: LoadRecord, now: float, timestamp: float, *, load_only: bool
    ) -> common.KvEventBatch:
        self._sample += 1
        self._sent, self._sent_at = load, now
        batch.timestamp, batch.dp_rank = timestamp, 0
        batch.load.CopyFrom(load.engine_load(self._sample, load_only=load_only))
        return batch


def _events(changes: Iterable[BlockChange]) -> list[common.KvCacheEvent]:
    """Changes in order; successive blocks of a prompt make one event, as do successive removals."""
    events: list[common.KvCacheEvent] = []
    last: int | None = None
    for change in changes:
        event = events[-1] if events else None
        if isinstance(change, int):
            if event is None or not event.HasField("removed"):
                events.append(event := common.KvCacheEvent(removed=common.KvBlocksRemoved(tier=_DEVICE)))
            event.removed.block_hashes.append(_signed(change))
            continue
        if event is None or not event.HasField("stored") or change.parent is None or change.parent != last:
            event = common.KvCacheEvent(stored=common.KvBlocksStored(tier=_DEVICE))
            if change.parent is not None:
                event.stored.parent_block_hash = _signed(change.parent)
            events.append(event)
        event.stored.blocks.append(_block(change))
        last = change.hash
    return events


_DEVICE = common.KV_CACHE_TIER_DEVICE


def _block(block: StoredBlock) -> common.KvBlock:
    token_ids = block.token_ids
    return common.KvBlock(block_hash=_signed(block.hash), token_ids=token_ids, block_size=len(token_ids))


def _signed(block_hash: int) -> int:
    """A hash of 64 bits as the protocol's signed number."""
    return block_hash - _WORD if block_hash >= _WORD >> 1 else block_hash
