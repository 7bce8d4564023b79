"""Measures how fast this worker computes prompts, and sizes prompt chunks by it.

While any sequence decodes, a step with prompts may take a bounded time, a *slice*. So no gap in a stream is longer than
a slice, however long another request's prompt is. The prompts' part of a step is its duration minus that of a usual
decode step, since both read the weights once.
"""

from __future__ import annotations

import math
from typing import Final

from worker.engine.batch import ScheduledBatch
from worker.engine.step import Step

# Weight of the newest value in a mean.
_NEWEST: Final = 0.25
# A step counts for the speed of prompts if their cost is at least this share of its budget. A smaller step is mostly
# overhead: a router that took its speed for the worker's would refuse requests that the worker can serve.
_TELLING_SHARE: Final = 1 / 8
# A prompt gets this share of a step's tokens however long its context is, or it would take for ever.
_LEAST_CHUNK: Final = 1 / 64
# A slice is at least as long as this number of usual decode steps. Each step with prompts also takes the time of a
# decode step, so shorter slices would slow down prompts and hardly shorten the gaps.
_SLICE_STEPS: Final = 5
# A value counts as at most this multiple of the mean: a step may have been interrupted.
_MOST_SLOWDOWN: Final = 2.0
# Least share of a step's duration that counts for its prompts: its decodes may have been faster than usual.
_LEAST_SHARE: Final = 1 / 8

# Attention to 64 tokens costs as much as all of a layer's products only in models far smaller than any that is served.
_MAX_WEIGHT: Final = 1 / 64
# Below this weight, a million tokens of context cost less than one token.
_MIN_WEIGHT: Final = 1e-6


class ContextCost:
    """Cost of prompt tokens behind a context.

    A token takes one share of the matrix products, whatever precedes it, and attention to every token before it. So a
    chunk of a fixed number of tokens takes ever longer as a long prompt proceeds, and decodes beside it wait ever
    longer for their next token. The unit is one token without a context: `n` tokens behind `start` others cost
    `n + weight * (n * start + n * n / 2)`. The weight is the slope of a straight line through the seconds per token
    at contexts of different lengths. Each power of two has one point, so that a long run of one kind of work leaves
    the others as they are.

    Attributes:
        weight: cost of attention to one token, as a share of a token's other cost; 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        # Mean context and mean seconds per token, by the power of two of the context.
        self._points: dict[int, tuple[float, float]] = {}

    def note(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Updates the weight by one step.

        Args:
            num_tokens: prompt tokens of the step.
            num_pairs: pairs of a prompt token and a token that it attends to.
            seconds: duration of the prompts' part of the step.
        """
        if num_tokens <= 0 or seconds <= 0:
            return
        context, per_token = num_pairs / num_tokens, seconds / num_tokens
        place = int(context).bit_length()
        if place in self._points:
            mean_context, mean = self._points[place]
            context = mean_context + _NEWEST * (context - mean_context)
            per_token = _mean(mean, per_token)
        self._points[place] = context, per_token
        self.weight = self._slope()

    def of(self, start: int, num_tokens: int) -> float:
        """Cost of `num_tokens` tokens behind `start` others."""
        return num_tokens + self.weight * (num_tokens * start + num_tokens * num_tokens / 2)

    def most_tokens(self, start: int, wanted: int, cost: float) -> int:
        """Number of `wanted` tokens behind `start` others that cost at most `cost`."""
        # Sums in another order differ by rounding, which must not cut a token.
        cost *= 1 + 1e-9
        if self.of(start, wanted) <= cost:
            return wanted
        each = 1 + self.weight * start
        return max(0, int(2 * cost / (each + math.sqrt(each * each + 2 * self.weight * max(0.0, cost)))))

    def _slope(self) -> float:
        """Slope of the line with the least relative errors, as a share of the line's value without a context."""
        points = [(1 / seconds, context / seconds) for context, seconds in self._points.values()]
        xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
        x, y = (sum(p[i] for p in points) for i in (0, 1))
        begin, slope = yy * x - xy * y, xx * y - xy * x
        if len(points) < 2 or slope <= 0:
            return 0.0
        weight = slope / begin if begin > 0 else _MAX_WEIGHT
        return 0.0 if weight < _MIN_WEIGHT else min(weight, _MAX_WEIGHT)


