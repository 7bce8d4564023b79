"""The requests that workers have: what comes of each step, and what becomes of them when a worker is lost.

A request runs under one rid on one session, whose state holds it; there is no other table of what runs. Invariants:
  * A stream has a session exactly while that session's state has it, or what has just come of it is being worked off.
  * A stream that leaves its session is queued again by the same call, or its assembly is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import DeadlineError, PoisonRequestError, RouterFailedError
from common.limits import ALONE_S, CHARGE_OUTPUT_S, CHARGED_PER_TURN
from common.process.tasks import failed
from router.answers.stream_assembly import StreamAssembly
from router.requests.stream import RequestStream
from router.scheduling.dispatcher import Dispatcher, Release
from router.scheduling.failover import FailoverPolicy, Loss, Verdict
from router.scheduling.queued_request import QueuedRequest
from router.workers.session import Session
from router.workers.session_state import RunningRequest, StepEffects, Submission

# A rid is the router's incarnation above a counter: unique over the life of the worker too (rule S1).
_COUNTER_BITS = 40
# Name of what fails here.
DISPATCHING = "dispatching"

log = structlog.get_logger(__name__)


class Running(Protocol):
    """A request that a worker has."""

    queued: QueuedRequest
    assembly: StreamAssembly
    is_adopted: bool


class OutputCharges:
    """Charges the tenants of what runs, all of it once in CHARGE_OUTPUT_S, a part of it in each turn of the loop.

    Args:
        charge: told a request and how many output tokens it has in all; a request may be told again.
    """

    def __init__(self, charge: Callable[[QueuedRequest, int], None]) -> None:
        self._charge = charge
        self._due: list[Running] = []
        self._next = 0.0

    def turn(self, running: Iterable[Running], now: float) -> None:
        """Charges the next part of `running`."""
        if not self._due and now >= self._next:
            self._next = now + CHARGE_OUTPUT_S
            self._due = list(running)
        part, self._due = self._due[-CHARGED_PER_TURN:], self._due[:-CHARGED_PER_TURN]
        for each in part:
            self.settle(each)

    def settle(self, ended: Running) -> None:
        """Charges all that has come of a request, but for what another router's sequence brings a second time.

        An answer that is generated a second time, because its client knows its text alone, is charged like any other:
        it takes its steps again, and a client may ask for it as often as it likes.
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
    """Requests from their release to the end of the attempt; takes what the workers report (`SequenceEvents`).

    Attributes:
        lost: attempts that ended before their request, by `Loss`.
        num_releases: groups of requests that have gone to a worker.
        num_released: requests in them.
        num_adopted: sequences of other routers that requests have gone on with.
        num_unadopted: those that were not there any more, or did not go on behind what had come.
        dispatch_soon: called when a decision may come out otherwise than before.

    Args:
        dispatcher: takes back what has to go elsewhere.
        policy: where a request that has tokens may go on.
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
        self.lost: Counter[str] = Counter()
        self.num_releases = self.num_released = self.num_adopted = self.num_unadopted = 0
        self.dispatch_soon = dispatch_soon
        self._dispatcher = dispatcher
        self._policy = policy
        self._clock = clock
        self._charges = OutputCharges(dispatcher.shares.charge_output)
        self._incarnation = secrets.randbits(64 - _COUNTER_BITS) << _COUNTER_BITS
        self._counter = itertools.count(1)
        # On which requests can be sent, by address.
        self._sessions: dict[str, Session] = {}
        self._suspects = SuspectStreams(dispatcher, dispatch_soon)

    # To the workers.

    def submit(self, release: Release, streams: Sequence[RequestStream], now: float) -> None:
        """Sends a group to its worker."""
        session = self._sessions[release.worker]
        group: list[Submission] = []
        for stream in streams:
            try:
                group.append(self._begin(stream, session, now))
            except Exception:
                # Nobody else has it any more: it would wait for ever.
                failed(DISPATCHING, "request not sent", worker=session.address, **stream.request.ids)
                self.unbind(stream)
                stream.fail(RouterFailedError())
        self.num_releases += 1
        self.num_released += len(group)
        session.state.submit(release.serial, group)
        session.notify()

    @property
    def may_adopt(self) -> bool:
        """True if some worker lets this router adopt what others leave there."""
        return any(session.may_adopt for session in self._sessions.values())

    def can_adopt(self, queued: QueuedRequest, address: str) -> bool:
        """True if the worker at `address` may be asked for a sequence that is to go on for a request."""
        session = self._sessions.get(address)
        if session is None or session.is_draining or session.is_leaving or not session.may_adopt:
            return False
        return queued.numerics in (None, session.numerics)

    def adopt(self, stream: RequestStream, address: str) -> None:
        """Asks a worker for the sequence of another router with which a request goes on. It passes no queue: the
        sequence has its place there already."""
        session = self._sessions[address]
        adoption = stream.begin_adoption(session, self._incarnation | next(self._counter), self._clock())
        session.state.adopt(adoption)
        session.notify()

    def announce(self, addresses: Iterable[str]) -> None:
        """Tells workers what waits for them here."""
        for address in addresses:
            if (session := self._sessions.get(address)) is not None:
                session.state.announce(self._dispatcher.lanes[address].record())
                session.notify()

    def charge_output(self, running: Iterable[RequestStream], now: float) -> None:
        """Charges tenants for some of what has come of their running requests."""
        self._charges.turn(running, now)

    def unbind(self, stream: RequestStream) -> None:
        """Takes a stream off its session; a no-op when it is on none."""
        session, stream.session = stream.session, None
        if session is None:
            return
        if stream.is_adopted and (stream.assembly.is_closed or stream.attempts.has_begun(stream.assembly.num_tokens)):
            self.num_adopted += 1
        stream.attempts.end(stream.assembly.num_tokens, self._clock())
        self._suspects.release(stream, session.address)
        self._charges.settle(stream)
        session.state.cancel(stream.rid)
        session.notify()

    def _begin(self, stream: RequestStream, session: Session, now: float) -> Submission:
        # A request goes back once at most: a fleet that is full everywhere would pass it around for ever.
        must_keep = stream.was_returned or not self._can_go_elsewhere(stream, session.address)
        rid = self._incarnation | next(self._counter)
        if stream.queued.alone:
            self._suspects.add(stream, rid)
        return stream.begin(session, rid, now, must_keep=must_keep)

    def _can_go_elsewhere(self, stream: RequestStream, address: str) -> bool:
        """True if another worker than the one at `address` could take a request."""
        queued = stream.queued
        if queued.only_worker:
            return False
        return self._dispatcher.lanes.can_serve(
            queued.model, queued.numerics, queued.most_tokens, grammar_engine=queued.grammar_engine, but=address
        )

    def workers_of(self, identity: str, numerics: str) -> dict[str, str]:
        """Addresses, by worker id, of the workers of a model and numerics class that take work."""
        return {
            session.worker_id: session.address
            for session in self._sessions.values()
            if session.accepting and session.model is not None
            if session.model.identity == identity and session.numerics == numerics
        }

    # From the workers (`SequenceEvents`).

    def worker_up(self, session: Session) -> None:
        """Requests can be sent on this session from now on."""
        self._sessions[session.address] = session

    def worker_down(self, session: Session) -> None:
        """Sends nothing more on this session, which has ended."""
        del self._sessions[session.address]

    def take_over(self, session: Session) -> None:
        """Lets requests go on on the next stream to their worker: it has not died of any of them."""
        for stream in _streams(session.state.live.values()):
            stream.session = session
            self._suspects.clear(stream, stream.rid)

    def carry_out(self, session: Session, effects: StepEffects) -> None:
        """Lets streams that have news write, and ends or moves those that have left the session."""
        for touched in effects.touched:
            touched.wake()
        for ended in _streams(effects.ended):
            self.unbind(ended)
        self._suspects.clear_passed()
        session.notify()
        for returned in reversed(_streams(effects.returned)):
            self._requeue_unstarted(returned, session.address)
        self._fail_over([(cast("RequestStream", each), loss) for each, loss in effects.lost], "ended the request")
        for refused, end in effects.refused:
            self._refuse(cast("RequestStream", refused), session.address, end)

    def lose(self, session: Session, loss: Loss, why: str) -> None:
        """Moves what a session has left, which nobody takes up."""
        self._fail_over([(stream, loss) for stream in _streams(session.state.live.values())], why)

    def forget(self, session: Session, rids: Iterable[int]) -> None:
        """Moves what a worker has let go."""
        gone = _streams(session.state.forget(rids))
        self._fail_over([(stream, Loss.FORGOTTEN) for stream in gone], "the worker has let it go")

    def return_unwritten(self, session: Session) -> None:
        """Routes again what cannot be at the worker, because it was not written whole."""
        for stream in reversed(_streams(session.state.unwritten())):
            self._requeue_unstarted(stream)

    def hand_over(self, session: Session) -> None:
        """Moves what runs on a draining worker to those who can go on with it."""
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

    # What becomes of a request.

    def _fail_over(self, lost: list[tuple[RequestStream, Loss]], why: str) -> None:
        """Sends streams whose attempt is over on another one, ahead of what waits and in their order, or ends them."""
        self.lost.update(loss.value for _, loss in lost)
        culprits = {stream.session for stream, _ in lost if stream.attempts.is_alone}
        for stream, loss in sorted(lost, key=lambda pair: pair[0].queued.key, reverse=True):
            excused = stream.session in culprits and not stream.attempts.is_alone
            stream.attempts.end(stream.assembly.num_tokens, self._clock(), loss, excused=excused)
            self.unbind(stream)
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
        """Queues a stream for its next attempt, unless there must be none."""
        now, verdict = self._clock(), stream.attempts.verdict()
        if stream.assembly.is_closed:
            return
        if stream.queued.deadline is not None and stream.queued.deadline <= now:
            stream.fail(DeadlineError("when its worker was lost"))
        elif verdict is Verdict.POISON:
            stream.fail(PoisonRequestError(stream.attempts.deaths))
        elif verdict is Verdict.GIVE_UP:
            stream.assembly.lose_worker(f"{len(stream.attempts)} workers were lost; the last one: {why}")
        else:
            stream.queued.tokens = stream.assembly.num_tokens
            wanted = stream.attempts.numerics_wanted(self._policy, stream.assembly.num_tokens)
            stream.queued.numerics = wanted
            stream.queued.alone = verdict is Verdict.ALONE
            self._dispatcher.requeue(stream.queued, now, excluded_worker=stream.refused_by)

    def _refuse(self, stream: RequestStream, address: str, end: wpb.SequenceEnd) -> None:
        """Tries a request that a worker refuses on another one.

        It fails as the worker says when nobody else could take it, or a second worker refuses it from the start: this
        router found it valid, so it is the router that is wrong.
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
        """Routes a request again that did not count as an attempt (rule S9): the worker at `address` gave it back, or
        none has had it."""
        self.unbind(stream)
        stream.attempts.return_unstarted()
        if stream.is_adopted:
            self._arrive_unadopted(stream)
            return
        stream.was_returned = stream.was_returned or bool(address)
        self._dispatcher.requeue(stream.queued, self._clock(), excluded_worker=address or stream.refused_by)

    def _arrive_unadopted(self, stream: RequestStream) -> None:
        """Queues a request behind the others: there was nothing to go on with, so it has all to wait and to pay for."""
        stream.is_adopted = False
        self.num_unadopted += 1
        self._dispatcher.rejoin(stream.queued, self._clock())
        self.dispatch_soon()


def _streams(sequences: Iterable[RunningRequest]) -> list[RequestStream]:
    """Requests among the sequences of a session, which are all of them: `submit` alone puts any there."""
    return cast("list[RequestStream]", list(sequences))
