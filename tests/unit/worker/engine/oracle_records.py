"""Records of the oracle: sequences, rows and steps as it has seen them, and which block holds which prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.unit.worker.engine.speculation.truth import Truth
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence

# What a batch shows, row by row.
COLUMNS = (
    "req_ids",
    "num_scheduled_tokens",
    "num_computed_tokens",
    "context_lens",
    "scheduled_tokens",
    "from_last_output",
    "is_final",
    "last_block_num_tokens",
    "block_tables",
    "num_cached_tokens",
    "sampling",
    "block_copies",
)


@dataclass(eq=False, slots=True)
class Life:
    """What the oracle knows about one sequence.

    Attributes:
        known: tokens that it came with or that the model has sampled, in flight or not.
        delivered: tokens that it came with or that have been streamed.
        computed: where its next row begins; None while it waits. A visit lasts from admission to preemption or end.
        cached: where its first row of this visit begins.
        table: its blocks after the last event.
        serial: order of admission.
        published: full blocks of this visit that can be found.
        prefilling: whether its last known token has not been scheduled in this visit.
        drafts: what the model has proposed for its next row.
        awaited: whether its row in flight verifies drafts, or brings some, and it cannot go on before.
        num_inflight: rows in flight.
        first_scheduled, first_token: when these were, None before.
    """

    seq: Sequence
    truth: Truth
    known: int
    delivered: int
    gated: bool
    computed: int | None = None
    cached: int = 0
    table: list[int] = field(default_factory=list)
    serial: int = 0
    published: int = 0
    prefilling: bool = False
    drafts: list[int] = field(default_factory=list)
    awaited: bool = False
    num_inflight: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    ended: bool = False

    @property
    def is_steered(self) -> bool:
        """True if the next token follows from more than the logits: penalties, and a length to be reached."""
        params = self.seq.sampling_params
        return params.penalized or self.known - self.seq.num_prompt_tokens < params.min_tokens

    @property
    def start(self) -> int:
        """`computed` of a running sequence."""
        assert self.computed is not None, f"sequence {self.seq.id} does not run"
        return self.computed


@dataclass(slots=True)
class Row:
    """One sequence's part of a step, with the sequence's state before the step.

    The row starts at the sequence's true position. The batch assumes a position `num_rejected` tokens later, because of
    drafts in flight.
    """

    life: Life
    start: int
    end: int
    drafts: list[int]
    final: bool
    was: tuple[int, int, list[int], bool]
    prefill: bool
    table: list[int]
    num_rejected: int = 0
    sampled: list[int] = field(default_factory=list)
    after: int = 0


@dataclass(slots=True)
class Flight:
    """A scheduled step that has not landed; `shown` is a copy of the batch at scheduling."""

    batch: ScheduledBatch
    shown: ScheduledBatch
    seqs: dict[int, Sequence]
    rows: list[Row]
    computing: set[int]
    last_output: ScheduledBatchOutput
    output: ScheduledBatchOutput

    @property
    def num_pairs(self) -> int:
        """Pairs of a token that a prompt computes and one that it attends to."""
        rows = [(row.start, row.end - row.start) for row in self.rows if row.prefill]
        return sum(count * start + count * (count + 1) // 2 for start, count in rows)


def rows_in_flight(flights: Iterable[Flight], life: Life) -> list[Row]:
    """Rows of a sequence in these steps."""
    return [row for flight in flights for row in flight.rows if row.life is life]


def num_rejected(flights: Iterable[Flight], life: Life) -> int:
    """Wrong ones of the drafts of a sequence that these steps verify."""
    rows = rows_in_flight(flights, life)
    return sum(len(row.drafts) + 1 - len(row.sampled) for row in rows if row.final)


def check_totals(batch: ScheduledBatch, rows: list[Row], most_tokens: int) -> None:
    """The sums of a batch equal the sums of its rows, and the tokens stay within the step's limit."""
    counts = [row.end - row.start for row in rows]
    prefills = [count for count, row in zip(counts, rows, strict=True) if row.prefill]
    assert sum(counts) <= most_tokens, f"{sum(counts)} tokens"
    assert batch.total_tokens_num == sum(counts)
    assert batch.total_tokens_num_prefill == sum(prefills)
    assert batch.total_tokens_num_decode == sum(counts) - sum(prefills)
    assert batch.total_seqs_num == len(rows)
    assert (batch.total_seqs_num_prefill, batch.total_seqs_num_decode) == (len(prefills), len(rows) - len(prefills))


class Cache:
    """Published prefixes by block, as observed; a block loses its entry only when it is reused."""

    def __init__(self) -> None:
        self._block_of: dict[int, int] = {}
        self._entry_of: dict[int, tuple[int, int]] = {}
        self._num_children: dict[int, int] = {}
        self._tail_of: dict[int, int] = {}
        self._block_of_tail: dict[int, int] = {}
        self._tail_parents: dict[int, int] = {}

    def hits(self, life: Life, size: int) -> int:
        """Leading full blocks of a sequence that can be found; its last known token is never in one."""
        states, found = life.truth.states, 0
        while found < (life.known - 1) // size and states[(found + 1) * size - 1] in self._block_of:
            found += 1
        return found

    def num_in_use(self, life: Life, hits: int, size: int, held: Iterable[int]) -> int:
        """Number of the sequence's first blocks that other sequences hold."""
        blocks = set(held)
        return sum(self._block_of.get(life.truth.states[(j + 1) * size - 1]) in blocks for j in range(hits))

    def tail(self, state: int) -> int | None:
        """The block that a prefix which ends inside a block ends in."""
        return self._block_of_tail.get(state)

    def publish_tail(self, state: int, parent: int, block: int) -> None:
        """A prefix that ends inside a block can be found from now on."""
        if state not in self._block_of_tail and block not in self._tail_of:
            self._block_of_tail[state], self._tail_of[block] = block, state
            self._tail_parents[block] = parent
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def __contains__(self, block: int) -> bool:
        return block in self._entry_of or block in self._tail_of

    def block(self, state: int) -> int | None:
        """The block of a prefix."""
        return self._block_of.get(state)

    def publish(self, state: int, parent: int, block: int) -> None:
        """A full block can be found from now on."""
        self._block_of[state] = block
        self._entry_of[block] = state, parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def take(self, block: int) -> None:
        """A free block is used for something else."""
        if block in self._tail_of:
            del self._block_of_tail[self._tail_of.pop(block)]
            self._num_children[self._tail_parents.pop(block)] -= 1
        if block in self._entry_of:
            state, parent = self._entry_of.pop(block)
            assert not self._num_children.get(state), f"block {block} is evicted before its children"
            del self._block_of[state]
            self._num_children[parent] -= 1


def rank(life: Life) -> tuple[int, int]:
    """Order of the running set: classes, highest first, and within one as they were admitted."""
    return -life.seq.priority, life.serial


def blocks_in(life: Life, start: int, end: int, size: int) -> list[int]:
    """Hashes of the full blocks that a row computes, wholly or in part."""
    last = min(-(-end // size), life.known // size)
    return [life.truth.states[(j + 1) * size - 1] for j in range(start // size, last)]


def tail_in(cache: Cache | None, life: Life, end: int, size: int) -> list[int]:
    """The tail that a row up to `end` computes, wholly or in part, so that it can be found for the first time."""
    last = life.known - 1
    if cache is None or not life.seq.shares_prompt or life.first_token is not None:
        return []
    if end <= last - last % size or not last % size:
        return []
    state = life.truth.state_before(last)
    return [] if cache.tail(state) is not None else [state]
