"""Divides the time of sequences at this worker: sums of the engine's steps, and a ledger of each sequence. Pure.

A step costs a few additions, whatever its number of sequences: StepAccount keeps sums since the engine's start, and a
sequence compares the sums at both ends of a phase. The rules are in docs/explanation/where-time-goes.md.

Invariant: the parts of a sequence add up to the time from its arrival to its end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from common.telemetry import names
from common.telemetry.ledger import Blame, Ledger
from common.telemetry.names import Stage

# Weight of the newest step in the mean durations of steps.
_NEWEST: Final = 0.25
# Prompts, and decoding sequences, that may be blamed: the newest ones.
_MOST_BLAMED: Final = 64
# Time of a phase that has no culprit worth looking for.
_LEAST_BLAMED_S: Final = 1e-3
# A step or a pause between steps is a stall from this time on; a step also takes so many times what is usual then.
_STALL_S: Final = 0.1
_STALL_TIMES: Final = 8


class StepSums(NamedTuple):
    """Seconds of all steps since the engine's start.

    Attributes:
        prompts: computing prompts.
        alone: decoding, as far as a step with one sequence would take as long.
        neighbours: decoding, beyond `alone`, because several sequences share a step.
        drafts: decoding, beyond `alone`, because a sequence verifies drafts.
        between: between steps.
        stalled: in steps and between them, far beyond the usual time.
    """

    prompts: float = 0.0
    alone: float = 0.0
    neighbours: float = 0.0
    drafts: float = 0.0
    between: float = 0.0
    stalled: float = 0.0


class PhaseStart(NamedTuple):
    """A stage that a sequence has entered.

    Attributes:
        stage: the stage.
        parts: seconds from the sequence's arrival to this stage, by stage.
        blames: the request that cost most, by stage.
        sums: the engine's sums when the stage began.
    """

    stage: Stage
    parts: dict[Stage, float]
    blames: dict[Stage, Blame]
    sums: StepSums


@dataclass(slots=True)
class TierWait:
    """The time that a sequence has waited for KV tiers, and their results.

    Attributes:
        began: begin of its first wait, monotonic seconds.
        ended: end of its last wait; None while it waits.
        num_asked: blocks that it asked for, each once a wait.
        num_bytes: bytes of the blocks that were found.
        is_late: True if a wait ended before the tiers had answered.
        results: number of blocks by tier and result (`hit`, `miss`, `damaged`).
    """

    began: float
    ended: float | None = None
    num_asked: int = 0
    num_bytes: int = 0
    is_late: bool = False
    results: Counter[tuple[str, str]] = field(default_factory=Counter)

    def attributes(self) -> Mapping[str, int]:
        """For the span."""
        by_tier = {names.TIERS_RESULT.format(*key): count for key, count in self.results.items()}
        said = {names.TIERS_ASKED: self.num_asked, names.TIERS_BYTES: self.num_bytes, names.TIERS_LATE: self.is_late}
        return {**said, **by_tier}


class SequenceLedger(Ledger):
    """Ledger of one sequence, from its arrival at the worker to its end.

    Args:
        arrived: monotonic seconds.

    Attributes:
        request_id: id of its request, "" if unknown.
        tenant: tenant of its request.
        prefill_s: seconds of steps that computed its prompt.
        prefill_ended: end of the last such step.
        decoded: begin and end of its last decode; infinite while it decodes.
        has_moved: True if it has entered a stage since the last `phase_start`.
        evictor: sequence for which it lost its blocks, while it is preempted; None if unknown.
        tier_wait: its waits for KV tiers; None without any.
    """

    __slots__ = (
        "_phase_began",
        "_prefill_before",
        "_sums",
        "decoded",
        "evictor",
        "has_moved",
        "prefill_ended",
        "prefill_s",
        "request_id",
        "tenant",
        "tier_wait",
    )

    def __init__(self, arrived: float) -> None:
        super().__init__(Stage.WORKER_QUEUE, arrived)
        self.request_id = self.tenant = ""
        self.prefill_s = self.prefill_ended = 0.0
        self.decoded = (math.inf, math.inf)
        self.has_moved = False
        self.evictor: SequenceLedger | None = None
        self.tier_wait: TierWait | None = None
        self._phase_began = arrived
        self._prefill_before = 0.0
        self._sums = StepSums()

    def move(self, stage: Stage, account: StepAccount, now: float) -> None:
        """Ends the running phase at `now`, divides its time by the engine's sums, and starts `stage`."""
        sums = account.sums
        prompts, alone, neighbours, drafts, between, stalled = (b - a for a, b in zip(self._sums, sums, strict=True))
        own, waited = self.prefill_s - self._prefill_before, now - self._phase_began
        others = {Stage.OTHERS_PREFILL: prompts - own, Stage.BETWEEN_STEPS: between, Stage.STALL: stalled}
        shares: dict[Stage, float] | None = None
        if self.stage is Stage.PREFILL:
            shares = {Stage.PREFILL: own, Stage.NEIGHBOURS: alone + neighbours + drafts, **others}
        elif self.stage is Stage.DECODE:
            shares = {Stage.DECODE: alone, Stage.NEIGHBOURS: neighbours, Stage.SPECULATION: drafts, **others}
            self.decoded = self.decoded[0], now
        elif self.stage is Stage.PREEMPTED and self.evictor is not None:
            self.blame(Stage.PREEMPTED, Blame(self.evictor.request_id, self.evictor.tenant, waited))
            self.evictor = None
        if shares is not None:
            self._blame_prompt(Stage.OTHERS_PREFILL, account, prompts - own)
            self._blame_decode(Stage.NEIGHBOURS, account, shares[Stage.NEIGHBOURS], now)
        elif self.stage is Stage.WORKER_QUEUE:
            self._blame_prompt(Stage.WORKER_QUEUE, account, waited)
            if Stage.WORKER_QUEUE not in self.blames:
                self._blame_decode(Stage.WORKER_QUEUE, account, waited, now)
        self.enter(stage, now, shares)
        self.has_moved = True
        self._phase_began, self._prefill_before, self._sums = now, self.prefill_s, sums

    def phase_start(self) -> PhaseStart:
        """The stage that it has entered last, and its time before."""
        self.has_moved = False
        return PhaseStart(self.stage, self.parts(self.since), dict(self.blames), self._sums)

    def _blame_prompt(self, stage: Stage, account: StepAccount, seconds: float) -> None:
        """Blames the sequence with the longest prompt of the running phase for `seconds` of a stage at most."""
        culprit = account.most_prefilled(self._phase_began, self) if seconds > 0 else None
        if culprit is not None:
            self.blame(stage, Blame(culprit.request_id, culprit.tenant, min(culprit.prefill_s, seconds)))

    def _blame_decode(self, stage: Stage, account: StepAccount, seconds: float, now: float) -> None:
        """Blames the sequence that decoded longest in the running phase for its share of `seconds` of a stage."""
        if seconds < _LEAST_BLAMED_S:
            return
        culprit, share = account.most_decoded(self._phase_began, now, self)
        if culprit is not None:
            self.blame(stage, Blame(culprit.request_id, culprit.tenant, share * seconds))

    def start(self, account: StepAccount, now: float) -> None:
        """Notes a step with a chunk of its prompt; the time after a preemption is its cost until the next token."""
        if self.stage in (Stage.WORKER_QUEUE, Stage.GRAMMAR_WAIT, Stage.KV_WAIT):
            self.move(Stage.PREFILL, account, now)

    def begin_tier_wait(self, account: StepAccount, now: float) -> TierWait:
        """Notes that it waits for KV tiers. After a preemption this time is the preemption's cost."""
        if self.stage is Stage.WORKER_QUEUE:
            self.move(Stage.KV_WAIT, account, now)
        if self.tier_wait is None:
            self.tier_wait = TierWait(now)
        self.tier_wait.ended = None
        return self.tier_wait

    def end_tier_wait(self, account: StepAccount, now: float) -> None:
        """Notes that it waits for a step; a no-op if it does not wait for KV tiers."""
        if self.stage is Stage.KV_WAIT:
            self.move(Stage.WORKER_QUEUE, account, now)
        if self.tier_wait is not None and self.tier_wait.ended is None:
            self.tier_wait.ended = now

    def produce(self, account: StepAccount, now: float) -> None:
        """Notes a token; the first one after a prefill or a preemption starts the decode."""
        if self.stage in (Stage.PREFILL, Stage.PREEMPTED):
            self.move(Stage.DECODE, account, now)
            account.add_decode(self, now)


