"""A step in the making: rows are added while there is budget, then it becomes a ScheduledBatch."""

from __future__ import annotations

from typing import Final, TypeAlias

from common.config import MIXED, Config
from common.errors import InvalidFieldError
from common.limits import PREFILL_SHARE
from worker.engine.batch import BlockCopy, ScheduledBatch, SequenceColumns
from worker.engine.sequence import Sequence, SequenceType

# Hashes of blocks, and tails, that running prompts compute next, by their place in the prompt.
Fronts: TypeAlias = dict[int, set[int]]

_PREFILL: Final = SequenceType.PREFILL
_DECODE: Final = SequenceType.DECODE


class StepLimits:
    """Bounds of every step.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt and answer.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step.
        min_prefill_tokens: of those, the share that decodes leave to a prompt that waits (policy `mixed`).
        max_consecutive_prefill_steps: after so many the running sequences get a step (policy `prefill_first`).
        mtp_k: most drafts of a sequence and step; 0 without speculation.
        mixes: True if prompts and decodes share steps.

    Raises:
        InvalidFieldError: the pool cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(self, config: Config) -> None:
        pool_tokens = config.num_kvcache_blocks * config.kv_cache_block_size
        self.max_model_len = config.max_model_len or pool_tokens
        if pool_tokens < self.max_model_len:
            raise InvalidFieldError(
                "num_kvcache_blocks",
                f"is {config.num_kvcache_blocks}, which holds {pool_tokens} tokens",
                f"enough for max_model_len {self.max_model_len}",
            )
        spec = config.speculative_config
        self.mtp_k = spec.num_speculative_tokens if spec is not None else 0
        # More could never run in one step.
        self.max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.min_prefill_tokens = int(PREFILL_SHARE * config.max_num_batched_tokens)
        self.max_consecutive_prefill_steps = config.max_consecutive_prefill_steps
        self.mixes = config.scheduling_policy == MIXED


class Step:
    """A batch in the making.

    Attributes:
        budget: tokens that it has room for.
        prefill_cost: what its prompts may still cost (ContextCost).
        seqs: its rows so far, by id.
        columns: of all rows, when they are those of the last step.
        drafts: tokens to verify, by sequence.
        num_spec_step: most of them behind a sequence.
        forced: the sequences whose drafts are text that grammars force.
        computing: hashes of the blocks that its prefills compute.
        fronts: the first of those blocks of each prompt.
        has_preempted: True if a sequence has lost its blocks for it.
        block_copies: what it copies before it computes.
    """

    def __init__(self, budget: int, prefill_cost: float) -> None:
        self.budget = budget
        self.prefill_cost = prefill_cost
        self.seqs: dict[int, Sequence] = {}
        self.num_scheduled_tokens: list[int] = []
        self.columns: SequenceColumns | None = None
        self.num_prefill_seqs = 0
        self.num_prefill_tokens = 0
        self.drafts: dict[int, list[int]] = {}
        self.num_spec_step = 0
        self.forced: set[int] = set()
        self.computing: set[int] = set()
        self.fronts: Fronts = {}
        self.has_preempted = False
        self.block_copies: list[BlockCopy] = []

    def add(self, seq: Sequence, num_tokens: int, kind: SequenceType) -> None:
        """Lets the step compute the next `num_tokens` of `seq`."""
        seq.type = kind
        if self.columns is not None:
            for decoding in self.columns.rows:
                decoding.type = _DECODE
            self.columns, self.seqs = None, dict(self.seqs)
        self.seqs[seq.id] = seq
        self.num_scheduled_tokens.append(num_tokens)
        self.budget -= num_tokens
        if kind is _PREFILL:
            self.num_prefill_seqs += 1
            self.num_prefill_tokens += num_tokens

    def add_decodes(self, columns: SequenceColumns) -> None:
        """Lets a step that is empty so far compute one token of each."""
        self.columns = columns
        self.seqs = columns.by_id
        self.num_scheduled_tokens = [1] * len(columns.rows)
        self.budget -= len(columns.rows)

    def decodes(self) -> list[Sequence]:
        """Rows of one token each so far, behind which drafts may stand; they are in front of prompts."""
        if self.columns is not None:
            return self.columns.rows
        return list(self.seqs.values())[: len(self.seqs) - self.num_prefill_seqs]

    def verify(self, drafts: dict[int, list[int]]) -> None:
        """Lets the step verify drafts of sequences that it decodes."""
        self.drafts = drafts
        rows = zip(self.num_scheduled_tokens, self.seqs, strict=True)
        self.num_scheduled_tokens = [num + len(drafts.get(seq_id, ())) for num, seq_id in rows]
        counts = list(map(len, drafts.values()))
        self.num_spec_step = max(counts)
        self.budget -= sum(counts)

    def build(self) -> ScheduledBatch:
        """The batch, a snapshot of everything."""
        total = sum(self.num_scheduled_tokens)
        return ScheduledBatch(
            self.seqs,
            self.num_scheduled_tokens,
            total,
            total_tokens_num_prefill=self.num_prefill_tokens,
            total_tokens_num_decode=total - self.num_prefill_tokens,
            total_seqs_num=len(self.seqs),
            total_seqs_num_prefill=self.num_prefill_seqs,
            total_seqs_num_decode=len(self.seqs) - self.num_prefill_seqs,
            num_spec_step=self.num_spec_step,
            scheduled_spec_decode_tokens=self.drafts,
            columns=self.columns,
            block_copies=self.block_copies,
        )
