"""Flight recorder of an engine: what its newest steps computed, and when.

A record keeps lists that the step's batch has made anyway, so that recording costs the same for any number of
sequences. It has ids and numbers of tokens, never tokens. The engine thread writes; other threads may call
`StepRing.newest` at any time, also while a step hangs.

Times are monotonic seconds of the engine's clock. They divide a step: at `scheduled` the scheduler begins to fill it,
at `launched` the executor gets it, at `waited` the engine begins to wait for its output, and at `finished` the output
arrives. With deferred output the engine schedules the next step between `launched` and `waited`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from common.limits import MAX_STEP_RECORD_ROWS, MAX_STEP_RECORDS


class RowKind(enum.Enum):
    """Work that a step does for a sequence."""

    DECODE = "decode"
    # Decodes a token, and verifies drafts behind it.
    VERIFY = "verify"
    PREFILL = "prefill"


class StepRow(NamedTuple):
    """One sequence of a step.

    Attributes:
        seq_id: of the sequence.
        request_id: of its request, "" if unknown.
        kind: what the step does with it.
        num_tokens: tokens that the step computes of it, drafts included.
        num_computed: tokens computed before; all drafts of steps in flight count as accepted.
        num_cached: tokens of its prompt that were in the prefix cache when it was admitted.
    """

    seq_id: int
    request_id: str
    kind: RowKind
    num_tokens: int
    num_computed: int
    num_cached: int


@dataclass(slots=True)
class StepRecord:
    """One step. Its sequences are in columns, in the order of the batch: decodes, then prompts.

    Attributes:
        number: counts the steps since the engine's start, from 1.
        scheduled, launched, waited, finished: times (see the module); None while they are still ahead.
        duration_s: seconds of the forward pass, as the executor measured it; 0 until `finished`.
        seq_ids: ids of the sequences.
        request_ids: ids of their requests, "" where unknown.
        num_tokens: tokens that the step computes of each.
        num_computed: tokens of each computed before (StepRow).
        num_cached: cached tokens of each (StepRow).
        num_prefills: number of the last sequences that are prompts.
        free_blocks: KV blocks that were free or could be evicted after the step got its own.
        total_blocks: all KV blocks.
        num_waiting: sequences that waited for their first step, or for the first one after a preemption.
        num_gated: sequences that the engine's own delay gate held back.
        preempted: ids of sequences that lost their blocks to this step.
        num_new_tokens: tokens that the step's output added to answers; 0 until `finished`.
    """

    number: int
    scheduled: float
    launched: float
    seq_ids: list[int]
    request_ids: list[str]
    num_tokens: list[int]
    num_computed: list[int]
    num_cached: list[int]
    num_prefills: int
    free_blocks: int
    total_blocks: int
    num_waiting: int
    num_gated: int
    preempted: list[int]
    waited: float | None = None
    finished: float | None = None
    duration_s: float = 0.0
    num_new_tokens: int = 0

    def rows(self) -> Iterator[StepRow]:
        """The step's sequences one by one."""
        num_decodes = len(self.seq_ids) - self.num_prefills
        numbers = zip(self.num_tokens, self.num_computed, self.num_cached, strict=True)
        owners = zip(self.seq_ids, self.request_ids, strict=True)
        for place, (owner, (num_tokens, num_computed, num_cached)) in enumerate(zip(owners, numbers, strict=True)):
            decodes = RowKind.VERIFY if num_tokens > 1 else RowKind.DECODE
            kind = decodes if place < num_decodes else RowKind.PREFILL
            yield StepRow(*owner, kind, num_tokens, num_computed, num_cached)


class StepRing:
    """The newest steps, those in flight included.

    Args:
        max_steps: most records kept, at least 1.
        max_rows: most sequences of all records together; the newest record is kept however many it has.

    Attributes:
        unix_offset_s: Unix time less the time of the records. Read once, so that a step always has the same Unix time.
    """

    unix_offset_s = 0.0

    def __init__(self, max_steps: int = MAX_STEP_RECORDS, max_rows: int = MAX_STEP_RECORD_ROWS) -> None:
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._records: deque[StepRecord] = deque()
        self._num_rows = 0

    def append(self, record: StepRecord) -> None:
        """Adds a step that is about to be launched. Its owner fills in the rest later."""
        records = self._records
        records.append(record)
        self._num_rows += len(record.seq_ids)
        while len(records) > self._max_steps or (self._num_rows > self._max_rows and len(records) > 1):
            self._num_rows -= len(records.popleft().seq_ids)

    def newest(self, count: int | None = None) -> list[StepRecord]:
        """The last `count` steps, oldest first; all of them for None."""
        # `list` copies a deque without running Python code in between, so another thread cannot change it meanwhile.
        records = list(self._records)
        return records if count is None else records[max(0, len(records) - count) :]

    def newest_of(self, seq_id: int, since: float, count: int) -> list[StepRecord]:
        """The last `count` finished steps that computed a sequence, of those launched after `since`; oldest first."""
        found: list[StepRecord] = []
        for record in reversed(self.newest()):
            if record.launched < since or len(found) == count:
                break
            if record.finished is not None and seq_id in record.seq_ids:
                found.append(record)
        return found[::-1]
