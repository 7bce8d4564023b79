"""The workers and the requests on their way: Dispatcher, Sessions and streams wired together on one event loop.

Everything a request leaves behind is removed by `close`, on every path. Invariants:
  * `_streams` holds exactly the requests whose handler has not closed them.
  * A stream is queued in the dispatcher, or runs under one rid on one session, or its assembly is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, DeadlineError, NoWorkerError, QueueFullError
from common.sampling_params import SamplingParams
from router.assembly import Part, StreamAssembly
from router.dispatcher import Dispatcher, Release
from router.lane import LaneRecord, LoadReport
from router.link import Submission
from router.model_registry import ModelRegistry, WorkerRefusedError
from router.queue import QueuedRequest
from router.session import Session, keep_connected
from router.tokenizer_store import TokenizerStore

# A rid is the router's incarnation above a counter: unique over the life of the worker too (rule S1).
_COUNTER_BITS = 40
_NOTHING_WAITS = LaneRecord(None, 0, 0)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that has passed validation.

    Attributes:
        model: name of its model.
        token_ids: the prompt.
        params: canonical parameters.
        seed: seed in force (uint64).
        chain_hash: hash of the prompt's last full block, 0 when it has none.
        cache_salt: of the prefix cache; requests of different salts share nothing.
        priority: its class in the worker's scheduler; the same numbers in both protos.
        arrival: monotonic seconds of its arrival at the router.
        deadline: monotonic seconds of the client's deadline, None for none.
        traceparent: W3C trace context of the router's span, "" for none.
        tracestate: W3C trace state.
    """

    model: str
    token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    chain_hash: int
    arrival: float
    cache_salt: bytes = b""
    priority: int = wpb.PRIORITY_NORMAL
    deadline: float | None = None
    traceparent: str = ""
    tracestate: str = ""

    def to_record(self, rid: int) -> wpb.SubmitSequence:
        """The request as the worker gets it, without what depends on the frame."""
        params = self.params
        return wpb.SubmitSequence(
            rid=rid,
            prompt_len=len(self.token_ids),
            params=wpb.SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                ignore_eos=params.ignore_eos,
                stop_token_ids=params.stop_token_ids,
                stop_token_sequences=[wpb.TokenIds(ids=ids) for ids in params.stop_token_sequences],
            ),
            seed=self.seed,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
            chain_hash=self.chain_hash,
            cache_salt=self.cache_salt,
            priority=wpb.Priority.ValueType(self.priority),
        )


