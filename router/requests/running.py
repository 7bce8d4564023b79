"""The requests that run on workers: applies what each step produced, and moves requests off lost workers.

A running request has one rid on one session. `Session.state` is the only table of running requests. Invariants:
  * A stream has a session exactly while that session's state has the stream, or while the effects of its last step are
    being carried out.
  * The call that removes a stream from its session also queues it again, or its assembly is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, cast

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import DeadlineError, NoWorkerError, PoisonRequestError, RouterFailedError
from common.limits import ALONE_S, CHARGE_OUTPUT_S, CHARGED_PER_TURN
from common.process.tasks import failed
from common.wire.protocol import PREFILL_FEATURE
from router.answers.stream_assembly import StreamAssembly
from router.requests.stream import RequestStream
from router.scheduling.dispatcher import Dispatcher, Release
from router.scheduling.failover import FailoverPolicy, Loss, LossCounts, Verdict
from router.scheduling.queued_request import QueuedRequest
from router.workers.session import Session
from router.workers.session_state import RunningRequest, StepEffects, Submission

# A rid is a random number for the router process, above a counter: unique on every worker (rule S1).
_COUNTER_BITS = 40
# Name of the task in failure logs.
DISPATCHING = "dispatching"

log = structlog.get_logger(__name__)


class ChargedRequest(Protocol):
    """A running request whose output is charged."""

    queued: QueuedRequest
    assembly: StreamAssembly
    is_adopted: bool


class OutputCharges:
    """Charges tenants for output tokens: every CHARGE_OUTPUT_S, and when an attempt ends; never token by token.

    Args:
        charge: called with a request and the number of all its output tokens, as often as needed.
    """

    def __init__(self, charge: Callable[[QueuedRequest, int], None]) -> None:
        self._charge = charge
        self._due: list[ChargedRequest] = []
        self._next = 0.0

    def turn(self, running: Iterable[ChargedRequest], now: float) -> None:
        """Charges the next CHARGED_PER_TURN of `running`; call once per turn of the event loop."""
        if not self._due and now >= self._next:
            self._next = now + CHARGE_OUTPUT_S
            self._due = list(running)
        part, self._due = self._due[-CHARGED_PER_TURN:], self._due[:-CHARGED_PER_TURN]
        for each in part:
            self.settle(each)

    def settle(self, ended: ChargedRequest) -> None:
        """Charges the output delivered so far, except tokens that an adopted sequence repeats.

        An answer that is generated again, because its client has kept only the text, is charged like any other: it
        costs the same steps, and a client may ask for it any number of times.
        """
        if ended.is_adopted:
            ended.queued.output = max(ended.queued.output, ended.assembly.num_left_out)
        self._charge(ended.queued, ended.assembly.delivered)


class SuspectStreams:
    """Streams whose last workers died, and which run alone until they have passed their first steps.

    A suspect's worker gets no other request of this router, for ALONE_S at most.

    Args:
        dispatcher: reserves workers.
        dispatch_soon: called when a reservation has ended.
    """

    def __init__(self, dispatcher: Dispatcher, dispatch_soon: Callable[[], None]) -> None:
        self._dispatcher = dispatcher
        self._dispatch_soon = dispatch_soon
        self._streams: set[RequestStream] = set()

    def add(self, stream: RequestStream, rid: int) -> None:
        """Adds a stream whose attempt `rid` is about to start alone."""
        self._streams.add(stream)
        asyncio.get_running_loop().call_later(ALONE_S, self.clear, stream, rid)

    def release(self, stream: RequestStream, address: str) -> None:
        """Ends a suspect's exclusive use of its worker; a no-op for streams that are not suspects."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._dispatcher.share(address, stream.queued.key)
            self._dispatch_soon()

    def clear(self, stream: RequestStream, rid: int) -> None:
        """Clears a stream of suspicion if its attempt `rid` is still under way."""
        if stream.rid == rid and stream in self._streams and stream.session is not None:
            stream.attempts.share()
            self.release(stream, stream.session.address)

    def clear_passed(self) -> None:
        """Clears the suspects that have passed their first steps."""
        for stream in list(self._streams):
            if stream.attempts.has_passed_first_steps(stream.assembly.num_tokens):
                self.clear(stream, stream.rid)


