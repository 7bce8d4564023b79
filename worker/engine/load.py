"""Load of an engine, by which routers place requests."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.lifecycle import Lifecycle
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.step import StepLimits


@dataclass(frozen=True)
class EngineLoad:
    """Load of a worker, for the router's delay gate and placement.

    Attributes:
        decoding_seqs: running sequences whose prompt is computed.
        waiting_seqs: gated and waiting sequences.
        waiting_tokens: tokens to compute before every sequence decodes, without cache hits.
        room_tokens: further prompt tokens that fit the next prefill; under `mixed` beside the decodes.
        room_seqs: further sequences that may run.
        free_blocks: KV blocks that are free or can be evicted.
        total_blocks: all KV blocks.
        last_prompt_latency_s: duration of the last step that computed prompt tokens, seconds.
        prefill_rate: prompt tokens per second, weighted mean; 0 until a step was large enough to measure it.
        prefill_samples: number of steps that were large enough.
    """

    decoding_seqs: int
    waiting_seqs: int
    waiting_tokens: int
    room_tokens: int
    room_seqs: int
    free_blocks: int
    total_blocks: int
    last_prompt_latency_s: float
    prefill_rate: float
    prefill_samples: int = 0


def load_report(limits: StepLimits, lifecycle: Lifecycle, meter: PrefillMeter) -> EngineLoad:
    """The current load; O(1) apart from unfinished prefills."""
    gated, waiting, blocks = lifecycle.gated, lifecycle.waiting, lifecycle.block_manager
    waiting_seqs = len(gated) + len(waiting)
    waiting_tokens = gated.num_tokens + waiting.num_tokens + lifecycle.unfinished_tokens
    decodes = lifecycle.num_decoding * (limits.mtp_k + 1) if limits.mixes else 0
    budget = max(limits.min_prefill_tokens, limits.max_num_batched_tokens - decodes)
    return EngineLoad(
        decoding_seqs=lifecycle.num_decoding,
        waiting_seqs=waiting_seqs,
        waiting_tokens=waiting_tokens,
        room_tokens=max(0, budget - waiting_tokens),
        room_seqs=max(0, limits.max_num_seqs - len(lifecycle.running) - waiting_seqs),
        free_blocks=blocks.num_free_blocks,
        total_blocks=blocks.num_blocks,
        last_prompt_latency_s=meter.last_prompt_latency,
        prefill_rate=meter.rate,
        prefill_samples=meter.num_samples,
    )
