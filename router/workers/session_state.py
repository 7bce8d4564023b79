"""The router's end of one Session, without I/O: frames to write, in order, and the effects of frames read.

Invariants (docs/explanation/architecture.md):
  * A frame is at most 1 MiB and holds at most 16,384 token ids; control frames go before the next Extend (S8).
  * A sequence that is dropped here without an end from the worker is cancelled there exactly once; its later output
    is ignored. A rid that this router never submitted is cancelled once (S2).
  * `resume` takes over the sequences of an earlier stream; Hello then names them, with their tokens so far (S4).
  * An end that is not the request's own (the worker drains, its engine failed, its length limit is too small) ends the
    attempt only.
  * A group's serial number reaches the worker even if all its sequences were cancelled before they were written: the
    dispatcher counts the group as on its way until the worker echoes its number.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_FRAME_BYTES, MAX_FRAME_TOKENS
from common.wire.peer_numbers import as_uint32, as_uint64, counted
from common.wire.protocol import PROTO_MINOR
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import FirstTokenInfo, WorkerPhase, WorkerReport
from router.scheduling.failover import Loss
from router.scheduling.lane import LaneRecord

# Room for the frame's own fields and for five bytes per token id, the most that a uint32 takes.
_FRAME_OVERHEAD_BYTES = 1024
_TOKEN_BYTES = 5
_CANCELS_PER_FRAME = 8192
_MAX_ALIENS = 1024
# Ends with which a worker gives up a sequence: the request continues on another worker.
LOSSES: Final = {
    wpb.END_REASON_CANCELLED: Loss.DRAINED,
    wpb.END_REASON_ERROR: Loss.ENGINE_FAILED,
    wpb.END_REASON_INVALID: Loss.REFUSED,
}


# The lane record that a worker assumes before the first Lane frame.
_NOTHING_WAITS: Final = LaneRecord(None, 0, 0)


class ProtocolError(Exception):
    """The worker sent what the protocol does not allow; the Session must be closed."""


class RunningRequest(Protocol):
    """A request running on this Session: its assembly and its wake-up callback.

    Attributes:
        rid: id of the current attempt.
        assembly: collects the answer's tokens.
    """

    rid: int
    assembly: StreamAssembly

    @property
    def arrival(self) -> float:
        """Monotonic seconds of its arrival at the router."""

    def wake(self) -> None:
        """Called after the assembly has changed."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to submit to the worker.

    Attributes:
        record: everything but `token_ids`, `more` and `deadline_left_ms`, which depend on the frame.
        token_ids: prompt and tokens generated so far, uint32.
        sequence: the request that gets its output.
        deadline: monotonic seconds, None for never.
    """

    record: wpb.SubmitSequence
    token_ids: array[int]
    sequence: RunningRequest
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Adoption:
    """A sequence of another router that this router adopts.

    Attributes:
        frame: everything but `deadline_left_ms`, which depends on when it is written.
        sequence: the request that gets its output.
        deadline: monotonic seconds, None for never.
    """

    frame: wpb.Adopt
    sequence: RunningRequest
    deadline: float | None = None


@dataclass(slots=True)
class StepEffects:
    """Effects of a StepOutput. The requests in all lists but `touched` have left the Session.

    Attributes:
        begun: requests whose first token this step has.
        touched: requests with new output, in order, each once.
        ended: requests whose stream is closed.
        returned: requests that the worker returned.
        lost: requests whose attempt was lost, and why.
        refused: requests that the worker refused, with the end that says why.
    """

    begun: list[RunningRequest] = field(default_factory=list)
    touched: list[RunningRequest] = field(default_factory=list)
    ended: list[RunningRequest] = field(default_factory=list)
    returned: list[RunningRequest] = field(default_factory=list)
    lost: list[tuple[RunningRequest, Loss]] = field(default_factory=list)
    refused: list[tuple[RunningRequest, wpb.SequenceEnd]] = field(default_factory=list)


@dataclass(slots=True)
class _SubmitGroup:
    """A group to write: sequences without a Submit frame yet, and the rests of long prompts."""

    serial: int
    pending: OrderedDict[int, Submission]
    rests: OrderedDict[int, tuple[Submission, int]] = field(default_factory=OrderedDict)
    submitted: bool = False


class RouterSession:
    """Frames to write and running requests of one Session.

    Args:
        router_id: id of this router's process.
        lease_s: how long the worker keeps this router's sequences without hearing from it.

    Attributes:
        live: the running requests by rid; the only table of rids.
        sums: time of the worker's steps, from the newest frame that has it; None before.
        told: time of that frame, monotonic seconds.
        heard: time of the newest frame, monotonic seconds.
        kv_seq: number of the last KV event that Hello says is known.
    """

    def __init__(self, router_id: str, lease_s: float) -> None:
        hello = wpb.Hello(proto_minor=PROTO_MINOR, router_id=router_id, lease_ms=round(lease_s * 1000))
        self.live: dict[int, RunningRequest] = {}
        self.sums: wpb.StepSums | None = None
        self.told = self.heard = 0.0
        self.kv_seq = 0
        self._hello: wpb.Hello | None = hello
        self._cancels: list[int] = []
        self._adoptions: deque[Adoption] = deque()
        # The lane record that the worker has, or is about to get.
        self._record = _NOTHING_WAITS
        self._lane_is_due = False
        self._kv_epoch = 0
        self._groups: deque[_SubmitGroup] = deque()
        self._submitted_below = 0
        self._first_rid: int | None = None
        self._aliens: set[int] = set()

    def resume(self, earlier: RouterSession) -> None:
        """Takes over the sequences of an earlier stream with the same worker. Call it before the first frame."""
        self.live, self.sums = earlier.live, earlier.sums
        self.told, self.heard = earlier.told, earlier.heard
        self._first_rid, self._submitted_below = earlier._first_rid, earlier._submitted_below

    def know_cache(self, seq: int) -> None:
        """Sets the number up to which KV events are known. Call it before the first frame."""
        assert self._hello is not None
        self.kv_seq = self._hello.kv_seq = seq

    def ask_for_cache(self, epoch: int) -> None:
        """Queues a Lane frame that asks for a snapshot of the worker's cache; `epoch` is above earlier ones."""
        self._kv_epoch = epoch
        self.renew_lease()

    def unwritten(self) -> list[RunningRequest]:
        """The live sequences that have not been completely written."""
        adopted = [adoption.frame.rid for adoption in self._adoptions]
        rids = (rid for group in self._groups for rid in (*group.pending, *group.rests))
        return [self.live[rid] for rid in (*adopted, *rids) if rid in self.live]

    def forget(self, rids: Iterable[int]) -> list[RunningRequest]:
        """Removes and returns the live sequences among `rids`, without a Cancel frame."""
        return [self.live.pop(rid) for rid in rids if rid in self.live]

    def submit(self, serial: int, group: Sequence[Submission]) -> None:
        """Queues a group of new sequences, whose rids must be above all earlier ones."""
        for submission in group:
            self._add(submission.record.rid, submission.sequence)
        self._groups.append(_SubmitGroup(serial, OrderedDict((s.record.rid, s) for s in group)))

    def adopt(self, adoption: Adoption) -> None:
        """Queues an adoption, whose rid must be above all earlier ones."""
        self._add(adoption.frame.rid, adoption.sequence)
        self._adoptions.append(adoption)

    def _add(self, rid: int, sequence: RunningRequest) -> None:
        if self._first_rid is None:
            self._first_rid = rid
        elif rid < self._submitted_below:
            raise ValueError(f"rid {rid} is not new (rule S1)")
        self._submitted_below = rid + 1
        self.live[rid] = sequence

    def cancel(self, rid: int) -> None:
        """Drops a sequence and its unwritten parts, and queues a Cancel if needed; a no-op if it is not live."""
        if self.live.pop(rid, None) is None:
            return
        for adoption in self._adoptions:
            if adoption.frame.rid == rid:
                self._adoptions.remove(adoption)
                return
        for group in self._groups:
            if group.pending.pop(rid, None) is not None:
                return
            group.rests.pop(rid, None)
        self._cancels.append(rid)

    def announce(self, record: LaneRecord) -> None:
        """Queues a Lane frame if the record has changed, in place of an unwritten one."""
        if record != self._record:
            self._record = record
            self._lane_is_due = True

    def renew_lease(self) -> None:
        """Queues a Lane frame, so that the worker hears from this router (rule S6)."""
        self._lane_is_due = True

    def next_frame(self, now: float) -> wpb.SessionRequest | None:
        """The next frame to write; None without one."""
        if self._hello is not None:
            hello, self._hello = self._hello, None
            kept = self.live.items()
            hello.live.extend(wpb.LiveSequence(rid=rid, have=each.assembly.num_tokens) for rid, each in kept)
            return wpb.SessionRequest(hello=hello)
        if self._cancels:
            rids, self._cancels = self._cancels[:_CANCELS_PER_FRAME], self._cancels[_CANCELS_PER_FRAME:]
            return wpb.SessionRequest(cancel=wpb.Cancel(rids=rids))
        if self._adoptions:
            return wpb.SessionRequest(adopt=_adopt_frame(self._adoptions.popleft(), now))
        if self._lane_is_due:
            self._lane_is_due = False
            return wpb.SessionRequest(lane=_lane_frame(self._record, self._kv_epoch, now))
        return self._next_group_frame(now)

    def apply(self, step: wpb.StepOutput, now: float) -> StepEffects:
        """Applies a step's tokens and ends to the requests' assemblies.

        Raises:
            ProtocolError: columns do not fit each other, or too many rids are not this router's.
            GapError: tokens or an end do not continue a sequence.
        """
        effects = StepEffects()
        self._take_times(step, now)
        for start in step.starts:
            if sequence := self.live.get(start.rid):
                if sequence.assembly.first_token_time is None:
                    effects.begun.append(sequence)
                sequence.assembly.begin(_first_token(start, sequence.assembly, now))
        for given in step.given_logprobs:
            if sequence := self.live.get(given.rid):
                sequence.assembly.append_given_logprobs(given.first_pos, given.rows)
        ends = {end.rid: end for end in step.ends}
        touched, closed = self._apply_runs(step, ends, now)
        for rid, end in ends.items():
            if (sequence := self.live.get(rid)) is None:
                continue
            loss = _loss(end, sequence.assembly)
            sequence.assembly.times.report = WorkerReport.from_proto(end, now)
            if sequence.assembly.is_closed:
                effects.ended.append(sequence)
            elif loss is Loss.REFUSED:
                effects.refused.append((sequence, end))
            elif loss is not None:
                effects.lost.append((sequence, loss))
            else:
                sequence.assembly.finish(end)
                effects.ended.append(sequence)
            del self.live[rid]
            touched[rid] = sequence
        for rid in closed:
            self.cancel(rid)
            effects.ended.append(touched[rid])
        effects.returned.extend(self.forget(step.returned))
        effects.touched.extend(touched.values())
        return effects

    def _take_times(self, step: wpb.StepOutput, now: float) -> None:
        """Takes a step's sums, and the stages that sequences have entered."""
        self.heard = now
        if step.HasField("sums"):
            self.sums, self.told = step.sums, now
        for phase in step.phases:
            if sequence := self.live.get(phase.rid):
                sequence.assembly.times.enter(WorkerPhase.from_proto(phase))

    def _apply_runs(
        self, step: wpb.StepOutput, ends: dict[int, wpb.SequenceEnd], now: float
    ) -> tuple[dict[int, RunningRequest], list[int]]:
        """Appends the runs of tokens. The loop is hot: it runs once per token, so work per step stays outside.

        Returns:
            The requests that got tokens, in order, and the rids of those that closed without an end from the worker,
            because of a stop string or a slow client.
        """
        # Whole columns as lists: reading single items from protobuf is ten times slower.
        rids, positions, counts, token_ids = list(step.rid), list(step.first_pos), list(step.n), list(step.token_ids)
        if not len(rids) == len(positions) == len(counts) or sum(counts) != len(token_ids):
            raise ProtocolError("columns of a StepOutput differ in length")
        digests = {each.rid: each for each in step.logit_digests}
        if any(len(each.positions) != len(each.digests) for each in step.logit_digests):
            raise ProtocolError("columns of logit_digests differ in length")
        pooled = {each.rid: each.values for each in step.pooled}
        touched: dict[int, RunningRequest] = {}
        closed: dict[int, None] = {}
        live, at = self.live, 0
        logprobs = {each.rid: each.rows for each in step.logprobs}
        for rid, first_pos, n in zip(rids, positions, counts, strict=True):
            run = token_ids[at : at + n]
            at += n
            sequence = live.get(rid)
            if sequence is None:
                self._refuse_alien(rid)
                continue
            touched[rid] = sequence
            assembly = sequence.assembly
            end = ends.get(rid) if ends else None
            with_last = end is not None and end.end_pos == first_pos + n and _loss(end, assembly) is None
            if digests and rid in digests and assembly.logit_chain is not None:
                assembly.logit_chain.add(digests[rid].positions, digests[rid].digests)
            if pooled and rid in pooled:
                assembly.pooled = pooled[rid]
            assembly.append(
                first_pos, run, now, end if with_last else None, logprobs.get(rid, b"") if logprobs else b""
            )
            if assembly.is_closed and rid not in ends:
                closed[rid] = None
        return touched, list(closed)

    def _refuse_alien(self, rid: int) -> None:
        """Cancels a rid that this router never submitted. A dropped rid of this router was cancelled before."""
        ours = self._first_rid is not None and self._first_rid <= rid < self._submitted_below
        if ours or rid in self._aliens:
            return
        if len(self._aliens) >= _MAX_ALIENS:
            raise ProtocolError("the worker runs too many sequences that this router does not know")
        self._aliens.add(rid)
        self._cancels.append(rid)

    def _next_group_frame(self, now: float) -> wpb.SessionRequest | None:
        while self._groups:
            group = self._groups[0]
            if not group.submitted:
                return wpb.SessionRequest(submit=_submit_frame(group, now))
            if group.rests:
                return wpb.SessionRequest(extend=_extend_frame(group))
            self._groups.popleft()
        return None


