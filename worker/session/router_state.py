"""State of one router on this worker: its sequences, which outlive the streams of its Session (rules S4, S6).

Invariants (docs/explanation/architecture.md):
  * Sequences run on while no stream is attached; their output waits in the outbox.
  * Every rid ends in exactly one way: an end, given back, unknown at a later Hello, or the end of the router's lease.
  * After `end` the engine has nothing of the router, and its later outputs for it are dropped.
  * A sequence belongs to one router at a time. An adopted sequence leaves its first router without a trace: if that
      router comes back, the rid is unknown (S12).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Protocol

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.telemetry.trace_context import trace_id_of
from common.telemetry.tracing import SpanFactory
from worker.engine.outputs import End, EngineLoad, RequestOutput
from worker.engine.sequence import EndReason, Sequence
from worker.engine.step_record import StepRing
from worker.engine.turns import TicketReceipt
from worker.session.adoption import AdoptionFacts, Orphans
from worker.session.cache_events import KvLog
from worker.session.deliveries import OwnedSequence
from worker.session.intake import Arrival, Refusal, SequenceGroup
from worker.session.outbox import Outbox
from worker.session.request_trace import RequestTrace
from worker.session.sequence_span import sequence_span
from worker.session.worker_info import WorkerFacts

log = structlog.get_logger(__name__)


class SessionEngine(Protocol):
    """The engine's interface for a Session."""

    @property
    def load(self) -> EngineLoad | None: ...

    @property
    def num_steps(self) -> int:
        """Number of steps since the start."""
        ...

    @property
    def kv_log(self) -> KvLog:
        """Log of the prefix cache's changes."""
        ...

    @property
    def steps(self) -> StepRing:
        """Records of the newest steps."""
        ...

    def busy_s(self, now: float) -> float:
        """Duration of the current step so far, seconds."""
        ...

    def submit_group(self, receipt: TicketReceipt, live: Many[OwnedSequence]) -> None:
        """Submits a group as a whole; each of its sequences gets its outputs."""
        ...

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences; unknown ids are ignored."""
        ...

    def set_deadline(self, seq_id: int, deadline: float | None) -> None:
        """Changes a sequence's deadline, monotonic seconds, None for none; an unknown id is ignored."""
        ...


class ActiveSequence:
    """A router's sequence in the engine. Implements OwnedSequence.

    Args:
        rid: of the router's attempt.
        seq: belongs to the engine while it is live.
        owner: the router's sequences.
        trace: its span and log line.
        adoptable: facts for another router's adoption; None if none may adopt it.

    Attributes:
        end_pos: number of tokens so far, including the prompt.
        is_wanted: False when the router has dropped it; it is cancelled then, and its later output is dropped.
    """

    def __init__(
        self,
        rid: int,
        seq: Sequence,
        owner: RouterSequences,
        trace: RequestTrace,
        adoptable: AdoptionFacts | None = None,
    ) -> None:
        self.rid = rid
        self.seq = seq
        self.owner = owner
        self.end_pos = seq.num_tokens
        self.is_wanted = True
        self.adoptable = adoptable
        self._trace = trace

    def move(self, rid: int, owner: RouterSequences) -> None:
        """Moves the sequence to a router that has adopted it."""
        self.rid, self.owner = rid, owner
        self._trace.rid = rid

    def on_output(self, output: RequestOutput) -> None:
        """Takes the output of one step."""
        self._trace.note(output)
        self.owner.on_output(self, output)


