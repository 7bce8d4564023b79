"""One stream of a Session, without I/O: takes frames and outputs, returns frames (docs/explanation/architecture.md).

The sequences belong to RouterSequences, which outlives the stream. Invariants:
  * The first frame out is Welcome. Every rid submitted here gets exactly one end, is given back, or is unknown to a
      later stream of the router.
  * After `close` the stream reads and writes nothing more: it has ended, or a newer stream of its router has fenced it.
  * A bad sequence does not affect other sequences; a bad frame closes the Session (ApiError).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, InvalidFieldError, PermissionDeniedError
from common.limits import (
    HEARTBEAT_S,
    MAX_ALL_ASSEMBLING_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAME_TOKENS,
    MAX_LEASE_S,
    MAX_REQUEST_ID_BYTES,
    MAX_ROUTER_SEQS,
    MIN_LEASE_S,
)
from common.rpc.unsupported_fields import refuse_unlisted
from common.wire.ids import check_id
from common.wire.peer_numbers import as_uint32
from common.wire.protocol import ADOPTION_MINOR, PROTO_MINOR
from worker.session import request_validation
from worker.session.cache_events import KvCursor
from worker.session.fleet_backlog import FleetLanes
from worker.session.intake import Inbox
from worker.session.output_protos import sums_proto
from worker.session.router_state import RouterSequences, SessionEngine
from worker.session.worker_info import WorkerFacts, load_proto

_session_numbers = itertools.count()


def check_hello(frame: wpb.SessionRequest) -> wpb.Hello:
    """The Hello that a stream must begin with.

    Raises:
        ApiError: the frame is not a Hello, or one that cannot be served.
    """
    if frame.WhichOneof("frame") != "hello":
        raise InvalidFieldError("frame", "is not a Hello", "a Hello as the first frame")
    refuse_unlisted(frame, request_validation.SESSION)
    hello = frame.hello
    check_id("hello.router_id", hello.router_id, MAX_REQUEST_ID_BYTES, required=True)
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


def check_owner(router_id: str, owner: str, identity: str) -> None:
    """Rejects a router_id that is bound to a different mTLS identity (S11).

    Args:
        router_id: as in Hello.
        owner: certificate name of the router that has sequences or a stream here under this id.
        identity: certificate name of the caller; "" without mTLS.

    Raises:
        PermissionDeniedError: they differ; the owner's stream and sequences stay as they are.
    """
    if identity != owner:
        raise PermissionDeniedError("ROUTER_ID_TAKEN", f"router_id {router_id!r} is in use by another certificate")


class WorkerSession:
    """The worker's end of one stream.

    Args:
        hello: the stream's first frame, checked.
        sequences: of the router; reconciled with `hello`.
        facts: the worker's description.
        engine: runs the sequences.
        lanes: backlogs of all routers.
        now: monotonic seconds.
        wake: called when there may be something to write.
        intake: whether new work is wanted.

    Attributes:
        router_id: id of the router's process.
        lease_s: longest time without a frame; then the Session ends.
        is_closed: True after `close`.
    """

    def __init__(
        self,
        hello: wpb.Hello,
        sequences: RouterSequences,
        facts: WorkerFacts,
        engine: SessionEngine,
        lanes: FleetLanes,
        now: float,
        wake: Callable[[], None],
        intake: wpb.Intake.ValueType = wpb.INTAKE_OPEN,
    ) -> None:
        self.router_id = hello.router_id
        self.lease_s = hello.lease_ms / 1000
        self.is_closed = False
        self._number = next(_session_numbers)
        self._sequences = sequences
        self._facts = facts
        self._engine = engine
        self._lanes = lanes
        self._wake = wake
        self._inbox = Inbox(facts.engine_limits, sequences.knows)
        self._unknown = sequences.attach(hello.live, wake)
        self._hears_of_orphans = hello.proto_minor >= ADOPTION_MINOR
        self._orphans_told = 0
        if self._hears_of_orphans:
            sequences.orphans.watch(self._number, wake)
        self._heard = now
        self._spoke = now
        self._welcomed = False
        self._drain_until: float | None = None
        self._drain_told = False
        self._kv = KvCursor(engine.kv_log, hello.kv_seq, wake) if facts.prefix_caching else None
        self._intake = intake
        self._intake_told = True

    # Reading.

    def receive(self, frame: wpb.SessionRequest, now: float) -> None:
        """Takes a frame after Hello; it renews the lease.

        Raises:
            ApiError: the Session must be closed with this status.
        """
        if self.is_closed:
            return
        self._heard = now
        self._wake()
        check_bounds(frame)
        try:
            self._take(frame, now)
        finally:
            self._lanes.assembly.hold(self._number, self._inbox.num_bytes)
        self._check_room()

    def _take(self, frame: wpb.SessionRequest, now: float) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "submit":
            self._submit(frame.submit, now)
            return
        refuse_unlisted(frame, request_validation.SESSION)
        if kind == "extend":
            self._inbox.extend(frame.extend)
            self._move_on()
        elif kind == "cancel":
            self._cancel(frame.cancel.rids)
        elif kind == "lane":
            lane = frame.lane
            age_s = lane.oldest_age_ms / 1000
            self._lanes.report(self._number, oldest_age_s=age_s, num_tokens=lane.tokens, num_seqs=lane.seqs, now=now)
            if self._kv is not None:
                self._kv.restart(lane.kv_epoch)
        elif kind == "adopt":
            self._adopt(frame.adopt, now)
        else:
            problem = "is a second Hello" if kind == "hello" else "is empty or unknown"
            raise InvalidFieldError("frame", problem, "submit, extend, cancel, lane or adopt")

    def lease_left(self, now: float) -> float:
        """Seconds until the router counts as gone."""
        return self._heard + self.lease_s - now

    # Frames to write.

    def next_frame(self, now: float) -> wpb.SessionResponse | None:
        """The frame to write next; None if there is nothing to send.

        Raises:
            ApiError: the Session must be closed with this status.
        """
        if self.is_closed:
            return None
        self._inbox.expire(now)
        self._move_on()
        self._lanes.assembly.hold(self._number, self._inbox.num_bytes)
        self._check_room()
        # Before steps, which would block KV events on a busy wire. KV events do not carry the load.
        if self._welcomed and self._kv is not None and (events := self._kv.take(now)) is not None:
            return wpb.SessionResponse(kv_events=events)
        frame = self._news(now)
        if frame is None and (now - self._spoke >= HEARTBEAT_S or not self._intake_told):
            self._intake_told = True
            frame = wpb.SessionResponse(heartbeat=self._heartbeat(now))
        if frame is not None:
            self._spoke = now
        return frame

    def silent_for(self, now: float) -> float:
        """Seconds until a frame is due without further events: a heartbeat, or KV events that wait for their turn."""
        heartbeat = max(0.0, self._spoke + HEARTBEAT_S - now)
        return heartbeat if self._kv is None else min(heartbeat, self._kv.due_in(now))

    def drain(self, until: float) -> None:
        """Takes no new work; running sequences continue until `until`, monotonic seconds."""
        self._drain_until = until
        for rid in self._inbox.give_up():
            self._sequences.outbox.give_back(rid)
        self._wake()

    def set_intake(self, intake: wpb.Intake.ValueType) -> None:
        """Tells the router whether new work is wanted; groups on their way are still taken."""
        self._intake, self._intake_told = intake, False
        self._wake()

    def close(self) -> None:
        """Ends the stream; the sequences stay (`RouterSequences.detach`, `end`)."""
        self.is_closed = True
        self._lanes.remove(self._number)
        self._lanes.assembly.hold(self._number, 0)
        self._sequences.orphans.unwatch(self._number)
        if self._kv is not None:
            self._kv.close()

    def _news(self, now: float) -> wpb.SessionResponse | None:
        if not self._welcomed:
            self._welcomed = True
            return wpb.SessionResponse(welcome=self._welcome(now))
        if self._drain_until is not None and not self._drain_told:
            self._drain_told = True
            left_ms = as_uint32((self._drain_until - now) * 1000)
            return wpb.SessionResponse(draining=wpb.Draining(left_ms=left_ms))
        if self._hears_of_orphans and (news := self._sequences.orphans.news_after(self._orphans_told)) is not None:
            self._orphans_told = news.number
            left_ms = as_uint32((news.lease_end - now) * 1000)
            return wpb.SessionResponse(orphans=wpb.Orphans(keys=news.keys, lease_left_ms=left_ms))
        step = self._sequences.outbox.take()
        if step is None:
            return None
        step.load.CopyFrom(self._load(now))
        if self._engine.load is not None:
            step.sums.CopyFrom(sums_proto(self._engine.load.sums))
        return wpb.SessionResponse(step_output=step)

    def _welcome(self, now: float) -> wpb.Welcome:
        return wpb.Welcome(
            worker_id=self._facts.worker_id,
            instance_id=self._facts.instance_id,
            proto_minor=PROTO_MINOR,
            numerics=self._facts.numerics,
            limits=self._facts.limits_proto(),
            unknown=self._unknown,
            load=self._load(now),
            busy_ms=as_uint32(self._engine.busy_s(now) * 1000),
            kv_events=self._facts.prefix_caching,
        )

    def _heartbeat(self, now: float) -> wpb.Heartbeat:
        return wpb.Heartbeat(
            load=self._load(now),
            busy_ms=as_uint32(self._engine.busy_s(now) * 1000),
            steps=self._engine.num_steps,
            submit_seen=self._sequences.outbox.submit_seen,
        )

    def _load(self, now: float) -> wpb.Load:
        return load_proto(self._engine.load, self._lanes.oldest_age_s(now), self._lanes.num_tokens, self._intake)

    def _submit(self, frame: wpb.Submit, now: float) -> None:
        for field, _ in frame.ListFields():
            if f"submit.{field.name}" not in request_validation.SESSION:
                refuse_unlisted(frame, request_validation.SESSION, prefix="submit.")
        if self._inbox.num_seqs + self._sequences.num_held + len(frame.seqs) > MAX_ROUTER_SEQS:
            message = f"more than {MAX_ROUTER_SEQS} sequences of one router"
            raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="SESSION_BOUNDS")
        if self._drain_until is not None:
            for record in frame.seqs:
                if not self._sequences.knows(record.rid):
                    self._sequences.outbox.give_back(record.rid)
            return
        self._inbox.submit(frame, now)
        self._move_on()

    def _adopt(self, wanted: wpb.Adopt, now: float) -> None:
        """Adopts a sequence of a router that is gone, or gives the rid back."""
        request_validation.check_adoption_key("adopt.key", wanted.key)
        if self._sequences.knows(wanted.rid):
            return
        if self._sequences.outbox.num_unsent >= MAX_ROUTER_SEQS:
            message = f"more than {MAX_ROUTER_SEQS} sequences have something to send that is not read"
            raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="SESSION_BOUNDS")
        is_full = self._inbox.num_seqs + self._sequences.num_held >= MAX_ROUTER_SEQS
        if is_full or self._drain_until is not None or not self._sequences.adopt(wanted, now):
            self._sequences.outbox.give_back(wanted.rid)

    def _cancel(self, rids: Iterable[int]) -> None:
        self._sequences.cancel([rid for rid in rids if not self._inbox.cancel(rid)])
        self._move_on()

    def _check_room(self) -> None:
        """Raises ApiError to close this Session if all Sessions together hold too much, and this one much of it."""
        if self._lanes.assembly.must_go(self._number):
            message = (
                f"unfinished groups of all routers take more than {MAX_ALL_ASSEMBLING_BYTES} bytes, many of them here"
            )
            raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="SESSION_BOUNDS")

    def _move_on(self) -> None:
        """Submits complete groups to the engine, and ends the sequences that the inbox refused."""
        for refusal in self._inbox.take_refusals():
            self._sequences.refuse(refusal)
        for group in self._inbox.take_groups():
            self._sequences.start(group)


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