class PrefillMeter:
    """Measures steps that compute prompts.

    Args:
        max_num_batched_tokens: tokens of a full step.
        slice_s: longest step with prompts while any sequence decodes, seconds; 0 bounds steps by tokens alone.

    Attributes:
        last_prompt_latency: seconds of the last step that computed prompt tokens.
        prompts_s: seconds that the last step took for its prompts; 0 without prompts.
        usual_s: seconds that such a step usually takes; 0 if unknown.
        rate: prompt tokens per second, weighted mean; 0 until a step was large enough to measure it.
        num_samples: number of steps that were large enough.
        context_cost: cost of prompt tokens behind a context.
    """

    def __init__(self, max_num_batched_tokens: int, slice_s: float = 0.0) -> None:
        self._max_tokens = max_num_batched_tokens
        self._slice_s = slice_s
        # Mean seconds of a step without prompts, and mean seconds per unit of prompt cost (ContextCost).
        self._decode_s = 0.0
        self._unit_s = 0.0
        self.last_prompt_latency = 0.0
        self.prompts_s = self.usual_s = 0.0
        self.rate = 0.0
        self.num_samples = 0
        self.context_cost = ContextCost()

    def note(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Updates the means by one batch and its duration."""
        self.prompts_s = self.usual_s = 0.0
        if batch.total_tokens_num_prefill == 0:
            if batch.total_tokens_num_decode:
                self.usual_s = self._decode_s
                self._decode_s = _mean(self._decode_s, duration_s)
            return
        self.last_prompt_latency = duration_s
        if duration_s > 0:
            has_decodes = batch.total_tokens_num_decode > 0
            prompts_s = max(duration_s - self._decode_s, _LEAST_SHARE * duration_s) if has_decodes else duration_s
            self.prompts_s = prompts_s
            # In a batch, the prompts follow the decodes.
            first = len(batch.num_scheduled_tokens) - batch.total_seqs_num_prefill
            rows = list(zip(batch.num_computed_tokens[first:], batch.num_scheduled_tokens[first:], strict=True))
            cost = sum(self.context_cost.of(start, num_tokens) for start, num_tokens in rows)
            self.usual_s = self._unit_s and cost * self._unit_s + has_decodes * self._decode_s
            is_telling = cost >= _TELLING_SHARE * self.step_cost(has_decodes=has_decodes, most=self._max_tokens)
            self._note_rate(batch.total_tokens_num_prefill, duration_s, is_telling=is_telling)
            self._note_cost(cost, prompts_s, is_telling=is_telling)
            if is_telling:
                num_pairs = sum(n * start + n * (n + 1) // 2 for start, n in rows)
                self.context_cost.note(batch.total_tokens_num_prefill, num_pairs, prompts_s)

    def step_cost(self, *, has_decodes: bool, most: float = math.inf) -> float:
        """Cost budget of the step's prompts: `most` without decodes, else the cost that fits into a slice.

        With decodes, the budget is at most the cost of a full step at the start of a prompt.
        """
        if not has_decodes:
            return most
        full = self.context_cost.of(0, self._max_tokens)
        if self._slice_s == 0:
            return full
        if self._unit_s == 0:
            # No cost is measured yet: a step with this budget is large enough to measure it.
            return _TELLING_SHARE * full
        longest_s = max(self._slice_s, _SLICE_STEPS * self._decode_s)
        return min(full, (longest_s - self._decode_s) / self._unit_s)

    def cut(self, step: Step, start: int, num_tokens: int) -> int:
        """Number of a prompt's next `num_tokens`, from `start` on, that the step can afford."""
        affordable = self.context_cost.most_tokens(start, num_tokens, step.prefill_cost)
        if step.num_prefill_seqs:
            return affordable
        return max(affordable, min(num_tokens, math.ceil(_LEAST_CHUNK * self._max_tokens)))

    def _note_cost(self, cost: float, seconds: float, *, is_telling: bool) -> None:
        """Updates the mean seconds per unit of cost; a step that is not telling can only lower it."""
        if is_telling or seconds < cost * self._unit_s:
            self._unit_s = _mean(self._unit_s, seconds / cost)

    def _note_rate(self, num_tokens: int, duration_s: float, *, is_telling: bool) -> None:
        """Updates the prompt tokens per second; a step that is not telling can only raise them."""
        rate = num_tokens / duration_s
        self.num_samples += is_telling
        if is_telling or 0 < self.rate < rate:
            self.rate += (rate - self.rate) * (_NEWEST if self.rate else 1.0)


def _mean(mean: float, newest: float) -> float:
    """Weighted mean after the value `newest`; a `mean` of 0 has no values yet."""
    return mean + _NEWEST * (min(newest, _MOST_SLOWDOWN * mean) - mean) if mean else newest
