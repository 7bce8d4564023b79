"""Measures how fast this worker computes prompts, and cuts chunks by it.

While anything decodes, prompt chunks get smaller behind a long context, so that a step takes no longer than one of a
prompt that begins.
"""

from __future__ import annotations

import math
from typing import Final

from worker.engine.batch import ScheduledBatch
from worker.engine.context_cost import ContextCost
from worker.engine.step import Step

# Weight of the newest step in the mean prefill speed.
_RATE_WEIGHT: Final = 0.25
# A step tells how fast prompts can be computed when it has this share of its budget or more: a smaller one is mostly
# overhead, and a router that took its speed for the worker's would refuse what can well be served.
_TELLING_SHARE: Final = 1 / 8
# A prompt gets this share of a step's tokens however long its context is, or it would take for ever.
_LEAST_CHUNK: Final = 1 / 64


class PrefillMeter:
    """Learns from steps that computed prompts.

    Args:
        max_num_batched_tokens: tokens of a full step.

    Attributes:
        last_prompt_latency: seconds of the last one that computed prompt tokens.
        rate: prompt tokens per second, weighted mean; 0 until a step has been large enough to tell.
        num_samples: steps that have been.
        context_cost: of prompt tokens behind a context.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self.last_prompt_latency = 0.0
        self.rate = 0.0
        self.num_samples = 0
        self.context_cost = ContextCost()

    def note(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Takes note of how long a batch took."""
        if batch.total_tokens_num_prefill == 0:
            return
        self.last_prompt_latency = duration_s
        if duration_s > 0:
            self._note_rate(batch.total_tokens_num_prefill, duration_s)
            self._note_contexts(batch, duration_s)

    def step_cost(self, *, has_decodes: bool) -> float:
        """Budget of the step's prompts: beside decodes as much as a full step of a prompt that begins."""
        return self.context_cost.of(0, self._max_tokens) if has_decodes else math.inf

    def cut(self, step: Step, start: int, num_tokens: int) -> int:
        """Number of a prompt's next `num_tokens`, from `start` on, that the step can afford."""
        affordable = self.context_cost.most_tokens(start, num_tokens, step.prefill_cost)
        if step.num_prefill_seqs:
            return affordable
        return max(affordable, min(num_tokens, math.ceil(_LEAST_CHUNK * self._max_tokens)))

    def _note_contexts(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Prompts are behind the decodes in their batch."""
        first = len(batch.num_scheduled_tokens) - batch.total_seqs_num_prefill
        rows = list(zip(batch.num_computed_tokens[first:], batch.num_scheduled_tokens[first:], strict=True))
        cost = sum(self.context_cost.of(start, num_tokens) for start, num_tokens in rows)
        if cost >= _TELLING_SHARE * self._max_tokens:
            num_pairs = sum(n * start + n * (n + 1) // 2 for start, n in rows)
            self.context_cost.note(batch.total_tokens_num_prefill, num_pairs, duration_s)

    def _note_rate(self, num_tokens: int, duration_s: float) -> None:
        """A small step may show that the worker is faster than was thought, but never that it is slower."""
        rate = num_tokens / duration_s
        is_telling = num_tokens >= _TELLING_SHARE * self._max_tokens
        self.num_samples += is_telling
        if is_telling or 0 < self.rate < rate:
            self.rate += (rate - self.rate) * (_RATE_WEIGHT if self.rate else 1.0)