def _first_token(start: wpb.SequenceStart, assembly: StreamAssembly, now: float) -> FirstTokenInfo:
    return FirstTokenInfo(min(start.cached_tokens, assembly.num_tokens), counted(start.prefill_us) / 1e6, now)


def _loss(end: wpb.SequenceEnd, assembly: StreamAssembly) -> Loss | None:
    """The loss that an end means for its request; None if it ends the request."""
    if end.reason == wpb.END_REASON_LENGTH and end.end_pos < assembly.most_tokens:
        return Loss.CUT_SHORT
    return LOSSES.get(end.reason)


def _submit_frame(group: _SubmitGroup, now: float) -> wpb.Submit:
    """A frame with as many of the group's sequences as fit; longer prompts continue in Extend frames."""
    frame = wpb.Submit(serial=group.serial)
    tokens, room = 0, MAX_FRAME_BYTES - _FRAME_OVERHEAD_BYTES
    while group.pending:
        submission = next(iter(group.pending.values()))
        taken = min(len(submission.token_ids), MAX_FRAME_TOKENS)
        size = submission.record.ByteSize() + taken * _TOKEN_BYTES + _FRAME_OVERHEAD_BYTES
        if frame.seqs and (tokens + taken > MAX_FRAME_TOKENS or size > room):
            break
        del group.pending[submission.record.rid]
        tokens, room = tokens + taken, room - size
        _add_sequence(frame, submission, taken, now)
        if taken < len(submission.token_ids):
            group.rests[submission.record.rid] = (submission, taken)
    frame.more = bool(group.pending)
    group.submitted = not group.pending
    return frame


