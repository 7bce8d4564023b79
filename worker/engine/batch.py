"""Records passed between scheduler, model runner and stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import add
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from common.params.pooling import MEAN, Pooling
from common.params.sampling_params import SamplingParams
from kernels.no_token import NO_TOKEN
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import Sequence


@dataclass(slots=True)
class TokenHistory:
    """Tokens of one row, from which its penalties and masks are computed.

    The rules are in worker/model/logit_adjustments.py and worker/model/logit_masks.py. The history follows from prompt
    and tokens alone. So a preempted sequence, or one that another worker has begun, continues with the same penalties.
    Nothing is copied: a sequence's list of tokens only grows at its end, so a part of it is a snapshot.

    Attributes:
        seq_id: id of the sequence.
        params: its sampling parameters.
        prompt_ids: int64, the distinct ids of the prompt; empty without a repetition penalty.
        tokens: the sequence's own list; the output is `tokens[begin:end]`.
        late: a further output token, sampled by the runner's last step; NO_TOKEN for none.
        drafts: drafts behind all of these tokens.
        cache_salt: salt of the sequence; sequences of one salt share a compiled grammar.
    """

    seq_id: int
    params: SamplingParams
    prompt_ids: npt.NDArray[np.int64]
    tokens: list[int]
    begin: int
    end: int
    late: int = NO_TOKEN
    drafts: tuple[int, ...] = ()
    cache_salt: bytes = b""

    @classmethod
    def of(cls, seq: Sequence) -> TokenHistory:
        """The history of `seq` up to now."""
        params = seq.sampling_params
        prompt_ids = seq.distinct_prompt_ids if params.repetition_penalty != 1.0 else _NO_IDS
        begin, end = seq.num_prompt_tokens, len(seq.token_ids)
        return cls(seq.id, params, prompt_ids, seq.token_ids, begin, end, cache_salt=seq.cache_salt)

    @property
    def num_output(self) -> int:
        return self.end - self.begin + (self.late != NO_TOKEN) + len(self.drafts)

    @property
    def output_ids(self) -> list[int]:
        """The output so far."""
        return self.output_from(0)

    def output_from(self, count: int) -> list[int]:
        """The output without its first `count` tokens."""
        known = self.tokens[self.begin + count : self.end]
        if self.late != NO_TOKEN:
            known.append(self.late)
        # `count` may reach into the drafts.
        return known + list(self.drafts[max(0, count - (self.num_output - len(self.drafts))) :])

    def with_token(self, token_id: int) -> TokenHistory:
        """The history with a late token; NO_TOKEN, which ends the sequence, adds none."""
        return replace(self, late=token_id)

    def with_drafts(self, drafts: list[int]) -> TokenHistory:
        """The history with drafts behind it."""
        return replace(self, drafts=tuple(drafts))


_NO_IDS: Final = np.empty(0, np.int64)
_COLUMNS: Final = ("ids", "num_cached_tokens", "digested", "logprob_params", "poolings")


class BlockCopy(NamedTuple):
    """A copy of one block of the KV cache into another."""

    source: int
    target: int


class SampleArrays:
    """Parameters by which sequences are sampled, an array of each, in batch order.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int64, number of ids that may be sampled; 0 for all.
        top_p: float32, nucleus mass; 1 is off.
        min_p: float32, smallest probability relative to the largest; 0 is off.
        seeds: uint64, seeds of the random numbers.
        choices: int64, indices of the answers.
    """

    def __init__(
        self,
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        min_p: list[float],
        seeds: list[int],
        choices: list[int],
    ) -> None:
        self.temperature = np.array(temperature, np.float32)
        self.top_k = np.array(top_k, np.int64)
        self.top_p = np.array(top_p, np.float32)
        self.min_p = np.array(min_p, np.float32)
        self.seeds = np.array(seeds, np.uint64)
        self.choices = np.array(choices, np.int64)

    @classmethod
    def of(cls, rows: list[Sequence]) -> SampleArrays:
        """The parameters of these sequences."""
        params = [s.sampling_params for s in rows]
        return cls(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seeds=[s.seed for s in rows],
            choices=[s.choice for s in rows],
        )

    def values(self) -> dict[str, Any]:
        """Every array as a list, by name: arguments that make the same arrays in another process."""
        return {name: array.tolist() for name, array in vars(self).items()}


class SequenceColumns:
    """Constants of a batch's sequences in columns, made on first use and shared by all steps of the same sequences."""

    def __init__(self, rows: list[Sequence]) -> None:
        self.rows = rows
        self.ids = [s.id for s in rows]
        self.request_ids = [s.ledger.request_id for s in rows]
        self.by_id = dict(zip(self.ids, rows, strict=True))
        # Fixed from a sequence's admission until it ends or is preempted, and no columns are kept beyond that.
        self.num_cached_tokens = [s.num_cached_tokens for s in rows]

    def values(self) -> dict[str, Any]:
        """Every column, by name; arguments of `restored`."""
        return {name: getattr(self, name) for name in _COLUMNS} | {"sampling": self.sampling.values()}

    @classmethod
    def restored(cls, values: dict[str, Any]) -> SequenceColumns:
        """The columns with these values, in another process, which has no sequences."""
        columns = cls([])
        vars(columns).update(values, sampling=SampleArrays(**values["sampling"]))
        return columns

    @cached_property
    def sampling(self) -> SampleArrays:
        """Parameters by which the sequences are sampled."""
        return SampleArrays.of(self.rows)

    @cached_property
    def is_greedy(self) -> bool:
        """True if the temperatures are all 0."""
        return not self.sampling.temperature.any()

    @cached_property
    def digested(self) -> dict[int, tuple[int, int]]:
        """`logits_every` and the length of the prompt, by place of the sequences whose logits are digested."""
        return {i: (s.logits_every, s.num_prompt_tokens) for i, s in enumerate(self.rows) if s.logits_every}

    @cached_property
    def logprob_params(self) -> dict[int, SamplingParams]:
        """Parameters of the sequences that want logprobs of generated or of given tokens, by place."""
        every = enumerate([s.sampling_params for s in self.rows])
        return {i: p for i, p in every if p.logprobs is not None or p.prompt_logprobs is not None}

    @cached_property
    def samples_logprobs(self) -> bool:
        """True if logprobs of generated tokens are wanted."""
        return any(params.logprobs is not None for params in self.logprob_params.values())

    @cached_property
    def poolings(self) -> dict[int, Pooling]:
        """Pooling of the sequences that are embedded, by place."""
        return {i: s.pooling for i, s in enumerate(self.rows) if s.pooling is not None}

    @cached_property
    def steered(self) -> list[tuple[int, Sequence]]:
        """The sequences whose logits penalties, a bias or masks may change, with their places."""
        return [(i, s) for i, s in enumerate(self.rows) if s.steered_until > s.num_prompt_tokens]


