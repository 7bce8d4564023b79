"""A step while the scheduler fills it: sequences are added while there is budget, then it becomes a ScheduledBatch."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Final, Protocol

from common.config import MIXED, Config
from common.errors import InvalidFieldError
from common.limits import PREFILL_SHARE
from worker.engine.batch import BlockCopy, ScheduledBatch, SequenceColumns
from worker.engine.executor import TimedOutput
from worker.engine.prefix_cache import Fronts
from worker.engine.sequence import Sequence, SequenceType
from worker.engine.sequence_ledger import StepAccount
from worker.engine.step_record import StepRecord

_PREFILL: Final = SequenceType.PREFILL
_DECODE: Final = SequenceType.DECODE


class StepTimes(Protocol):
    """Times of the step that ended last.

    Attributes:
        prompts_s: seconds that its prompts took.
        usual_s: seconds that such a step usually takes, 0 if unknown.
    """

    prompts_s: float
    usual_s: float


class StepLimits:
    """Bounds of every step.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt and answer.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of a step.
        min_prefill_tokens: tokens of a step that decodes leave to a waiting prompt (policy `mixed`).
        max_consecutive_prefill_steps: steps with prompts after which the decodes get one (policy `prefill_first`).
        mtp_k: most drafts of a sequence in a step; 0 without speculation.
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

    def chunk(self, remaining: int, budget: int) -> int:
        """Number of a prompt's `remaining` tokens that a step with `budget` tokens left computes.

        Without mixed steps a prompt is cut only if it is longer than any step.
        """
        if remaining <= budget:
            return remaining
        return budget if self.mixes or remaining > self.max_num_batched_tokens else 0


class Step:
    """Sequences and tokens of the step that the scheduler fills; kept while the step is in flight.

    Attributes:
        budget: tokens that the step still has room for.
        prefill_cost: cost that its prompts may still have (ContextCost).
        seqs: its sequences so far, by id.
        columns: of all its sequences, if they are those of the last step.
        drafts: tokens to verify, by sequence.
        num_spec_step: largest number of drafts of a sequence.
        forced: sequences whose drafts are text that grammars force.
        computing: hashes of the blocks that its prefills compute.
        fronts: the first of those blocks of each prompt.
        preempted: ids of sequences that have lost their blocks for it.
        block_copies: blocks that it copies before it computes.
        batch: what the model runner computes, from `build` on.
        result: what the model runner gives, once EngineCore has submitted the batch.
        record: of the flight recorder, from then on.
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
        self.preempted: list[int] = []
        self.block_copies: list[BlockCopy] = []
        self.batch: ScheduledBatch
        self.result: Future[TimedOutput]
        self.record: StepRecord

    @property
    def has_preempted(self) -> bool:
        """True if a sequence has lost its blocks for it."""
        return bool(self.preempted)

    def add(self, seq: Sequence, num_tokens: int, kind: SequenceType) -> None:
        """Adds the next `num_tokens` of `seq`."""
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
        """Adds one token of each sequence to an empty step."""
        self.columns = columns
        self.seqs = columns.by_id
        self.num_scheduled_tokens = [1] * len(columns.rows)
        self.budget -= len(columns.rows)

    def prompts(self) -> list[tuple[Sequence, int]]:
        """Sequences whose prompts the step computes, and the number of tokens of each."""
        if not self.num_prefill_seqs:
            return []
        first = len(self.seqs) - self.num_prefill_seqs
        return [*zip([*self.seqs.values()][first:], self.num_scheduled_tokens[first:], strict=True)]

    def account(self, account: StepAccount, duration_s: float, meter: StepTimes, now: float) -> None:
        """Divides the step's duration, which `meter` has noted, among its sequences."""
        batch = self.batch
        num_decodes, num_tokens = batch.total_seqs_num_decode, batch.total_tokens_num_decode
        prompts_s = account.end_step(now, duration_s, meter.prompts_s, num_decodes, num_tokens, meter.usual_s)
        for seq, num_tokens in self.prompts():
            account.add_prompt(seq.ledger, prompts_s * num_tokens / self.num_prefill_tokens)

    def decodes(self) -> list[Sequence]:
        """Sequences that the step decodes. In a step they precede the prompts."""
        if self.columns is not None:
            return self.columns.rows
        return list(self.seqs.values())[: len(self.seqs) - self.num_prefill_seqs]

    def verify(self, drafts: dict[int, list[int]]) -> None:
        """Adds drafts behind the tokens of sequences that the step decodes."""
        self.drafts = drafts
        rows = zip(self.num_scheduled_tokens, self.seqs, strict=True)
        self.num_scheduled_tokens = [num + len(drafts.get(seq_id, ())) for num, seq_id in rows]
        counts = list(map(len, drafts.values()))
        self.num_spec_step = max(counts)
        self.budget -= sum(counts)

    def build(self) -> ScheduledBatch:
        """Makes the batch, a snapshot for the model runner."""
        total = sum(self.num_scheduled_tokens)
        self.batch = ScheduledBatch(
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
        return self.batch

    def count_in_flight(self, batch: ScheduledBatch, now: float) -> list[Sequence]:
        """Counts the step's tokens as in flight on its sequences, so that the next step continues behind them.

        Returns:
            Sequences of a step with prompts whose last known token this step computes.
        """
        if self.columns is not None:
            for seq in self.columns.rows:
                seq.num_inflight_tokens += 1
                seq.num_placeholder += 1
                seq.type = _DECODE
            for seq_id, drafts in self.drafts.items():
                self.seqs[seq_id].num_inflight_tokens += len(drafts)
            return []
        reached: list[Sequence] = []
        for seq, num_tokens, final in zip(self.seqs.values(), batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens += num_tokens
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
            if final:
                seq.num_placeholder += 1
                reached.append(seq)
        return reached
