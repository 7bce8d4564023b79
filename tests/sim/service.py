"""Router and workers in one process under a virtual clock: the production objects, joined by simulated wires.

Real: Fleet, Dispatcher, Link, StreamAssembly on the router's side; SessionState, Inbox, Outbox, EngineTurns,
EngineCore, Scheduler and BlockManager on the worker's. Simulated: time, the wires (delay, order kept, one frame at a
time in each direction, breaks) and the model.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.message import Message

from common.config import Config
from common.delay_gate import DelayGate
from common.limits import HEARTBEAT_S, LEASE_S
from common.telemetry.tracing import Tracing
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from router.model_registry import ModelRegistry, TextAssets, describe
from router.placement import RoundRobin
from router.session import Session
from router.tokenizer_store import TokenizerStore
from tests.sim.virtual_time import VirtualLoop
from worker.cost_model import FixedCost
from worker.engine_core import EngineCore, LoadReport
from worker.engine_turns import Cancel, Command, Deliveries, EngineTurns, Listener, Submit
from worker.facts import WorkerFacts
from worker.fleet_lanes import FleetLanes
from worker.router_sequences import RouterSequences
from worker.sequence import Sequence
from worker.session_state import SessionState, check_hello
from worker.simulated import SimulatedRunner

MODEL = "simulated"
VOCAB_SIZE = 97
EOS_ID = 1
MAX_MODEL_LEN = 256
BLOCK_SIZE = 16
# A step takes 4 ms and 50 us per token.
COST = FixedCost(0.004, 0.00005)


class Wire:
    """One direction of a stream: frames arrive in order, after a delay, as copies.

    Args:
        loop: the virtual clock.
        rnd: draws the delays.
        slowest: longest delay, seconds.
        deliver: gets what arrives.
        written: called when the next frame may be written.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rnd: random.Random,
        slowest: float,
        deliver: Callable[[Any], None],
        written: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._rnd = rnd
        self._slowest = slowest
        self._deliver = deliver
        self._written = written
        self._busy = False
        self._cut = False

    @property
    def is_free(self) -> bool:
        """Whether a frame may be written."""
        return not self._busy and not self._cut

    def cut(self) -> None:
        """Loses what is on its way, and all that comes later."""
        self._cut = True

    def write(self, frame: Message) -> None:
        """Sends one frame."""
        assert self.is_free
        self._busy = True
        self._loop.call_later(self._rnd.uniform(0, self._slowest), self._arrive, type(frame), frame.SerializeToString())

    def _arrive(self, kind: type[Message], data: bytes) -> None:
        if self._cut:
            return
        self._busy = False
        self._deliver(kind.FromString(data))
        self._written()