class RouterSequences:
    """The sequences of one router.

    Args:
        router_id: id of the router's process.
        facts: the worker's description.
        engine: runs the sequences.
        tracing: makes their spans.
        identity: name in the router's certificate, to which its id is bound (rule S11); "" without mTLS.
        orphans: adoptable sequences of this worker; None if this is its only router.

    Attributes:
        identity: as given.
        orphans: as given.
        outbox: output that the router must still get.
        lease_end: monotonic seconds at which the router counts as gone; None while a stream is attached.
    """

    def __init__(
        self,
        router_id: str,
        facts: WorkerFacts,
        engine: SessionEngine,
        tracing: SpanFactory,
        identity: str = "",
        orphans: Orphans[RouterSequences] | None = None,
    ) -> None:
        self.router_id = router_id
        self.identity = identity
        self.orphans: Orphans[RouterSequences] = Orphans() if orphans is None else orphans
        self.outbox = Outbox()
        self.lease_end: float | None = None
        self._facts = facts
        self._engine = engine
        self._tracing = tracing
        self._wake: Callable[[], None] = _nobody
        self._ended = False
        # Wanted sequences in the engine, by rid.
        self._active: dict[int, ActiveSequence] = {}
        # The engine sees tickets instead of serial numbers, because each stream counts its groups from 1.
        self._tickets = itertools.count()
        self._serials: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing is left that the router could come back for."""
        return not self._active and not self.outbox.rids

    @property
    def num_held(self) -> int:
        """Number of sequences that run here or have unsent output; a sequence with both counts twice."""
        return len(self._active) + self.outbox.num_unsent

    @property
    def rids(self) -> set[int]:
        """Sequences that run here or whose output is kept."""
        return {*self._active, *self.outbox.rids}

    def attach(self, live: Iterable[wpb.LiveSequence], wake: Callable[[], None]) -> list[int]:
        """Begins a stream with this Hello (S4): drops sequences that it does not name, and continues the others.

        Args:
            live: number of tokens that the router has of each sequence.
            wake: called when there may be something to write.

        Returns:
            The rids among `live` that are unknown here.
        """
        self.lease_end = None
        self.orphans.remove(self)
        self._wake = wake
        self._serials.clear()
        self.outbox.begin_stream()
        have = {sequence.rid: sequence.have for sequence in live}
        self._drop([rid for rid in self.rids if rid not in have])
        return [rid for rid, tokens in have.items() if not self._take_up(rid, tokens)]

    def detach(self, lease_end: float) -> None:
        """Notes that the stream is gone; the sequences stay until `lease_end`, monotonic seconds."""
        self.lease_end = lease_end
        self._wake = _nobody
        self.orphans.add(self, lease_end)

    def end(self) -> None:
        """Ends everything, because the router is gone."""
        self._ended = True
        self.orphans.remove(self)
        self._wake = _nobody
        self._engine.cancel([active.seq.id for active in self._active.values()])

    def knows(self, rid: int) -> bool:
        """True if a rid runs here, or its end is kept."""
        return rid in self._active or self.outbox.holds(rid)

    def start(self, group: SequenceGroup) -> None:
        """Submits a group to the engine."""
        live = [self._make_active(arrival) for arrival in group.arrivals]
        self._active.update((active.rid, active) for active in live)
        ticket = next(self._tickets)
        self._serials[ticket] = group.serial
        self._engine.submit_group(TicketReceipt(self, ticket), live)

    def adoptables(self) -> list[tuple[bytes, int]]:
        """Adoption keys and rids of the sequences that another router may adopt."""
        running = [(each.adoptable.key, rid) for rid, each in self._active.items() if each.adoptable is not None]
        return running + self.outbox.adoptables()

    def adopt(self, wanted: wpb.Adopt, now: float) -> bool:
        """Takes over a sequence of a router that is gone (S12).

        Args:
            wanted: identifies it, and says which of its tokens this router's client has.
            now: monotonic seconds.

        Returns:
            False, with nothing changed, if no sequence continues from there.
        """
        found = self.orphans.find(wanted.key)
        if found is None:
            return False
        owner, was = found
        active = owner._active.get(was)
        if owner.outbox.holds(was):
            run = owner.outbox.release(was, wanted.have, wanted.digest)
            if run is None:
                return False
            self.outbox.take_in(wanted.rid, run, wanted.have)
        # It has no output yet.
        elif active is None or not _begins_behind(active, wanted):
            return False
        self.orphans.adopted(wanted.key)
        if active is not None:
            del owner._active[was]
            active.move(wanted.rid, self)
            self._active[wanted.rid] = active
            left_s = wanted.deadline_left_ms / 1000
            self._engine.set_deadline(active.seq.id, now + left_s if left_s else None)
        log.info(
            "sequence adopted",
            rid=f"{wanted.rid:x}",
            was=f"{was:x}",
            router=self.router_id,
            of=owner.router_id,
            have=wanted.have,
            runs=active is not None,
        )
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Ends a sequence that does not enter the engine."""
        log.debug("sequence refused", rid=f"{refusal.rid:x}", why=refusal.message)
        end = End(refusal.end_pos, refusal.reason, message=refusal.message)
        self.outbox.add(refusal.rid, RequestOutput(-1, [], True, None, refusal.end_pos, end=end))

    def cancel(self, rids: Iterable[int]) -> None:
        """Ends sequences that the router does not want; unknown rids are ignored."""
        wanted = list(rids)
        self._engine.cancel([self._active[rid].seq.id for rid in wanted if rid in self._active])
        for rid in wanted:
            self.outbox.acknowledge(rid)

    # Callbacks of the engine.

    def on_output(self, active: ActiveSequence, output: RequestOutput) -> None:
        """Takes one sequence's output."""
        if self._ended or not active.is_wanted:
            return
        if output.end is not None:
            del self._active[active.rid]
        if _is_unbegun(output):
            self.outbox.give_back(active.rid)
        else:
            self.outbox.add(active.rid, output, active.adoptable)

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Notes a step with output for this router."""
        serial = None if submit_seen is None else self._seen(submit_seen)
        self.outbox.on_step(step, serial)
        self._wake()

    def _seen(self, ticket: int) -> int | None:
        """The serial number of the newest group up to `ticket`; None if an earlier stream submitted it."""
        newest = None
        while self._serials and next(iter(self._serials)) <= ticket:
            newest = self._serials.pop(next(iter(self._serials)))
        return newest

    def _take_up(self, rid: int, have: int) -> bool:
        """Continues a sequence after the router's `have` tokens. False, and it is dropped, if that is not possible."""
        if self.outbox.rewind(rid, have):
            return True
        # It has no output yet, so there is nothing to send again.
        if rid in self._active and not self.outbox.holds(rid):
            return True
        self._drop([rid])
        return False

    def _drop(self, rids: Many[int]) -> None:
        self.cancel(rids)
        for rid in rids:
            if (active := self._active.pop(rid, None)) is not None:
                active.is_wanted = False
            self.outbox.forget(rid)

    def _make_active(self, arrival: Arrival) -> ActiveSequence:
        seq = arrival.seq
        span = sequence_span(
            self._tracing,
            arrival.traceparent,
            arrival.tracestate,
            arrived=seq.arrive_time,
            model=self._facts.model,
            rid=f"{arrival.rid:x}",
            worker_id=self._facts.worker_id,
        )
        trace = RequestTrace(
            arrival.rid, seq.num_prompt_tokens, span, trace_id_of(arrival.traceparent), seq.id, self._engine
        )
        adoptable = None
        if arrival.adoption_key:
            given = array("I", seq.token_ids[seq.num_prompt_tokens :])
            adoptable = AdoptionFacts(arrival.adoption_key, seq.num_prompt_tokens, given)
        return ActiveSequence(arrival.rid, seq, self, trace, adoptable)


def _nobody() -> None:
    """Stands for the wake-up while no stream is attached."""


def _begins_behind(active: ActiveSequence, wanted: wpb.Adopt) -> bool:
    """True if a sequence without output continues exactly after a router's tokens."""
    adoptable = active.adoptable
    return (
        adoptable is not None
        and wanted.have == active.end_pos
        and adoptable.is_behind(array("I"), wanted.have, wanted.digest)
    )


def _is_unbegun(output: RequestOutput) -> bool:
    """True if this worker itself ended a sequence before its first step (S9)."""
    end = output.end
    # A cancel that the router asked for has no message.
    by_itself = end is not None and end.reason is EndReason.CANCELLED and bool(end.message)
    return by_itself and end is not None and end.times is not None and end.times.first_scheduled is None
