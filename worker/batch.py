"""What passes between scheduler, model runner and stream (seed 001 sections 2 and 5.4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.sampling_params import SamplingParams
from worker.sequence import EndReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What penalties and the min_tokens mask of one row derive from (rules: worker/steering.py).

    It is made anew from prompt and tokens in every step, so a sequence that was preempted, or that another worker has
    begun, goes on with the same penalties.

    Attributes:
        params: of the sequence.
        prompt_ids: int64, the prompt's ids, each once; empty when no repetition penalty asks for them.
        output_ids: the output so far.
    """

    params: SamplingParams
    prompt_ids: npt.NDArray[np.int64]
    output_ids: list[int]

    @classmethod
    def of(cls, seq: Sequence) -> TokenHistory:
        """A copy of the history of `seq`."""
        repetition = seq.sampling_params.repetition_penalty != 1.0
        prompt_ids = seq.distinct_prompt_ids if repetition else np.empty(0, np.int64)
        return cls(seq.sampling_params, prompt_ids, seq.completion_token_ids)

    def with_token(self, token_id: int) -> TokenHistory:
        """The history one token later."""
        return TokenHistory(self.params, self.prompt_ids, [*self.output_ids, token_id])


class ScheduledBatch:
    """One step's work: copies of all that the model runner needs, so later changes of a sequence do not reach it (T18).

    Sequence i computes `scheduled_tokens[i]` = `token_ids[num_computed_tokens[i] : context_lens[i]]`, with
    `context_lens[i] = num_computed_tokens[i] + num_scheduled_tokens[i]`. `is_final[i]` says that the step reaches the
    sequence's last token, so that its logits row is sampled; the rows of other chunks are not (T31).

    Draft tokens to be verified follow the last token, in `scheduled_tokens` too. Deferred output: a row with
    `from_last_output[i]` was scheduled before its one token was there; `scheduled_tokens[i]` is empty, and the runner
    takes the token from its last output (`input_tokens`). `num_computed_tokens` regards steps in flight as done.
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
    ) -> None:
        rows = list(seqs.values())
        self.req_ids = list(seqs)
        self.num_scheduled_tokens = list(num_scheduled_tokens)
        self.scheduled_spec_decode_tokens = dict(scheduled_spec_decode_tokens or {})
        self.num_computed_tokens = [s.num_computed_tokens + s.num_inflight_tokens for s in rows]
        self.context_lens = [start + n for start, n in zip(self.num_computed_tokens, num_scheduled_tokens, strict=True)]
        ends = list(zip(rows, self.context_lens, strict=True))
        starts = list(zip(rows, self.num_computed_tokens, strict=True))
        self.scheduled_tokens = [
            s.token_ids[start:end] for (s, start), end in zip(starts, self.context_lens, strict=True)
        ]
        if self.scheduled_spec_decode_tokens:
            drafts = [self.scheduled_spec_decode_tokens.get(seq_id, []) for seq_id in self.req_ids]
            self.scheduled_tokens = [t + more for t, more in zip(self.scheduled_tokens, drafts, strict=True)]
        self.from_last_output = [start >= len(s.token_ids) for s, start in starts]
        self.is_final = [end >= len(s.token_ids) + s.num_placeholder for s, end in ends]
        self.last_block_num_tokens = [(end - 1) % s.block_size + 1 for s, end in ends]
        self.block_tables = [list(s.block_table) for s in rows]
        self.num_cached_tokens = [s.num_cached_tokens for s in rows]
        self.temperatures = [s.sampling_params.temperature for s in rows]
        self.top_ks = [s.sampling_params.top_k for s in rows]
        self.top_ps = [s.sampling_params.top_p for s in rows]
        self.min_ps = [s.sampling_params.min_p for s in rows]
        self.seeds = [s.seed for s in rows]
        self.choices = [s.choice for s in rows]
        # By index i, of those sampled sequences whose logits it changes; nothing is copied of others.
        self.histories = {
            i: TokenHistory.of(s)
            for i, s in enumerate(rows)
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

    def input_tokens(self, last_output: ScheduledBatchOutput) -> list[list[int]]:
        """`scheduled_tokens` with the tokens that the runner's last step has sampled where they were missing."""
        if not any(self.from_last_output):
            return self.scheduled_tokens
        rows = zip(self.req_ids, self.scheduled_tokens, self.from_last_output, strict=True)
        return [[last_output.token_ids[seq_id][-1]] if late else tokens for seq_id, tokens, late in rows]

    def token_histories(self, last_output: ScheduledBatchOutput) -> dict[int, TokenHistory]:
        """`histories` with the tokens that the runner's last step has sampled where they were missing."""
        return {
            i: history.with_token(last_output.token_ids[self.req_ids[i]][-1]) if self.from_last_output[i] else history
            for i, history in self.histories.items()
        }


@dataclass
class ScheduledBatchOutput:
    """Sampled tokens of one step: for each sequence with a final row, the accepted tokens, in batch order.

    Of n drafts that were verified a sequence has accepted those in front of the last token: 0 to n. `draft_token_ids`
    are for its next step. `is_deferred_out` says that the next step was scheduled before this one's tokens had come;
    it replaces the seed's key -1 (T29).
    """

    token_ids: dict[int, tuple[int, ...]]
    draft_token_ids: dict[int, list[int]] | None = None
    is_deferred_out: bool = False

    @property
    def req_ids(self) -> list[int]:
        """Ids of the sequences that have tokens."""
        return list(self.token_ids)


@dataclass(slots=True)
class RequestOutput:
    """What one step did to one sequence, for the stream (seed 001 section 5.4).

    `finish_reason` keeps the guide's strings: `eos`, `max_tokens`, `stop_sequence`, `stop_{token_id}`, `aborted`.
    """

    request_id: int
    output_tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    end_reason: EndReason | None = None
    stop_token_id: int | None = None
    stop_token_sequence: list[int] | None = None


@dataclass
class StepResult:
    """What one engine step produced (seed 004 section 5.2), with the typed outputs beside it."""

    new_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class Runner(Protocol):
    """Executes batches: the model, or a simulation of it. Keeps its last output for `ScheduledBatch.input_tokens`."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step."""
        ...