class RunningRequests:
    """Requests from their release to the end of the attempt. Implements `SequenceEvents`.

    Attributes:
        lost: number of lost attempts.
        num_releases: number of groups sent to workers.
        num_released: number of requests in these groups.
        num_adopted: number of requests that continued with a sequence of another router.
        num_unadopted: number of sequences that could not be adopted.
        dispatch_soon: called after an event that a dispatch decision depends on.

    Args:
        dispatcher: takes requests back that must move to other workers.
        policy: where a request that already has tokens may continue.
        clock: monotonic seconds.
        dispatch_soon: as the attribute.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        policy: FailoverPolicy,
        clock: Callable[[], float],
        dispatch_soon: Callable[[], None],
    ) -> None:
        self.lost = LossCounts()
        self.num_releases = self.num_released = self.num_adopted = self.num_unadopted = 0
        self.dispatch_soon = dispatch_soon
        self._dispatcher = dispatcher
        self._policy = policy
        self._clock = clock
        self._charges = OutputCharges(dispatcher.shares.charge_output)
        self._incarnation = secrets.randbits(64 - _COUNTER_BITS) << _COUNTER_BITS
        self._counter = itertools.count(1)
        # The sessions with workers that are up, by address.
        self._sessions: dict[str, Session] = {}
        self._suspects = SuspectStreams(dispatcher, dispatch_soon)

    # To the workers.

    def submit(self, release: Release, streams: Sequence[RequestStream], now: float) -> None:
        """Sends a released group to its worker."""
        session = self._sessions[release.worker]
        group: list[Submission] = []
        for stream in streams:
            try:
                group.append(self._begin(stream, session, now))
            except Exception:
                # It has left the queue: without an end it would wait for ever.
                failed(DISPATCHING, "request not sent", worker=session.address, **stream.request.ids)
                self.unbind(stream)
                stream.fail(RouterFailedError())
        self.num_releases += 1
        self.num_released += len(group)
        session.state.submit(release.serial, group)
        session.notify()

    @property
    def may_adopt(self) -> bool:
        """True if a worker allows adoption of other routers' sequences."""
        return any(session.may_adopt for session in self._sessions.values())

    def can_adopt(self, queued: QueuedRequest, address: str) -> bool:
        """True if a request may adopt a sequence on the worker at `address`."""
        session = self._sessions.get(address)
        if session is None or session.is_draining or session.is_leaving or not session.may_adopt:
            return False
        return queued.numerics in (None, session.numerics)

    def adopt(self, stream: RequestStream, address: str) -> None:
        """Asks a worker to hand over another router's sequence to a request.

        The request passes no queue, because the sequence already has its place on the worker.
        """
        session = self._sessions[address]
        adoption = stream.begin_adoption(session, self._incarnation | next(self._counter), self._clock())
        session.state.adopt(adoption)
        session.notify()

    def announce(self, addresses: Iterable[str]) -> None:
        """Sends workers their lane records."""
        for address in addresses:
            if (session := self._sessions.get(address)) is not None:
                session.state.announce(self._dispatcher.lanes[address].record())
                session.notify()

    def charge_output(self, running: Iterable[RequestStream], now: float) -> None:
        """Charges tenants for the output of some running requests."""
        self._charges.turn(running, now)

    def unbind(self, stream: RequestStream) -> None:
        """Removes a stream from its session; a no-op if it has none."""
        session, stream.session = stream.session, None
        if session is None:
            return
        if stream.is_adopted and (stream.assembly.is_closed or stream.attempts.has_begun(stream.assembly.num_tokens)):
            self.num_adopted += 1
        now = self._clock()
        stream.attempts.end(stream.assembly.num_tokens, now)
        stream.queued.wait.ended = now
        stream.account_leave(session.state, now)
        self._suspects.release(stream, session.address)
        self._charges.settle(stream)
        session.state.cancel(stream.rid)
        session.notify()

    def _begin(self, stream: RequestStream, session: Session, now: float) -> Submission:
        # A request is returned once at most; otherwise a full fleet would pass it around for ever.
        must_keep = stream.was_returned or not self._can_go_elsewhere(stream, session.address)
        rid = self._incarnation | next(self._counter)
        if stream.queued.alone:
            self._suspects.add(stream, rid)
        return stream.begin(session, rid, now, must_keep=must_keep)

    def _can_go_elsewhere(self, stream: RequestStream, address: str) -> bool:
        """True if a worker other than the one at `address` can serve a request."""
        queued = stream.queued
        if queued.only_worker:
            return False
        return self._dispatcher.lanes.can_serve(
            queued.model, queued.numerics, queued.most_tokens, grammar_engine=queued.grammar_engine, but=address
        )

    def workers_of(self, identity: str, numerics: str) -> dict[str, str]:
        """Addresses, by worker id, of the workers of a model and numerics class that accept work."""
        return {
            session.worker_id: session.address
            for session in self._sessions.values()
            if session.accepting and session.model is not None
            if session.model.identity == identity and session.numerics == numerics
        }

    # From the workers (`SequenceEvents`).

    def worker_up(self, session: Session) -> None:
        """Adds a session; requests can be sent on it from now on."""
        self._sessions[session.address] = session

    def worker_down(self, session: Session, known: Collection[str]) -> None:
        """Removes a session that has ended, and old loss counts of workers that are not in `known`."""
        del self._sessions[session.address]
        # Reading metrics does the same, but a router without metrics would keep the counts of all departed workers.
        self.lost.forget_departed(known, self._clock())

    def take_over(self, session: Session) -> None:
        """Moves requests to the next stream to their worker, which clears the suspects: it is alive."""
        for stream in _streams(session.state.live.values()):
            stream.session = session
            self._suspects.clear(stream, stream.rid)

    def carry_out(self, session: Session, effects: StepEffects) -> None:
        """Wakes the streams with new output, and ends or moves those that have left the session."""
        for touched in effects.touched:
            touched.wake()
        for ended in _streams(effects.ended):
            self.unbind(ended)
        self._suspects.clear_passed()
        session.notify()
        for returned in reversed(_streams(effects.returned)):
            self._requeue_unstarted(returned, session.address)
        self._fail_over([(cast("RequestStream", each), loss) for each, loss in effects.lost], "ended the request")
        if session.role == PREFILL_FEATURE:
            self._hand_over_begun(session, _streams(effects.begun))
        for refused, end in effects.refused:
            self._refuse(cast("RequestStream", refused), session.address, end)

    def lose(self, session: Session, loss: Loss, why: str) -> None:
        """Moves the requests of a session that will not be resumed."""
        self._fail_over([(stream, loss) for stream in _streams(session.state.live.values())], why)

    def forget(self, session: Session, rids: Iterable[int]) -> None:
        """Moves requests that a worker no longer has."""
        gone = _streams(session.state.forget(rids))
        self._fail_over([(stream, Loss.FORGOTTEN) for stream in gone], "the worker has let it go")

    def return_unwritten(self, session: Session) -> None:
        """Queues requests again that cannot be at the worker, because they were not completely written."""
        for stream in reversed(_streams(session.state.unwritten())):
            self._requeue_unstarted(stream)

    def hand_over(self, session: Session) -> None:
        """Moves running requests off a draining worker if another worker can continue them."""
        begun: list[tuple[RequestStream, Loss]] = []
        for stream in reversed(_streams(session.state.live.values())):
            num_tokens, queued = stream.assembly.num_tokens, stream.queued
            wanted = stream.attempts.numerics_wanted(self._policy, num_tokens)
            can_go = self._dispatcher.lanes.can_serve(
                queued.model, wanted, queued.most_tokens, grammar_engine=queued.grammar_engine
            )
            if queued.only_worker or not can_go:
                continue
            if stream.attempts.has_begun(num_tokens):
                begun.append((stream, Loss.DRAINED))
            else:
                self._requeue_unstarted(stream, session.address)
        self._fail_over(begun, "it drains")

    def _hand_over_begun(self, session: Session, begun: Iterable[RequestStream]) -> None:
        """Moves requests whose prompts a worker for prefills has computed to a worker that decodes, if one has a place.

        A stream that has begun must not wait, so without a place it stays.
        """
        lanes = self._dispatcher.lanes
        for stream in begun:
            queued = stream.queued
            if stream.session is not session or stream.assembly.is_closed or queued.only_worker:
                continue
            num_tokens = stream.assembly.num_tokens
            wanted = stream.attempts.numerics_wanted(self._policy, num_tokens)
            kind = (queued.model, wanted, queued.most_tokens, queued.grammar_engine)
            if self._dispatcher.is_reassigning:
                # Lanes count only requests that are bound.
                return
            if lanes.has_decode_place(*kind, num_tokens=num_tokens, block_size=session.block_size):
                # One by one, so that the next one finds this place and its blocks taken.
                self._fail_over([(stream, Loss.HANDED_OVER)], "its prompt is computed")

    # Failover.

    def _fail_over(self, lost: list[tuple[RequestStream, Loss]], why: str) -> None:
        """Requeues streams whose attempt was lost, in their order and ahead of waiting requests, or ends them."""
        for stream, loss in lost:
            self.lost.add(stream.assembly.worker_id, loss)
        culprits = {stream.session for stream, _ in lost if stream.attempts.is_alone}
        for stream, loss in sorted(lost, key=lambda pair: pair[0].queued.key, reverse=True):
            excused = stream.session in culprits and not stream.attempts.is_alone
            stream.attempts.end(stream.assembly.num_tokens, self._clock(), loss, excused=excused)
            self.unbind(stream)
            stream.account_loss()
            log.info(
                "attempt lost",
                **stream.request.ids,
                rid=f"{stream.rid:x}",
                worker_id=stream.assembly.worker_id,
                loss=loss.value,
                attempt=len(stream.attempts),
                tokens=stream.assembly.delivered,
            )
            self._retry_or_fail(stream, why)
            stream.wake()
        if lost:
            self.dispatch_soon()

    def _retry_or_fail(self, stream: RequestStream, why: str) -> None:
        """Queues a stream for its next attempt, or ends it."""
        now, verdict = self._clock(), stream.attempts.verdict()
        if stream.assembly.is_closed:
            return
        if stream.queued.deadline is not None and stream.queued.deadline <= now:
            stream.fail(DeadlineError("when its worker was lost"))
        elif verdict is Verdict.POISON:
            stream.fail(PoisonRequestError(stream.attempts.deaths))
        elif verdict is Verdict.GIVE_UP:
            lost = f"{len(stream.attempts)} workers were lost; the last one: {why}"
            stream.assembly.lose_worker(NoWorkerError(lost))
        else:
            stream.queued.tokens = stream.assembly.num_tokens
            stream.queued.has_output = stream.assembly.num_tokens > len(stream.request.token_ids)
            wanted = stream.attempts.numerics_wanted(self._policy, stream.assembly.num_tokens)
            stream.queued.numerics = wanted
            stream.queued.alone = verdict is Verdict.ALONE
            self._dispatcher.requeue(stream.queued, now, excluded_worker=stream.refused_by)

    def _refuse(self, stream: RequestStream, address: str, end: wpb.SequenceEnd) -> None:
        """Moves a request that a worker refuses to another worker.

        It fails with the worker's error if no other worker can serve it, or if a second worker refuses it before any
        token: then it was wrong of this router to find it valid.
        """
        is_first = len(stream.attempts) == 1 and not self._can_go_elsewhere(stream, address)
        if is_first or (stream.attempts.refused and not stream.assembly.delivered):
            stream.assembly.finish(end)
            self.unbind(stream)
            stream.wake()
        else:
            stream.refused_by = address
            self._fail_over([(stream, Loss.REFUSED)], f"refused the request: {end.message}")

    def _requeue_unstarted(self, stream: RequestStream, address: str = "") -> None:
        """Queues a request again without counting an attempt (rule S9).

        The worker at `address` returned it, or with "" no worker had it.
        """
        self.unbind(stream)
        stream.attempts.return_unstarted()
        stream.account_return(self._clock())
        if stream.is_adopted:
            self._arrive_unadopted(stream)
            return
        stream.was_returned = stream.was_returned or bool(address)
        self._dispatcher.requeue(stream.queued, self._clock(), excluded_worker=address or stream.refused_by)

    def _arrive_unadopted(self, stream: RequestStream) -> None:
        """Queues a request whose adoption failed like a new one: it has no place and has paid for nothing."""
        stream.is_adopted = False
        self.num_unadopted += 1
        self._dispatcher.rejoin(stream.queued, self._clock())
        self.dispatch_soon()


def _streams(sequences: Iterable[RunningRequest]) -> list[RequestStream]:
    """The streams of a session's requests, which are all streams: `submit` and `adopt` alone add them."""
    return cast("list[RequestStream]", list(sequences))
