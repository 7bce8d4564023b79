"""One router's Session without its I/O: frames and outputs come in, frames go out (design-details section 2).

Invariants:
  * The first frame out is Welcome. Every rid submitted here gets exactly one end, or is given back.
  * After `close` nothing of this router is left in the engine, and what the engine still says about it is not kept.
  * A bad sequence costs no other sequence anything; a bad frame closes the Session (ApiError).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, DeadlineError, EngineError, InvalidFieldError
from common.limits import (
    HEARTBEAT_S,
    MAX_FRAME_BYTES,
    MAX_FRAME_TOKENS,
    MAX_LEASE_S,
    MAX_REQUEST_ID_BYTES,
    MIN_LEASE_S,
)
from common.rpc.unserved import refuse_unserved
from common.telemetry.tracing import SequenceSpan, SequenceTimes, Tracing, trace_id_of
from worker import served
from worker.engine_core import LoadReport
from worker.engine_turns import Listener
from worker.facts import PROTO_MINOR, WorkerFacts, load_proto
from worker.fleet_lanes import FleetLanes
from worker.inbox import Arrival, Group, Inbox, Refusal
from worker.outbox import Outbox
from worker.outputs import End, SequenceOutput
from worker.sequence import Sequence

log = structlog.get_logger(__name__)

_session_numbers = itertools.count()
# Ends that are no failure of the sequence.
_STOPS = frozenset({wpb.END_REASON_EOS, wpb.END_REASON_STOP_TOKEN, wpb.END_REASON_STOP_SEQUENCE, wpb.END_REASON_LENGTH})


class Engine(Protocol):
    """What a Session needs of the engine."""

    @property
    def load(self) -> LoadReport | None:
        """The newest load."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        ...

    def busy_s(self, now: float) -> float:
        """For how long the current step has been running, seconds."""
        ...

    def submit_group(self, listener: Listener, serial: int, seqs: Many[Sequence]) -> None:
        """Takes a group whole; `listener` gets its outputs."""
        ...

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences; unknown ids are ignored."""
        ...


@dataclass(slots=True)
class Live:
    """A sequence in the engine, with its span and what its end must report."""

    seq_id: int
    rid: int
    prompt_tokens: int
    span: SequenceSpan
    trace_id: str
    cached_tokens: int = 0

    def end(self, end: End, times: SequenceTimes) -> None:
        """Ends the span and writes the log line."""
        output_tokens = max(0, end.end_pos - self.prompt_tokens)
        reason = wpb.EndReason.Name(end.reason).removeprefix("END_REASON_").lower()
        counts = {
            "input_tokens": self.prompt_tokens,
            "output_tokens": output_tokens,
            "cached_tokens": self.cached_tokens,
        }
        if end.reason in _STOPS:
            self.span.finish(times, reason=reason, **counts)
        else:
            self.span.fail(failure(end), times, **counts)
        log.debug("sequence ended", rid=self.rid, reason=reason, trace_id=self.trace_id or None, **counts)


def failure(end: End) -> ApiError | grpc.StatusCode:
    """The status of a sequence that did not end by itself."""
    if end.reason == wpb.END_REASON_CANCELLED:
        lost = ApiError(grpc.StatusCode.ABORTED, end.message, reason="WORKER_LOST")
        return lost if end.message else grpc.StatusCode.CANCELLED
    if end.reason == wpb.END_REASON_DEADLINE:
        return DeadlineError("in the engine")
    if end.reason == wpb.END_REASON_INVALID:
        return ApiError(grpc.StatusCode.INVALID_ARGUMENT, end.message)
    return EngineError(end.message)


def check_hello(frame: wpb.SessionRequest) -> wpb.Hello:
    """The Hello that a stream must begin with.

    Raises:
        ApiError: it is no Hello, or one that can not be served.
    """
    if frame.WhichOneof("frame") != "hello":
        raise InvalidFieldError("frame", "is no Hello", "a Hello as the first frame")
    refuse_unserved(frame, served.SESSION)
    hello = frame.hello
    if not 1 <= len(hello.router_id.encode()) <= MAX_REQUEST_ID_BYTES:
        raise InvalidFieldError("hello.router_id", "is empty or too long", f"1 to {MAX_REQUEST_ID_BYTES} bytes")
    if not MIN_LEASE_S * 1000 <= hello.lease_ms <= MAX_LEASE_S * 1000:
        valid = f"{MIN_LEASE_S * 1000:.0f} to {MAX_LEASE_S * 1000:.0f}"
        raise InvalidFieldError("hello.lease_ms", f"is {hello.lease_ms}", valid)
    if hello.proto_minor > PROTO_MINOR + 1:
        raise ApiError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"protocol minor {hello.proto_minor} is too new for this worker, which speaks {PROTO_MINOR}: upgrade it",
            reason="PROTOCOL_VERSION",
        )
    return hello


class SessionState:
    """The worker's end of one Session.

    Args:
        hello: the stream's first frame, checked.
        facts: the worker's description.
        engine: runs the sequences.
        lanes: what waits at all routers.
        tracing: makes the sequences' spans.
        now: monotonic seconds.
        wake: told when there may be something to write.

    Attributes:
        router_id: id of the router's process.
        lease_s: without a frame for so long the Session ends.
        is_closed: whether `close` has been called.
    """

    def __init__(
        self,
        hello: wpb.Hello,
        facts: WorkerFacts,
        engine: Engine,
        lanes: FleetLanes,
        tracing: Tracing,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        self.router_id = hello.router_id
        self.lease_s = hello.lease_ms / 1000
        self.is_closed = False
        self._number = next(_session_numbers)
        self._facts = facts
        self._engine = engine
        self._lanes = lanes
        self._tracing = tracing
        self._wake = wake
        self._outbox = Outbox()
        self._inbox = Inbox(facts.engine_limits, lambda rid: rid in self._seq_ids or self._outbox.holds(rid))
        self._live: dict[int, Live] = {}
        self._seq_ids: dict[int, int] = {}
        self._heard = now
        self._spoke = now
        self._welcomed = False
        self._drain_until: float | None = None
        self._drain_told = False

    # Reading.

    def receive(self, frame: wpb.SessionRequest, now: float) -> None:
        """Takes a frame after Hello; it renews the lease.

        Raises:
            ApiError: the Session must be closed with this status.
        """
        self._heard = now
        self._wake()
        check_bounds(frame)
        kind = frame.WhichOneof("frame")
        if kind == "submit":
            self._submit(frame.submit, now)
            return
        refuse_unserved(frame, served.SESSION)
        if kind == "extend":
            self._inbox.extend(frame.extend)
            self._move_on()
        elif kind == "cancel":
            self._cancel(frame.cancel.rids)
        elif kind == "lane":
            lane = frame.lane
            age_s = lane.oldest_age_ms / 1000
            self._lanes.report(self._number, oldest_age_s=age_s, num_tokens=lane.tokens, num_seqs=lane.seqs, now=now)
        else:
            problem = "is a second Hello" if kind == "hello" else "is empty or unknown"
            raise InvalidFieldError("frame", problem, "submit, extend, cancel or lane")

    def lease_left(self, now: float) -> float:
        """Seconds until the router counts as gone."""
        return self._heard + self.lease_s - now

    # The engine's outputs (Listener).

    def on_output(self, output: SequenceOutput) -> None:
        """Takes one sequence's tokens."""
        live = self._live[output.seq_id]
        if output.start is not None:
            live.cached_tokens = output.start.cached_tokens
        if output.end is not None:
            assert output.times is not None
            del self._live[output.seq_id]
            del self._seq_ids[live.rid]
            live.end(output.end, output.times)
        if self.is_closed:
            return
        if self._is_unbegun(output):
            self._outbox.give_back(live.rid)
        else:
            self._outbox.add(live.rid, output)

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """A step that concerned this Session has passed."""
        self._outbox.on_step(step, submit_seen)
        self._wake()

    # Writing.

    def next_frame(self, now: float) -> wpb.SessionResponse | None:
        """The frame to write next; None when there is nothing to say."""
        self._inbox.expire(now)
        self._move_on()
        frame = self._news(now)
        if frame is None and now - self._spoke >= HEARTBEAT_S:
            frame = wpb.SessionResponse(heartbeat=self._heartbeat(now))
        if frame is not None:
            self._spoke = now
        return frame

    def silent_for(self, now: float) -> float:
        """Seconds until the next heartbeat is due."""
        return max(0.0, self._spoke + HEARTBEAT_S - now)

    def drain(self, until: float) -> None:
        """Takes no new work; what runs goes on until `until`, monotonic seconds."""
        self._drain_until = until
        for rid in self._inbox.give_up():
            self._outbox.give_back(rid)
        self._wake()

    def close(self) -> None:
        """Ends everything of this router."""
        if self.is_closed:
            return
        self.is_closed = True
        self._lanes.remove(self._number)
        self._engine.cancel(list(self._live))

    def _news(self, now: float) -> wpb.SessionResponse | None:
        if not self._welcomed:
            self._welcomed = True
            return wpb.SessionResponse(welcome=self._welcome(now))
        if self._drain_until is not None and not self._drain_told:
            self._drain_told = True
            left_ms = max(0, round((self._drain_until - now) * 1000))
            return wpb.SessionResponse(draining=wpb.Draining(left_ms=left_ms))
        step = self._outbox.take()
        if step is None:
            return None
        step.load.CopyFrom(self._load(now))
        return wpb.SessionResponse(step_output=step)

    def _welcome(self, now: float) -> wpb.Welcome:
        return wpb.Welcome(
            worker_id=self._facts.worker_id,
            instance_id=self._facts.instance_id,
            proto_minor=PROTO_MINOR,
            numerics=self._facts.numerics,
            limits=self._facts.limits_proto(),
            load=self._load(now),
        )

    def _heartbeat(self, now: float) -> wpb.Heartbeat:
        return wpb.Heartbeat(
            load=self._load(now),
            busy_ms=round(self._engine.busy_s(now) * 1000),
            steps=self._engine.num_steps,
            submit_seen=self._outbox.submit_seen,
        )

    def _load(self, now: float) -> wpb.Load:
        return load_proto(self._engine.load, self._lanes.oldest_age_s(now), self._lanes.num_tokens)

    def _submit(self, frame: wpb.Submit, now: float) -> None:
        for field, _ in frame.ListFields():
            if f"submit.{field.name}" not in served.SESSION:
                refuse_unserved(frame, served.SESSION, prefix="submit.")
        if self._drain_until is not None:
            for record in frame.seqs:
                if record.rid not in self._seq_ids:
                    self._outbox.give_back(record.rid)
            return
        self._inbox.submit(frame, now)
        self._move_on()

    def _cancel(self, rids: Iterable[int]) -> None:
        running = [self._seq_ids[rid] for rid in rids if not self._inbox.cancel(rid) and rid in self._seq_ids]
        self._engine.cancel(running)
        self._move_on()

    def _move_on(self) -> None:
        """Hands complete groups to the engine, and ends what the inbox refused."""
        for refusal in self._inbox.take_refusals():
            self._end_refused(refusal)
        for group in self._inbox.take_groups():
            self._start(group)

    def _start(self, group: Group) -> None:
        for arrival in group.arrivals:
            seq = arrival.seq
            self._live[seq.id] = self._make_live(arrival)
            self._seq_ids[arrival.rid] = seq.id
        self._engine.submit_group(self, group.serial, [arrival.seq for arrival in group.arrivals])

    def _make_live(self, arrival: Arrival) -> Live:
        seq = arrival.seq
        span = self._tracing.sequence_span(
            arrival.traceparent,
            arrival.tracestate,
            arrived=seq.arrive_time,
            model=self._facts.model,
            request_id=f"{arrival.rid:x}",
            worker_id=self._facts.worker_id,
        )
        return Live(seq.id, arrival.rid, seq.num_prompt_tokens, span, trace_id_of(arrival.traceparent))

    def _end_refused(self, refusal: Refusal) -> None:
        log.debug("sequence refused", rid=refusal.rid, why=refusal.message)
        end = End(refusal.end_pos, refusal.reason, message=refusal.message)
        self._outbox.add(refusal.rid, SequenceOutput(-1, refusal.end_pos, [], end=end))

    def _is_unbegun(self, output: SequenceOutput) -> bool:
        """Whether the drain's time ran out before the sequence's first step (S9)."""
        ended = output.end is not None and output.end.reason == wpb.END_REASON_CANCELLED
        return (
            ended
            and self._drain_until is not None
            and output.times is not None
            and output.times.first_scheduled is None
        )


def check_bounds(frame: wpb.SessionRequest) -> None:
    """Checks a frame's size (rule S8).

    Raises:
        ApiError: it is too large; the Session must be closed.
    """
    num_bytes = frame.ByteSize()
    num_tokens = len(frame.extend.token_ids) + sum(len(record.token_ids) for record in frame.submit.seqs)
    if num_bytes > MAX_FRAME_BYTES:
        problem = f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES}"
    elif num_tokens > MAX_FRAME_TOKENS:
        problem = f"a frame of {num_tokens} token ids; at most {MAX_FRAME_TOKENS}"
    else:
        return
    raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, problem, reason="FRAME_BOUNDS")