def _add_sequence(frame: wpb.Submit, submission: Submission, taken: int, now: float) -> None:
    sequence = frame.seqs.add()
    sequence.CopyFrom(submission.record)
    sequence.token_ids.extend(submission.token_ids[:taken].tolist())
    sequence.more = taken < len(submission.token_ids)
    sequence.deadline_left_ms = _deadline_left_ms(submission.deadline, now)


def _adopt_frame(adoption: Adoption, now: float) -> wpb.Adopt:
    frame = wpb.Adopt()
    frame.CopyFrom(adoption.frame)
    frame.deadline_left_ms = _deadline_left_ms(adoption.deadline, now)
    return frame


def _deadline_left_ms(deadline: float | None, now: float) -> int:
    # 0 means no deadline, so a deadline that has passed is sent as 1.
    return 0 if deadline is None else max(1, as_uint32((deadline - now) * 1000))


def _extend_frame(group: _SubmitGroup) -> wpb.Extend:
    """A frame with the next tokens of the first long prompt."""
    rid, (submission, done) = next(iter(group.rests.items()))
    end = min(done + MAX_FRAME_TOKENS, len(submission.token_ids))
    if end == len(submission.token_ids):
        del group.rests[rid]
    else:
        group.rests[rid] = (submission, end)
    return wpb.Extend(rid=rid, token_ids=submission.token_ids[done:end].tolist(), more=end < len(submission.token_ids))


def _lane_frame(record: LaneRecord, kv_epoch: int, now: float) -> wpb.Lane:
    # 0 means that no request waits, so the least age is 1.
    age_ms = 0 if record.oldest_arrival is None else max(1, as_uint32((now - record.oldest_arrival) * 1000))
    return wpb.Lane(oldest_age_ms=age_ms, tokens=as_uint64(record.tokens), seqs=record.seqs, kv_epoch=kv_epoch)
