"""An engine, and routers with sessions to it, for tests: frames in, steps, frames out."""

from __future__ import annotations

from dataclasses import dataclass, field

from fissile.worker.v1 import worker_pb2 as wpb
from opentelemetry.sdk.trace import TracerProvider

from common.telemetry.tracing import SpanFactory
from tests.unit.worker.session.support import (
    FACTS,
    SteppedEngine,
    simulated_core,
)
from worker.session.fleet_backlog import FleetLanes
from worker.session.router_state import RouterSequences
from worker.session.session import WorkerSession, check_hello
from worker.session.worker_info import WorkerFacts


@dataclass
class Stream:
    """What a router knows of one sequence."""

    tokens: list[int]
    start: wpb.SequenceStart | None = None
    end: wpb.SequenceEnd | None = None


class World:
    """One worker and the virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine = SteppedEngine(simulated_core(clock=lambda: self.now), lambda: self.now)
        self.lanes = FleetLanes()
        self.tracing = SpanFactory(TracerProvider())

    def router(self, lease_ms: int = 5000) -> Router:
        return Router(self, lease_ms)


@dataclass
class Router:
    """The other end: writes frames, reads frames, checks them."""

    world: World
    lease_ms: int
    streams: dict[int, Stream] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    submit_seen: int = 0
    load: wpb.Load = field(default_factory=wpb.Load)
    wakes: int = 0

    def __post_init__(self) -> None:
        self.sequences = RouterSequences("r", FACTS, self.world.engine, self.world.tracing)
        self.dial({})

    def dial(self, live: dict[int, int]) -> None:
        """Begins a stream; `live` is what Hello says."""
        kept = [wpb.LiveSequence(rid=rid, have=have) for rid, have in live.items()]
        hello = check_hello(wpb.SessionRequest(hello=wpb.Hello(router_id="r", lease_ms=self.lease_ms, live=kept)))
        world = self.world
        self.frames.clear()
        self.state = WorkerSession(hello, self.sequences, FACTS, world.engine, world.lanes, world.now, self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def write(self, frame: wpb.SessionRequest) -> None:
        for sequence in frame.submit.seqs:
            self.streams.setdefault(sequence.rid, Stream(list(sequence.token_ids)))
        if frame.HasField("extend"):
            self.streams[frame.extend.rid].tokens += frame.extend.token_ids
        self.state.receive(frame, self.world.now)

    def read(self, at_most: int = 1000) -> None:
        for _ in range(at_most):
            frame = self.state.next_frame(self.world.now)
            if frame is None:
                return
            kind = frame.WhichOneof("frame")
            assert kind is not None
            self.frames.append(kind)
            assert (kind == "welcome") == (len(self.frames) == 1)
            if kind == "welcome":
                self.unknown = list(frame.welcome.unknown)
            if kind == "step_output":
                self._read_step(frame.step_output)
            elif kind in ("heartbeat", "welcome"):
                self.load = frame.heartbeat.load if kind == "heartbeat" else frame.welcome.load

    def _read_step(self, step: wpb.StepOutput) -> None:
        self.submit_seen, self.load = step.submit_seen, step.load
        for start in step.starts:
            assert self.streams[start.rid].start is None
            self.streams[start.rid].start = start
        at = 0
        for rid, first_pos, n in zip(step.rid, step.first_pos, step.n, strict=True):
            stream = self.streams[rid]
            assert stream.start is not None
            assert stream.end is None
            assert first_pos == len(stream.tokens)
            stream.tokens += step.token_ids[at : at + n]
            at += n
        for end in step.ends:
            stream = self.streams[end.rid]
            assert stream.end is None
            if end.reason != wpb.END_REASON_INVALID:
                assert end.end_pos == len(stream.tokens)
            stream.end = end
        self.returned += step.returned

    def reasons(self) -> dict[int, int]:
        return {rid: stream.end.reason for rid, stream in self.streams.items() if stream.end is not None}


def run(world: World, *routers: Router, steps: int = 40) -> None:
    for _ in range(steps):
        world.now += 0.01
        world.engine.step()
        for router in routers:
            router.read()


def opened(
    world: World, router_id: str, kv_seq: int = 0, facts: WorkerFacts = FACTS
) -> tuple[WorkerSession, wpb.Welcome]:
    hello = wpb.Hello(router_id=router_id, lease_ms=5000, kv_seq=kv_seq)
    sequences = RouterSequences(router_id, facts, world.engine, world.tracing)
    state = WorkerSession(hello, sequences, facts, world.engine, world.lanes, world.now, lambda: None)
    first = state.next_frame(world.now)
    assert first is not None
    return state, first.welcome