class SimWorker:
    """A worker: engine turns on the virtual loop, and one SessionState per connection. Implements `Engine`."""

    def __init__(self, loop: VirtualLoop, name: str, config: Config) -> None:
        self.name = name
        self.runner = SimulatedRunner(
            VOCAB_SIZE,
            EOS_ID,
            COST,
            eos_every=150,
            block_size=config.kv_cache_block_size,
            num_blocks=config.num_kvcache_blocks,
            clock=loop.time,
            sleep=loop.advance,
        )
        self.core = EngineCore(config, self.runner, loop.time)
        self.lanes = FleetLanes()
        self.facts = WorkerFacts(
            worker_id=name,
            instance_id=f"{name}-1",
            model=MODEL,
            architecture="Simulated",
            tokenizer_sha256="",
            version="0",
            block_size=config.kv_cache_block_size,
            hash_seed=config.hash_seed,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            total_blocks=config.num_kvcache_blocks,
        )
        self._loop = loop
        self._turns = EngineTurns(self.core, loop.time)
        self._deliveries = Deliveries()
        self._commands: deque[Command] = deque()
        self._turn_due = False

    @property
    def load(self) -> LoadReport | None:
        """The load at this moment."""
        return self.core.load()

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self.core.num_steps

    def busy_s(self, now: float) -> float:
        """A turn is over before anybody can ask."""
        return 0.0

    def submit_group(self, listener: Listener, serial: int, seqs: Many[Sequence]) -> None:
        """Takes a group."""
        self._deliveries.add(listener, seqs)
        self._put(Submit(listener, serial, seqs))

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences."""
        self._put(Cancel(list(seq_ids)))

    @property
    def num_live(self) -> int:
        """Sequences whose end has not been delivered."""
        return len(self._deliveries)

    def _put(self, command: Command) -> None:
        self._commands.append(command)
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        commands = list(self._commands)
        self._commands.clear()
        turn = self._turns.run(commands)
        self.core.scheduler.check_integrity()
        self._deliveries.deliver(turn)
        if self._turns.has_work:
            self._turn_soon()


class Connection(Session):
    """The stream between the router and one worker: a router Session whose shell is simulated."""

    def __init__(self, loop: VirtualLoop, rnd: random.Random, fleet: Fleet, worker: SimWorker, slowest: float) -> None:
        super().__init__(worker.name, "router", loop.time)
        self.worker_id = worker.name
        self.model = describe(worker.facts.to_proto(wpb.WORKER_STATE_SERVING), TextAssets())
        self._loop = loop
        self._fleet = fleet
        self._worker = worker
        self._state: SessionState | None = None
        self._is_up = False
        self._up = Wire(loop, rnd, slowest, self._worker_reads, self._router_writes)
        self._down = Wire(loop, rnd, slowest, self._router_reads, self._worker_writes)
        self._router_writes()
        self._beat()

    def notify(self) -> None:
        """The link has something to write."""
        self._loop.call_soon(self._router_writes)

    def break_off(self) -> None:
        """Loses the stream with whatever is in flight: each end finds out by itself."""
        self._up.cut()
        self._down.cut()
        if self._state is not None:
            self._state.close()
            self._sequences.end()
        if self._is_up:
            self._fleet.session_down(self, "the wire was cut")

    def _worker_wakes(self) -> None:
        self._loop.call_soon(self._worker_writes)

    def _worker_writes(self) -> None:
        if self._state is not None and self._down.is_free:
            frame = self._state.next_frame(self._loop.time())
            if frame is not None:
                self._down.write(frame)

    def _beat(self) -> None:
        """What the shells do by the clock: heartbeats down, lease renewals up."""
        if not (self._up.is_free or self._down.is_free) and self._state is None:
            return
        self._worker_writes()
        if self._is_up:
            self._fleet.renew_lease(self)
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _router_writes(self) -> None:
        if self._up.is_free:
            frame = self.link.next_frame(self._loop.time())
            if frame is not None:
                self._up.write(frame)

    def _worker_reads(self, frame: wpb.SessionRequest) -> None:
        now = self._loop.time()
        if self._state is None:
            hello = check_hello(frame)
            worker = self._worker
            self._sequences = RouterSequences(hello.router_id, worker.facts, worker, Tracing())
            self._state = SessionState(
                hello, self._sequences, worker.facts, worker, worker.lanes, now, self._worker_wakes
            )
        else:
            assert self._state.lease_left(now) > 0, f"no frame for {LEASE_S} s"
            self._state.receive(frame, now)
        self._worker_writes()

    def _router_reads(self, frame: wpb.SessionResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "welcome":
            self._is_up = True
            self._fleet.session_up(self, frame.welcome)
        elif kind == "step_output":
            self._fleet.step_output(self, frame.step_output)
        elif kind == "heartbeat":
            self._fleet.heartbeat(self, frame.heartbeat)


class SimService:
    """One router, its workers and the connections between them.

    Args:
        loop: the virtual clock.
        rnd: draws delays.
        num_workers: size of the fleet.
        num_blocks: KV blocks of each worker.
        delay_factor: of the router's gate.
        slowest: longest delay of a frame, seconds.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rnd: random.Random,
        *,
        num_workers: int = 2,
        num_blocks: int = 40,
        delay_factor: float = 0.0,
        slowest: float = 0.02,
    ) -> None:
        config = Config(
            max_num_seqs=8,
            max_num_batched_tokens=96,
            kv_cache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=num_blocks,
            enable_prefix_caching=True,
            max_model_len=MAX_MODEL_LEN,
            eos_token_id=EOS_ID,
        )
        self._loop = loop
        self._rnd = rnd
        self._slowest = slowest
        self.workers = [SimWorker(loop, f"worker-{i}", config) for i in range(num_workers)]
        self.dispatcher = Dispatcher(DelayGate(delay_factor), RoundRobin())
        self.fleet = Fleet(self.dispatcher, ModelRegistry(), TokenizerStore(), lambda: None, clock=loop.time)
        self.connections = [self._connect(worker) for worker in self.workers]

    def break_connection(self, i: int) -> None:
        """Breaks the stream to worker `i` and dials again."""
        self.connections[i].break_off()
        self.connections[i] = self._connect(self.workers[i])

    def _connect(self, worker: SimWorker) -> Connection:
        return Connection(self._loop, self._rnd, self.fleet, worker, self._slowest)

    def check_nothing_left(self) -> None:
        """Asserts that no trace of any request is left anywhere."""
        assert self.fleet.in_flight == 0
        assert len(self.dispatcher) == 0
        assert all(not connection.link.live for connection in self.connections)
        for worker in self.workers:
            load = worker.core.load()
            assert worker.num_live == 0
            assert (load.decoding_seqs, load.waiting_seqs) == (0, 0)
            assert load.free_blocks == load.total_blocks
            worker.core.scheduler.check_integrity()
