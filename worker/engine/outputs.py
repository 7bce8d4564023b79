"""Records that leave the engine: outputs of each sequence, totals and load.

A record holds copies, so that no live sequence is read on two threads. Outputs stay the same from the scheduler to the
frame that a router gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.telemetry import names
from common.telemetry.ledger import Ledger
from common.wire.draft_counts import Counts
from worker.engine.sequence import EndReason, Sequence
from worker.engine.sequence_ledger import PhaseStart, StepSums, TierWait


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Work of the engine while a sequence decoded, which explains the time.

    Attributes:
        steps: of the engine, including those without the sequence.
        tokens: output of these steps, of all sequences.
        preemptions: of the sequence, since it arrived.
        kv_usage: part of the KV blocks that others held when the sequence ended, 0 to 1.
        drafts: of the sequence, verified and accepted, by their position after a token.
    """

    steps: int
    tokens: int
    preemptions: int
    kv_usage: float
    drafts: tuple[Counts, ...] = ()

    def attributes(self) -> Mapping[str, int | float]:
        """For the span."""
        mean = round(self.tokens / max(1, self.steps), 2)
        said: dict[str, int | float] = {
            names.DECODE_STEPS: self.steps,
            names.DECODE_MEAN_BATCH: mean,
            names.DECODE_PREEMPTIONS: self.preemptions,
            names.ENGINE_KV_USAGE: round(self.kv_usage, 3),
        }
        if self.drafts:
            verified, accepted = map(sum, zip(*self.drafts, strict=True))
            said |= {names.DECODE_DRAFTS: verified, names.DECODE_ACCEPTED: accepted}
        return said


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """A sequence's timestamps on the worker, monotonic seconds; None for stages that were not reached.

    Attributes:
        decode: the engine's work while the sequence decoded, if known.
        preempted: times of its preemptions.
        tiers: its waits for KV tiers; None without any.
    """

    arrived: float
    first_scheduled: float | None
    first_token: float | None
    ended: float
    decode: DecodeWork | None = None
    preempted: tuple[float, ...] = ()
    tiers: TierWait | None = None

    def phases(self) -> list[tuple[str, float, float]]:
        """Name, start and end of queue, prefill and decode, as far as the sequence came."""
        starts = (self.arrived, self.first_scheduled, self.first_token)
        named = zip((names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN), starts, strict=True)
        reached = [(name, start) for name, start in named if start is not None]
        ends = [start for _, start in reached[1:]] + [self.ended]
        return [(name, start, end) for (name, start), end in zip(reached, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Start:
    """Facts about a sequence at its first token; durations in seconds."""

    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float

    @classmethod
    def of(cls, seq: Sequence) -> Start:
        """Start of a sequence whose first token was just appended."""
        scheduled = seq.arrive_time if seq.first_scheduled_time is None else seq.first_scheduled_time
        first_token = scheduled if seq.first_token_time is None else seq.first_token_time
        return cls(seq.num_prompt_tokens, seq.num_cached_tokens, scheduled - seq.arrive_time, first_token - scheduled)


@dataclass(frozen=True, slots=True)
class End:
    """Why a sequence ended, and its number of tokens, prompt included.

    `times` and `ledger` are None if the engine never had it. The ledger of an ended sequence does not change.
    """

    end_pos: int
    reason: EndReason
    stop_token_id: int | None = None
    stop_token_sequence: tuple[int, ...] | None = None
    message: str = ""
    times: SequenceTimes | None = None
    ledger: Ledger | None = None


@dataclass(frozen=True, slots=True)
class GivenLogprobs:
    """Logprob rows (common/wire/logprob_rows.py), `width` bytes each, of given tokens from position `first_pos` on."""

    first_pos: int
    width: int
    rows: bytes


@dataclass(slots=True)
class RequestOutput:
    """Effect of one step on one sequence.

    Attributes:
        request_id: id of the sequence.
        output_tokens: its new tokens.
        finished: True with its last output.
        finish_reason: one of `eos`, `max_tokens`, `stop_sequence`, `stop_{token_id}`, `aborted`, `not_a_number`,
            `constraint`, `constraint_failed`.
        first_pos: absolute position of the first new token.
        logprobs: a row for each new token (common/wire/logprob_rows.py), if wanted.
        given: logprobs of given tokens, if wanted; before any new token.
        start: in the output with the first tokens of this attempt.
        end: in the last output.
        logit_digests: digests of the logits that tokens were drawn from, by absolute position, if wanted.
        pooled: the vector of an embedded sequence, with its one token: float32, little endian.
        phase: the stage that the sequence has entered, if it is not the one of the last output.
    """

    request_id: int
    output_tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    first_pos: int = 0
    start: Start | None = None
    end: End | None = None
    logit_digests: dict[int, int] | None = None
    logprobs: bytes = b""
    given: GivenLogprobs | None = None
    pooled: bytes = b""
    phase: PhaseStart | None = None

    @property
    def end_reason(self) -> EndReason | None:
        """Why the sequence ended."""
        return None if self.end is None else self.end.reason


def sequence_times(seq: Sequence, decode: DecodeWork | None = None) -> SequenceTimes:
    """Timestamps of an ended sequence, and the work that the engine did while it decoded, if known."""
    ended = seq.arrive_time if seq.leave_time is None else seq.leave_time
    reached = seq.arrive_time, seq.first_scheduled_time, seq.first_token_time
    return SequenceTimes(*reached, ended, decode, seq.preempted_at, seq.ledger.tier_wait)


@dataclass(slots=True)
class EngineTotals:
    """Counts since the engine's start.

    Attributes:
        steps: steps scheduled.
        step_tokens: tokens that they compute.
        prompt_tokens: prompt tokens of sequences that got a first token.
        cached_tokens: prompt tokens among them that came from the prefix cache.
        generated_tokens: tokens in outputs.
        taken_tokens: `generated_tokens` at the last `take_outputs`.
        ended: ended sequences, by reason.
    """

    steps: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    taken_tokens: int = 0
    ended: Counter[EndReason] = field(default_factory=Counter)

    def add_step(self, num_tokens: int) -> None:
        """Counts a step that computes `num_tokens` tokens."""
        self.steps += 1
        self.step_tokens += num_tokens


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
        memory_rate: tokens per second whose blocks are read from host memory; 0 until some were read.
        sums: time of the engine's steps since its start.
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
    memory_rate: float = 0.0
    sums: StepSums = field(default_factory=StepSums)