class RequestStream:
    """A request on its way, as its RPC handler sees it.

    Attributes:
        on_submit: told the worker's id at every submission.
        submitted: monotonic seconds of its submission to the worker, None while it is queued.
        attempts: number of workers it was submitted to.
    """

    def __init__(
        self,
        queued: QueuedRequest,
        request: RoutedRequest,
        assembly: StreamAssembly,
        on_submit: Callable[[str], None],
    ) -> None:
        self.queued = queued
        self.request = request
        self.assembly = assembly
        self.on_submit = on_submit
        self.session: Session | None = None
        self.rid = 0
        self.submitted: float | None = None
        self.attempts = 0
        self._changed = asyncio.Event()

    async def next(self) -> Part:
        """Waits for the next part of the answer.

        Raises:
            ApiError: the request has failed.
        """
        while (part := self.assembly.take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return part

    def wake(self) -> None:
        """The assembly has changed."""
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with a status."""
        self.assembly.fail(error)
        self.wake()


class Fleet:
    """All workers and all requests of this router.

    Args:
        dispatcher: decides what goes where and when.
        registry: learns the models from the workers.
        store: fetches their tokenizers.
        serving_changed: called when a first worker serves, and when the last one is gone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: ModelRegistry,
        store: TokenizerStore,
        serving_changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._store = store
        self._serving_changed = serving_changed
        self._clock = clock
        self._router_id = secrets.token_hex(8)
        self._incarnation = secrets.randbits(64 - _COUNTER_BITS) << _COUNTER_BITS
        self._counter = itertools.count(1)
        self._sessions: dict[str, Session] = {}
        # Who holds which instance, from before the Hello to the end.
        self._instances: dict[str, Session] = {}
        self._announced: dict[str, LaneRecord] = {}
        self._streams: dict[int, RequestStream] = {}
        self._running: dict[int, RequestStream] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pump_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Number of requests that have not been closed."""
        return len(self._streams)

    def start(self, addresses: Iterable[str]) -> None:
        """Begins to dial the workers."""
        for address in addresses:
            self._tasks.append(asyncio.create_task(self._connect(address), name=f"worker {address}"))

    async def stop(self) -> None:
        """Ends all sessions; the workers drop what still runs there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in (self._pump_due, self._timer):
            if handle is not None:
                handle.cancel()

    def open(self, request: RoutedRequest, assembly: StreamAssembly, on_submit: Callable[[str], None]) -> RequestStream:
        """Sends a request on its way. The caller closes the stream on every path.

        Raises:
            NoWorkerError: no worker serves its model.
            QueueFullError: too many requests wait.
        """
        key = next(self._counter)
        queued = QueuedRequest(key, request.model, len(request.token_ids), request.arrival, request.deadline)
        try:
            self._dispatcher.arrive(queued)
        except QueueFullError:
            # What is about to be released does not count: the queue is full only if it is full after that.
            if self._pump_due is None:
                raise
            self._pump_due.cancel()
            self._pump()
            self._dispatcher.arrive(queued)
        stream = self._streams[key] = RequestStream(queued, request, assembly, on_submit)
        self._pump_soon()
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forgets a request; cancels it where it waits or runs."""
        del self._streams[stream.queued.key]
        if self._dispatcher.cancel(stream.queued.key):
            self._pump_soon()
        self._detach(stream)

    def session_opening(self, session: Session) -> None:
        """Refuses a second session with one worker (`SessionEvents`)."""
        holder = self._instances.setdefault(session.instance_id, session)
        if holder is not session:
            raise WorkerRefusedError(f"is the worker at {holder.address} by another address")

    def session_closed(self, session: Session) -> None:
        """Lets another session have the worker (`SessionEvents`)."""
        if self._instances.get(session.instance_id) is session:
            del self._instances[session.instance_id]

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """Counts the worker in (`SessionEvents`)."""
        if session.model is None:
            raise WorkerRefusedError("it serves no model")
        limits = welcome.limits or wpb.Limits()
        model = replace(session.model, max_model_len=limits.max_model_len or session.model.max_model_len)
        was_serving = self._registry.serving
        self._registry.admit(session.address, model)
        self._sessions[session.address] = session
        self._announced[session.address] = _NOTHING_WAITS
        self._dispatcher.lane_up(session.address, model.name, self._load_report(welcome.load, 0))
        log.info("worker up", worker=session.address, worker_id=session.worker_id, model=model.name)
        if not was_serving:
            self._serving_changed()
        self._pump_soon()

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Hands tokens to their streams (`SessionEvents`)."""
        effects = session.link.apply(step, self._clock())
        for rid in effects.touched:
            stream = self._running[rid]
            if rid not in session.link.live:
                self._detach(stream)
            stream.wake()
        session.notify()
        for rid in reversed(effects.returned):
            self._requeue(self._running[rid])
        if step.HasField("load"):
            self._dispatcher.report(session.address, self._load_report(step.load, step.submit_seen))
            self._pump_soon()

    def heartbeat(self, session: Session, heartbeat: wpb.Heartbeat) -> None:
        """Takes the load (`SessionEvents`)."""
        self._dispatcher.report(session.address, self._load_report(heartbeat.load, heartbeat.submit_seen))
        self._pump_soon()

    def renew_lease(self, session: Session) -> None:
        """Sends a Lane frame (`SessionEvents`)."""
        session.link.announce(self._dispatcher.lane_record(session.address))
        session.notify()

    def draining(self, session: Session) -> None:
        """Sends the worker nothing more (`SessionEvents`)."""
        log.info("worker draining", worker=session.address, worker_id=session.worker_id)
        self._leave(session, self._dispatcher.lane_draining(session.address))

    def session_down(self, session: Session, why: str) -> None:
        """Ends what ran on the worker (`SessionEvents`)."""
        del self._sessions[session.address]
        del self._announced[session.address]
        self._leave(session, self._dispatcher.lane_down(session.address))
        for stream in [stream for stream in self._running.values() if stream.session is session]:
            stream.assembly.lose_worker(f"worker {session.worker_id} was lost: {why}")
            self._detach(stream)
            stream.wake()

    async def _connect(self, address: str) -> None:
        await keep_connected(lambda: Session(address, self._router_id, self._clock), self._store, self)

    def _leave(self, session: Session, dropped: list[int]) -> None:
        """The worker takes no more work: `dropped` are the keys of queued requests that nobody else can serve."""
        was_serving = self._registry.serving
        self._registry.release(session.address)
        for key in dropped:
            self._streams[key].fail(NoWorkerError("the last worker of the model is gone"))
        if was_serving and not self._registry.serving:
            self._serving_changed()
        self._pump_soon()

    def _detach(self, stream: RequestStream) -> None:
        """Takes a stream off its session; a no-op when it is on none."""
        session, stream.session = stream.session, None
        if session is None:
            return
        del self._running[stream.rid]
        session.link.cancel(stream.rid)
        session.notify()

    def _requeue(self, stream: RequestStream) -> None:
        """Routes a request again that its worker gave back; that does not count as an attempt (rule S9)."""
        self._detach(stream)
        stream.attempts -= 1
        try:
            self._dispatcher.requeue(stream.queued)
        except NoWorkerError as error:
            stream.fail(error)

    def _pump_soon(self) -> None:
        """Decides once for all events of this turn of the loop."""
        if self._pump_due is None:
            self._pump_due = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = None
        now = self._clock()
        for key in self._dispatcher.expire(now):
            self._streams[key].fail(DeadlineError("in the router's queue"))
        for release in self._dispatcher.decide(now):
            self._submit(release, now)
        for address in self._sessions:
            self._announce(address)
        self._set_timer(now)

    def _submit(self, release: Release, now: float) -> None:
        session = self._sessions[release.worker]
        group: list[Submission] = []
        for queued in release.requests:
            stream = self._streams[queued.key]
            stream.rid = self._incarnation | next(self._counter)
            stream.session = session
            stream.submitted = now
            stream.attempts += 1
            stream.assembly.worker_id = session.worker_id
            stream.on_submit(session.worker_id)
            self._running[stream.rid] = stream
            request = stream.request
            record = request.to_record(stream.rid)
            group.append(Submission(record, request.token_ids, stream.assembly, request.deadline))
        session.link.submit(release.serial, group)
        session.notify()

    def _announce(self, address: str) -> None:
        record = self._dispatcher.lane_record(address)
        if record != self._announced[address]:
            self._announced[address] = record
            self._sessions[address].link.announce(record)
            self._sessions[address].notify()

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._dispatcher.next_timer(now)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._pump_soon)

    def _load_report(self, load: wpb.Load, submit_seen: int) -> LoadReport:
        return LoadReport(
            time=self._clock(),
            decoding_seqs=load.decoding_seqs,
            waiting_seqs=load.waiting_seqs,
            waiting_tokens=load.waiting_tokens,
            room_tokens=load.room_tokens,
            room_seqs=load.room_seqs,
            last_prompt_latency_s=load.last_prompt_latency_us / 1e6,
            prefill_rate=load.prefill_rate,
            fleet_oldest_age_s=load.fleet_oldest_age_ms / 1e3,
            fleet_tokens=load.fleet_tokens,
            submit_seen=submit_seen,
        )