class StepAccount:
    """Sums of the engine's steps.

    Attributes:
        sums: seconds since the start.
        ended: end of the last step, or the time at which the next one was planned; monotonic seconds.
    """

    def __init__(self) -> None:
        self.sums = StepSums()
        self.ended = 0.0
        # Usual duration of a step that decodes one sequence; before the first such step, of the fastest decode step.
        self._alone_s = 0.0
        # The ledgers of sequences whose prompts were computed last.
        self._prefilled: deque[SequenceLedger] = deque(maxlen=_MOST_BLAMED)
        # The ledgers of sequences that began to decode last.
        self._decoders: deque[SequenceLedger] = deque(maxlen=_MOST_BLAMED)

    def begin_step(self, now: float, *, is_first: bool) -> None:
        """Counts the time since the last step, if no other step is in flight (`is_first`)."""
        if is_first:
            self._add_pause(max(0.0, now - self.ended))
            self.ended = max(now, self.ended)

    def end_step(
        self, now: float, duration_s: float, prompts_s: float, num_decodes: int, num_tokens: int, usual_s: float = 0.0
    ) -> float:
        """Adds a step that ended at `now`. Returns the seconds that count for its prompts.

        Args:
            now: monotonic seconds.
            duration_s: of the step; what exceeds the time since the last step's end does not count.
            prompts_s: part of it that computed prompts.
            num_decodes: sequences that it decodes.
            num_tokens: tokens of these sequences, with drafts.
            usual_s: usual duration of such a step, 0 if unknown.
        """
        span = max(0.0, now - self.ended)
        self.ended = max(now, self.ended)
        duration_s, prompts_s = min(duration_s, span), min(prompts_s, duration_s, span)
        self._add_pause(span - duration_s)
        if usual_s and duration_s > max(_STALL_S, _STALL_TIMES * usual_s):
            self.sums = self.sums._replace(stalled=self.sums.stalled + duration_s - usual_s)
            prompts_s *= usual_s / duration_s
            duration_s = usual_s
        decode_s, num_drafts = duration_s - prompts_s, num_tokens - num_decodes
        alone_s = self._alone(decode_s, num_decodes, num_drafts, is_measured=num_decodes > 0 and not prompts_s)
        extra_s = decode_s - alone_s
        drafts_s = extra_s * num_drafts / num_decodes / (num_decodes - 1 + num_drafts) if num_drafts else 0.0
        prompts, alone, neighbours, drafts, between, stalled = self.sums
        self.sums = StepSums(
            prompts + prompts_s,
            alone + alone_s,
            neighbours + extra_s - drafts_s,
            drafts + drafts_s,
            between,
            stalled,
        )
        return prompts_s

    def _add_pause(self, seconds: float) -> None:
        """Adds a time between steps."""
        if seconds < _STALL_S:
            self.sums = self.sums._replace(between=self.sums.between + seconds)
        else:
            self.sums = self.sums._replace(stalled=self.sums.stalled + seconds)

    def add_prompt(self, ledger: SequenceLedger, seconds: float) -> None:
        """Adds the time of a step that counts for a prompt; call after `end_step`."""
        if not ledger.prefill_s:
            self._prefilled.append(ledger)
        ledger.prefill_s += seconds
        ledger.prefill_ended = self.ended

    def add_decode(self, ledger: SequenceLedger, now: float) -> None:
        """Notes that a sequence decodes from `now` on."""
        if ledger.decoded[0] == math.inf:
            self._decoders.append(ledger)
        ledger.decoded = now, math.inf

    def most_decoded(self, since: float, until: float, but: SequenceLedger) -> tuple[SequenceLedger | None, float]:
        """The sequence that decoded longest between two times, and its share of the time of all; None without one."""
        found = [(min(each.decoded[1], until) - max(each.decoded[0], since), each) for each in self._decoders]
        beside = [pair for pair in found if pair[0] > 0 and pair[1] is not but]
        if not beside:
            return None, 0.0
        seconds, most = max(beside, key=lambda pair: pair[0])
        return most, seconds / sum(each for each, _ in beside)

    def most_prefilled(self, since: float, but: SequenceLedger) -> SequenceLedger | None:
        """The sequence whose prompt took longest, of those with a step after `since`; None without one."""
        found = [each for each in self._prefilled if each.prefill_ended > since and each is not but]
        return max(found, key=lambda each: each.prefill_s, default=None)

    def _alone(self, decode_s: float, num_decodes: int, num_drafts: int, *, is_measured: bool) -> float:
        """Part of a step's decode that one of its sequences would take alone."""
        is_alone = num_decodes == 1 and not num_drafts
        if is_measured:
            if not self._alone_s or (decode_s < self._alone_s and not is_alone):
                self._alone_s = decode_s
            elif is_alone:
                self._alone_s += _NEWEST * (decode_s - self._alone_s)
        return decode_s if is_alone else min(decode_s, self._alone_s)