_FIELDS: Final = (
    "num_scheduled_tokens",
    "num_computed_tokens",
    "is_decode",
    "is_plain_decode",
    "from_last_output",
    "is_final",
    "targets",
    "total_tokens_num",
    "total_tokens_num_prefill",
    "total_tokens_num_decode",
    "total_seqs_num",
    "total_seqs_num_prefill",
    "total_seqs_num_decode",
    "is_dummy_run",
    "num_spec_step",
    "scheduled_spec_decode_tokens",
    "drafts_in_flight",
    "drafts_wanted",
    "_num_slots",
    "feeds_draft_model",
    "next_token_ids",
    "digested_blocks",
    "block_copies",
    "blocks_down",
    "blocks_up",
    "block_size",
)


class ScheduledBatch:
    """One step's work: a snapshot of what the model runner needs. Later changes of a sequence do not alter it.

    Sequence i computes `scheduled_tokens[i]` = `token_ids[num_computed_tokens[i] : context_lens[i]]`, with
    `context_lens[i] = num_computed_tokens[i] + num_scheduled_tokens[i]`. If `is_final[i]`, the step reaches the
    sequence's last token and samples its logits row. It samples no row of other chunks.

    `targets` is for sequences that want logprobs of given tokens. It has the given tokens that follow the step's rows,
    in order, whose logits the step computes. The row that samples has none.

    Speculation: drafts to verify follow the last token in `scheduled_tokens`. They are also in
    `scheduled_spec_decode_tokens`, at most `num_spec_step` per sequence. `drafts_wanted` is the number of drafts, by
    sequence, that the runner proposes for the next step; the block tables have slots for them. If `feeds_draft_model`,
    a draft model computes the step's rows too, and `next_token_ids` has the tokens behind the rows of chunks.

    Deferred output: a row with `from_last_output[i]` was scheduled before its newest token was known.
    `scheduled_tokens[i]` is empty, and the runner takes the token from its last output (`input_tokens`). The row's
    drafts are the first ones that the last step has made; a missing one may be any id. Each is NO_TOKEN in
    `scheduled_spec_decode_tokens`. `num_computed_tokens` counts steps in flight as done, and all drafts that they
    verify as accepted. `drafts_in_flight` is the number of those drafts, by sequence: the row stands one token earlier
    for each that is rejected. Such sequences have no history.

    Before it computes anything, the runner digests `digested_blocks` (names by block id) and reads `blocks_down` (names
    in KV tiers by block id). Then it writes `blocks_up` (ids and bytes), and makes `block_copies` one after the other.

    Making a batch costs a few list comprehensions, whatever the contexts. Columns that derive from others, or never
    change, are made when a runner asks for them. Block tables are not copied: a table only grows at its end, and is
    replaced when it changes otherwise, so the part that the step needs is a snapshot.

    Args:
        seqs: the sequences by id, in batch order.
        num_scheduled_tokens: number of tokens of each sequence; the batch keeps the list.
        columns: columns of these sequences, if they exist already.
        The others: see the class.
    """

    def __init__(
        self,
        seqs: dict[int, Sequence],
        num_scheduled_tokens: list[int],
        total_tokens_num: int,
        total_tokens_num_prefill: int = 0,
        total_tokens_num_decode: int = 0,
        total_seqs_num: int = 0,
        total_seqs_num_prefill: int = 0,
        total_seqs_num_decode: int = 0,
        is_dummy_run: bool = False,
        num_spec_step: int = 0,
        scheduled_spec_decode_tokens: dict[int, list[int]] | None = None,
        columns: SequenceColumns | None = None,
        block_copies: list[BlockCopy] | None = None,
    ) -> None:
        # Constants of the sequences; the same object while the sequences are the same.
        self.columns = SequenceColumns(list(seqs.values())) if columns is None else columns
        rows = self.columns.rows
        self.req_ids = self.columns.ids
        self.num_scheduled_tokens = num_scheduled_tokens
        self.scheduled_spec_decode_tokens = scheduled_spec_decode_tokens or {}
        self.drafts_in_flight: dict[int, int] = {}
        self.drafts_wanted: dict[int, int] = {}
        self._num_slots: dict[int, int] = {}
        self.feeds_draft_model = False
        self.next_token_ids: dict[int, int] = {}
        self.digested_blocks: dict[int, bytes] = {}
        self.block_copies = block_copies or []
        self.blocks_down: Mapping[int, tuple[bytes, bytes]] = {}
        self.blocks_up: list[tuple[int, bytes]] = []
        self.num_computed_tokens = [s.num_computed_tokens + s.num_inflight_tokens for s in rows]
        # True if every row is a decoded token or a draft.
        self.is_decode = total_seqs_num_decode == len(rows)
        # True if every row is a decoded token.
        self.is_plain_decode = self.is_decode and len(rows) == total_tokens_num and num_spec_step == 0
        if self.is_decode:
            self._take_decodes(rows)
        else:
            self._take_rows(rows)
        # The sequences' own tables: they may be longer than the step needs, and may grow.
        self.tables = [s.block_table for s in rows]
        self.block_size = rows[0].block_size if rows else 1
        self.num_cached_tokens = self.columns.num_cached_tokens
        # Histories of the sampled sequences whose logits are changed, by index.
        self.histories = {
            i: TokenHistory.of(s)
            for i, s in self.columns.steered
            if len(s.token_ids) + s.num_placeholder < s.steered_until and self.is_final[i]
        }
        self.total_tokens_num = total_tokens_num
        self.total_tokens_num_prefill = total_tokens_num_prefill
        self.total_tokens_num_decode = total_tokens_num_decode
        self.total_seqs_num = total_seqs_num
        self.total_seqs_num_prefill = total_seqs_num_prefill
        self.total_seqs_num_decode = total_seqs_num_decode
        self.is_dummy_run = is_dummy_run
        self.num_spec_step = num_spec_step

    def want_drafts(self, wanted: dict[int, int]) -> None:
        """Sets `drafts_wanted`, and notes how many tokens those sequences have slots for."""
        self.drafts_wanted = wanted
        rows = zip(self.columns.rows, self.tables, strict=True)
        # Noted now: before the launch a table may grow by blocks that another sequence of this step still uses. It may
        # also have slots beyond the model's last position.
        size = self.block_size
        self._num_slots = {s.id: min(len(table) * size, s.length_limit) for s, table in rows if s.id in wanted}

    def num_slots(self, i: int) -> int:
        """Most tokens that row i may have when the runner drafts behind it: slots of its table, or its length limit."""
        return self._num_slots[self.req_ids[i]]

    def fields(self) -> dict[str, Any]:
        """The snapshot without columns, tables and histories, as lists and numbers."""
        tokens = "_last_tokens" if self.is_plain_decode else "scheduled_tokens"
        return {name: getattr(self, name) for name in (tokens, *_FIELDS)}

    @classmethod
    def restored(
        cls,
        columns: SequenceColumns,
        tables: list[list[int]],
        histories: dict[int, TokenHistory],
        fields: dict[str, Any],
    ) -> ScheduledBatch:
        """The batch that these parts were taken from, in another process."""
        batch = cls.__new__(cls)
        vars(batch).update(fields)
        batch.columns, batch.tables, batch.histories = columns, tables, histories
        batch.req_ids, batch.num_cached_tokens = columns.ids, columns.num_cached_tokens
        return batch

    def _take_decodes(self, rows: list[Sequence]) -> None:
        """Sets the columns of a step that only decodes."""
        self.is_final = [True] * len(rows)
        self._last_tokens = [s.token_ids[-1] for s in rows]
        self.from_last_output = [s.num_placeholder > 0 for s in rows]
        self.targets: dict[int, list[int]] = {}

    def _take_rows(self, rows: list[Sequence]) -> None:
        """Sets the columns of a step with prompts."""
        spans = list(zip(rows, self.num_computed_tokens, self.context_lens, strict=True))
        drafts = self.scheduled_spec_decode_tokens
        self.scheduled_tokens = [
            s.token_ids[start:end] + drafts.get(s.id, []) if start < len(s.token_ids) else [] for s, start, end in spans
        ]
        self.from_last_output = [start >= len(s.token_ids) for s, start, _ in spans]
        self.is_final = [end >= len(s.token_ids) + s.num_placeholder for s, _, end in spans]
        asked = {i: self._targets(*spans[i]) for i in self.columns.logprob_params}
        self.targets = {i: targets for i, targets in asked.items() if targets}

    @staticmethod
    def _targets(seq: Sequence, start: int, end: int) -> list[int]:
        """Given tokens after the rows [start, end) of a sequence, if their logprobs are wanted."""
        if seq.logprobs_from > seq.num_given_tokens:
            return []
        return seq.token_ids[max(start + 1, int(seq.logprobs_from)) : min(end + 1, seq.num_given_tokens)]

    @cached_property
    def context_lens(self) -> list[int]:
        """Context length of each sequence's last row, itself included."""
        return list(map(add, self.num_computed_tokens, self.num_scheduled_tokens))

    @cached_property
    def scheduled_tokens(self) -> list[list[int]]:
        """Tokens that each sequence computes; empty if its newest token is in flight."""
        drafts = self.scheduled_spec_decode_tokens
        rows = zip(self.req_ids, self._last_tokens, self.from_last_output, strict=True)
        return [[] if late else [token, *drafts.get(seq_id, ())] for seq_id, token, late in rows]

    @cached_property
    def last_block_num_tokens(self) -> list[int]:
        """Tokens in the last block of each context."""
        return [(end - 1) % self.block_size + 1 for end in self.context_lens]

    @cached_property
    def block_tables(self) -> list[list[int]]:
        """The blocks of each context, in order."""
        size = self.block_size
        return [table[: -(-end // size)] for table, end in zip(self.tables, self.context_lens, strict=True)]

    @property
    def sampling(self) -> SampleArrays:
        """Parameters by which the sequences are sampled; the same object while the sequences are the same."""
        return self.columns.sampling

    @property
    def temperatures(self) -> list[float]:
        """Temperature of each sequence; 0 is greedy."""
        return [float(each) for each in self.sampling.temperature]

    @property
    def is_greedy(self) -> bool:
        """True if every row takes its most likely token, and no logits are changed, digested or reported."""
        is_greedy = self.columns.is_greedy and not self.columns.samples_logprobs
        return is_greedy and not self.histories and not self.digested

    @cached_property
    def digested(self) -> list[int]:
        """Indices of the sampled sequences whose logits the step may digest."""
        rows = self.columns.digested
        return [i for i in rows if self.is_final[i] and self._may_digest(i)] if rows else []

    def _may_digest(self, i: int) -> bool:
        end = self.context_lens[i]
        first = end - len(self.scheduled_spec_decode_tokens.get(self.req_ids[i], ()))
        return any(self.is_digested(i, position) for position in range(first, end + 1))

    def is_digested(self, i: int, position: int) -> bool:
        """True if the logits are digested from which row i draws its token at an absolute position."""
        every, begin = self.columns.digested.get(i, (0, 0))
        return every > 0 and (position - begin) % every == 0

    @cached_property
    def pooled(self) -> dict[int, Pooling]:
        """Pooling of the sequences whose hidden states the step returns, by index; a mean needs every chunk."""
        return {i: pooling for i, pooling in self.columns.poolings.items() if pooling == MEAN or self.is_final[i]}

    @property
    def only_pools(self) -> bool:
        """True if the step samples no token: it reaches the last token of embedded sequences only."""
        poolings = self.columns.poolings
        return bool(poolings) and all(i in poolings for i, final in enumerate(self.is_final) if final)

    @property
    def known_token_ids(self) -> list[int]:
        """Tokens of all rows in order, with 0 for each that the runner's last step samples."""
        if self.is_plain_decode:
            return self._last_tokens
        rows = zip(self.scheduled_tokens, self.num_scheduled_tokens, strict=True)
        return list(chain.from_iterable(tokens or [0] * count for tokens, count in rows))

    @property
    def late_rows(self) -> list[int]:
        """Indices of the sequences whose newest token the runner's last step samples."""
        return [i for i, late in enumerate(self.from_last_output) if late]

    def input_tokens(self, last_output: ScheduledBatchOutput) -> list[list[int]]:
        """`scheduled_tokens`, completed by the tokens that the runner's last step has sampled."""
        if not any(self.from_last_output):
            return self.scheduled_tokens
        rows = enumerate(zip(self.scheduled_tokens, self.from_last_output, strict=True))
        return [self._late_tokens(i, last_output) if late else tokens for i, (tokens, late) in rows]

    def _late_tokens(self, i: int, last_output: ScheduledBatchOutput) -> list[int]:
        """The token that the runner's last step has sampled for a sequence, and the drafts that it made behind it."""
        seq_id, count = self.req_ids[i], self.num_scheduled_tokens[i] - 1
        drafts = (last_output.draft_token_ids or {}).get(seq_id, [])[:count]
        return [last_output.token_ids[seq_id][-1], *drafts, *[0] * (count - len(drafts))]

    def token_histories(self, last_output: ScheduledBatchOutput) -> dict[int, TokenHistory]:
        """`histories`, completed by the tokens that the runner's last step has sampled."""
        return {
            i: history.with_token(last_output.token_ids[self.req_ids[i]][-1]) if self.from_last_output[i] else history
            for i, history in self.histories.items()
        }


@dataclass
class ScheduledBatchOutput:
    """Output of one step, by sequence. A field is None without any entries.

    Attributes:
        token_ids: tokens of each sequence with a final row, in batch order. All but the last are accepted drafts. A
            row whose logits are no numbers gives NO_TOKEN, which ends its sequence.
        draft_token_ids: drafts for the next step.
        logit_digests: digests of logits, by absolute position of the token drawn from them.
        logprobs: a row (common/wire/logprob_rows.py) for each token; that of NO_TOKEN has no meaning.
        target_logprobs: rows of `ScheduledBatch.targets`.
        kv_digests: names and digests of `ScheduledBatch.digested_blocks`.
        pooled: hidden states of `ScheduledBatch.pooled` (worker/engine/pooling.py); the tokens of these sequences have
            no meaning.
        constraint_ends: sequences whose grammar ends behind their tokens: "" if it is complete, or why it cannot
            continue. If only the draw of a further token shows it, that token is NO_TOKEN.
        forced_token_ids: an absolute position, and the tokens that a grammar probably forces from there on.
        slow_constraints: CPU seconds of slow masks.
        blocks_down: names, names of the blocks before, and bytes of `ScheduledBatch.blocks_down`.
    """

    token_ids: dict[int, tuple[int, ...]]
    draft_token_ids: dict[int, list[int]] | None = None
    logit_digests: dict[int, dict[int, int]] | None = None
    logprobs: dict[int, bytes] | None = None
    target_logprobs: dict[int, bytes] | None = None
    kv_digests: tuple[tuple[bytes, int], ...] | None = None
    pooled: dict[int, bytes] | None = None
    constraint_ends: dict[int, str] | None = None
    forced_token_ids: dict[int, tuple[int, list[int]]] | None = None
    slow_constraints: dict[int, float] | None = None
    blocks_down: list[tuple[bytes, bytes, bytes]] | None = None

    @property
    def req_ids(self) -> list[int]:
        """Ids of the sequences that have tokens."""
        return list(self.token_ids)


@dataclass
class StepResult:
    """Outputs of one engine step."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @cached_property
    def new_tokens(self) -> dict[int, tuple[int, ...]]:
        """New tokens of the sequences that have any."""
        return {out.request_id: tuple(out.output_tokens) for out in self.outputs if out.output_tokens}

    @cached_property
    def finished(self) -> list[int]:
        """Ids of the sequences that have ended."""
        return [out.request_id for out in self.outputs if out.finished]


class Runner(Protocol):
    """Model runner, or a simulation of it. Keeps its last output for `ScheduledBatch.input_tokens`."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step."""
        ...
