"""Router and workers in one process under a virtual clock: the production objects, joined by simulated wires.

Real: Fleet, Dispatcher, Link, StreamAssembly on the router's side; WorkerSession, Inbox, Outbox, EngineTurns,
EngineCore, Scheduler and BlockManager on the worker's. Simulated: time, the wires (delay, order kept, one frame at a
time in each direction, breaks) and the model.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.message import Message

from common.config import Config
from common.delay_gate import DelayGate
from common.limits import HEARTBEAT_S, KV_EVENTS_S, LEASE_S, MAX_QUEUED_REQUESTS, WORKER_WAIT_S
from common.process.tasks import task_failures
from common.rpc.tls import Dialer
from common.telemetry.tracing import SpanFactory
from router.answers.stream_assembly import GapError
from router.model_registry import ModelRegistry, TextAssets, describe
from router.prompts.tokenizer_store import TokenizerStore
from router.requests.request_router import RequestRouter
from router.scheduling.failover import FailoverOptions
from router.scheduling.placement import Placement, PrefixAware, RoundRobin
from router.workers.orphans import OrphanTable
from router.workers.session import Fault, Session, SessionLostError
from router.workers.session_state import ProtocolError
from router.workers.worker_pool import WorkerPool
from tests.sim.virtual_time import VirtualLoop
from tests.unit.router.scheduling.dispatching import make_dispatcher
from worker.engine.core import EngineCore
from worker.engine.outputs import EngineLoad
from worker.engine.step_record import StepRing
from worker.engine.turns import Cancel, Command, EngineTurns, SetDeadline, Submit, TicketReceipt
from worker.session.adoption import Orphans
from worker.session.cache_events import KvLog
from worker.session.deliveries import Deliveries, OwnedSequence
from worker.session.fleet_backlog import FleetLanes
from worker.session.router_state import RouterSequences
from worker.session.session import WorkerSession, check_hello
from worker.session.worker_info import WorkerFacts
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

MODEL = "simulated"
VOCAB_SIZE = 97
EOS_ID = 1
MAX_MODEL_LEN = 256
BLOCK_SIZE = 16
# Small, so that routers often return too late for the missing changes.
KV_LOG_CAPACITY = 24
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
        self._swallows = False

    @property
    def is_free(self) -> bool:
        """Whether a frame may be written."""
        return not self._busy and not self._cut

    def cut(self) -> None:
        """Loses every message in flight and all later ones."""
        self._cut = True

    def swallow(self) -> None:
        """Takes frames from now on, and delivers none: the other end of the connection is gone unnoticed."""
        self._swallows = True
        self._busy = False

    def write(self, frame: Message) -> None:
        assert self.is_free
        if self._swallows:
            return
        self._busy = True
        self._loop.call_later(self._rnd.uniform(0, self._slowest), self._arrive, type(frame), frame.SerializeToString())

    def _arrive(self, kind: type[Message], data: bytes) -> None:
        if self._cut or self._swallows:
            return
        self._busy = False
        self._deliver(kind.FromString(data))
        self._written()


class SimWorker:
    """A worker: engine turns on the virtual loop, and one WorkerSession per connection. Implements `SessionEngine`."""

    def __init__(self, loop: VirtualLoop, name: str, config: Config, incarnation: int = 1) -> None:
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
        self.kv_log = KvLog(KV_LOG_CAPACITY)
        self.facts = WorkerFacts(
            worker_id=name,
            instance_id=f"{name}-{incarnation}",
            model=MODEL,
            architecture="Simulated",
            tokenizer_sha256="",
            version="0",
            numerics=MODEL,
            block_size=config.kv_cache_block_size,
            hash_seed=config.hash_seed,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            total_blocks=config.num_kvcache_blocks,
        )
        self.is_dead = self.is_frozen = False
        self.intake = wpb.INTAKE_OPEN
        self.thaw_calls: list[Callable[[], None]] = []
        self.routers: dict[str, RouterSequences] = {}
        self.orphans: Orphans[RouterSequences] = Orphans()
        self._streams: dict[str, WorkerSession] = {}
        self._loop = loop
        self._turns = EngineTurns(self.core, loop.time)
        self._deliveries = Deliveries()
        self._commands: deque[Command] = deque()
        self._turn_due = False

    def open(self, hello: wpb.Hello, wake: Callable[[], None]) -> WorkerSession:
        """A router's stream begins; it fences an older one (S4), as WorkerService does."""
        router_id = hello.router_id
        sequences = self.routers.get(router_id)
        if sequences is None:
            sequences = self.routers[router_id] = RouterSequences(
                router_id, self.facts, self, SpanFactory(), orphans=self.orphans
            )
        if (older := self._streams.get(router_id)) is not None:
            older.close()
        now = self._loop.time()
        state = WorkerSession(hello, sequences, self.facts, self, self.lanes, now, wake, self.intake)
        assert sequences.rids <= {live.rid for live in hello.live}, "orphans are kept"
        self._streams[router_id] = state
        return state

    def lose(self, router_id: str, lease_left: float) -> None:
        """A router's stream is gone; its sequences stay for the lease (S6)."""
        end = self._loop.time() + lease_left
        self.routers[router_id].detach(end)
        self._loop.call_later(lease_left, self._end_lease, router_id)

    def _end_lease(self, router_id: str) -> None:
        sequences = self.routers.get(router_id)
        if sequences is not None and sequences.lease_end is not None and sequences.lease_end <= self._loop.time():
            self.routers.pop(router_id).end()

    def set_intake(self, intake: wpb.Intake.ValueType) -> None:
        """Takes new work or none, as WorkerService does."""
        self.intake = intake
        for state in self._streams.values():
            state.set_intake(intake)

    def crash(self) -> None:
        """The process is gone."""
        self.is_dead = True

    def freeze(self, seconds: float) -> None:
        """Freezes the worker; messages that arrive meanwhile are handled afterwards."""
        if not self.is_frozen:
            self.is_frozen = True
            self._loop.call_later(seconds, self._thaw)

    def _thaw(self) -> None:
        self.is_frozen = False
        calls, self.thaw_calls = self.thaw_calls, []
        for call in calls:
            call()
        self._turn_soon()

    @property
    def load(self) -> EngineLoad | None:
        """The load at this moment."""
        return self.core.load()

    @property
    def steps(self) -> StepRing:
        """Records of the engine's newest steps."""
        return self.core.steps

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self.core.num_steps

    def busy_s(self, now: float) -> float:
        """A turn is over before anybody can ask."""
        return 0.0

    def submit_group(self, receipt: TicketReceipt, live: Many[OwnedSequence]) -> None:
        self._deliveries.add(live)
        self._put(Submit(receipt, [each.seq for each in live]))

    def cancel(self, seq_ids: Iterable[int]) -> None:
        self._put(Cancel(list(seq_ids)))

    def set_deadline(self, seq_id: int, deadline: float | None) -> None:
        """Gives a sequence another deadline."""
        self._put(SetDeadline(seq_id, deadline))

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
        if self.is_dead or self.is_frozen:
            return
        commands = list(self._commands)
        self._commands.clear()
        turn = self._turns.run(commands)
        # Expensive with many blocks.
        if self.core.num_steps % (16 // self.facts.block_size or 1) == 0:
            self.core.scheduler.check_integrity()
        self._deliveries.deliver(turn)
        self.kv_log.append(turn.granules)
        if self._turns.has_work:
            self._turn_soon()


class Connection(Session):
    """One stream between a router and a worker: a router Session whose shell is simulated.

    Both ends find out about a break by themselves, each after a while. An address of which nobody answers is
    ended by the caller.
    """

    def __init__(self, site: SimService, worker: SimWorker) -> None:
        super().__init__(worker.name, site.pool.router_id, site.loop.time, Dialer(), lease_s=site.lease_s)
        self.worker_id = worker.name
        self.instance_id = worker.facts.instance_id
        self.model = describe(worker.facts.to_proto(wpb.WORKER_STATE_SERVING), TextAssets())
        self.is_over = False
        self._site = site
        self._loop = site.loop
        self._worker = worker
        self._state: WorkerSession | None = None
        self._is_up = False
        self._kv_is_due = False
        self._up = Wire(site.loop, site.rnd, site.slowest, self._worker_reads, self._router_writes)
        self._down = Wire(site.loop, site.rnd, site.slowest, self._router_reads, self._worker_writes)

    def dial(self) -> None:
        self._site.pool.session_opening(self)
        self._router_writes()
        self._beat()

    def notify(self) -> None:
        """The link has something to write."""
        self._loop.call_soon(self._router_writes)

    def break_off(self, fault: Fault = Fault.BROKEN) -> None:
        """Loses the stream with every message in flight: each end detects it alone."""
        # Half open: the worker does not notice, and still reads the messages in flight.
        if self._site.rnd.random() < 0.3:
            self._down.swallow()
        else:
            self._up.cut()
            self._down.cut()
            self._loop.call_later(self._site.rnd.uniform(0, 0.05), self._worker_loses)
        self._loop.call_later(self._site.rnd.uniform(0, 0.05), self.end, fault)

    def end(self, fault: Fault) -> None:
        """The router's end is over."""
        if self.is_over:
            return
        self.is_over = True
        if self._is_up:
            self._site.pool.session_down(self, fault, "the wire was cut")
        self._site.pool.session_closed(self, fault)

    def orphan(self) -> None:
        """The router's process is gone."""
        self.is_over = True
        self._up.cut()
        self._down.cut()
        self._loop.call_later(self._site.rnd.uniform(0, 0.05), self._worker_loses)

    def _worker_loses(self) -> None:
        if self._state is not None and not self._state.is_closed:
            self._state.close()
            self._worker.lose(self._state.router_id, self._state.lease_left(self._loop.time()))

    def _worker_wakes(self) -> None:
        self._loop.call_soon(self._worker_writes)

    def _worker_writes(self) -> None:
        if self._state is None or self._state.is_closed:
            return
        if self._down.is_free and not self._worker.is_frozen:
            frame = self._state.next_frame(self._loop.time())
            if frame is not None:
                self._down.write(frame)
            elif (wait := self._state.silent_for(self._loop.time())) <= KV_EVENTS_S and not self._kv_is_due:
                self._kv_is_due = True
                # The loop is early by its resolution, and its time does not advance meanwhile.
                self._loop.call_later(wait + 1e-6, self._kv_due)

    def _kv_due(self) -> None:
        self._kv_is_due = False
        self._worker_writes()

    def _beat(self) -> None:
        """What the shells do by the clock: heartbeats down, lease renewals up."""
        if self.is_over:
            return
        self._worker_writes()
        if self._is_up:
            self.state.renew_lease()
            self._router_writes()
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _router_writes(self) -> None:
        if self._up.is_free and not self.is_over:
            frame = self.state.next_frame(self._loop.time())
            if frame is not None:
                self._up.write(frame)

    def _worker_reads(self, frame: wpb.SessionRequest) -> None:
        now = self._loop.time()
        if self._worker.is_frozen:
            self._worker.thaw_calls.append(lambda: self._worker_reads(frame))
            return
        if self._worker.is_dead:
            return
        if self._state is None:
            self._state = self._worker.open(check_hello(frame), self._worker_wakes)
        else:
            self._state.receive(frame, now)
        self._worker_writes()

    def _router_reads(self, frame: wpb.SessionResponse) -> None:
        if self.is_over:
            return
        kind = frame.WhichOneof("frame")
        pool = self._site.pool
        try:
            if kind == "welcome":
                pool.session_up(self, frame.welcome)
                self._is_up = True
            elif kind == "step_output":
                pool.step_output(self, frame.step_output)
            elif kind == "heartbeat":
                pool.heartbeat(self, frame.heartbeat)
            elif kind == "kv_events" and self._site.rnd.random() >= self._site.kv_loss:
                pool.kv_events(self, frame.kv_events)
            elif kind == "draining":
                pool.draining(self)
            elif kind == "orphans":
                pool.orphans_named(self, frame.orphans)
        except SessionLostError as error:
            self._site.kv_gaps += 1
            self.end(error.fault)
            self._loop.call_later(0.01, self._worker_loses)
            self._loop.call_later(0.05, self._site.redial, self)
        except (GapError, ProtocolError):
            self._site.gaps += 1
            self.end(Fault.VIOLATION)
            self._loop.call_later(0.01, self._worker_loses)


class SimService:
    """One router, its workers and the connections between them.

    Attributes:
        kv_loss: share of the KvEvents frames that are lost on their way.
        kv_gaps: streams that were given up because KV events were missing.

    Args:
        loop: the virtual clock.
        rnd: draws delays.
        num_workers: size of the fleet.
        num_blocks: KV blocks of each worker.
        delay_factor: of the router's gate.
        slowest: longest delay of a frame, seconds.
        lease_s: how long workers keep the sequences of a broken stream.
        worker_wait_s: how long a request waits for a worker.
        block_size: tokens per KV block.
        placement: policy of the router.
        other: another router, whose workers these are too.
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
        lease_s: float = LEASE_S,
        worker_wait_s: float = WORKER_WAIT_S,
        block_size: int = BLOCK_SIZE,
        placement: Placement | None = None,
        other: SimService | None = None,
    ) -> None:
        config = Config(
            max_num_seqs=8,
            max_num_batched_tokens=96,
            kv_cache_block_size=block_size,
            num_kvcache_blocks=num_blocks,
            enable_prefix_caching=True,
            max_model_len=MAX_MODEL_LEN,
            eos_token_id=EOS_ID,
        )
        self.loop = loop
        self.rnd = rnd
        self.slowest = slowest
        self.lease_s = lease_s
        self.gaps = self.kv_gaps = 0
        self.kv_loss = 0.0
        self._failures = task_failures()
        self.block_size = block_size
        self.placement = placement or RoundRobin()
        self._config = config
        self._incarnations = itertools.count(2)
        self.workers: list[SimWorker] = []
        self.routers: list[SimService] = []
        if other is None:
            self.workers += [SimWorker(loop, f"worker-{i}", config) for i in range(num_workers)]
        else:
            self.workers, self.routers = other.workers, other.routers
        self.routers.append(self)
        options = FailoverOptions(worker_wait_s=worker_wait_s)
        self.dispatcher = make_dispatcher(DelayGate(delay_factor), self.placement, worker_wait_s=worker_wait_s)
        registry = ModelRegistry()
        self.orphans = OrphanTable(loop.time)
        self.requests = RequestRouter(self.dispatcher, registry, self.orphans, clock=loop.time, failover=options)
        self.pool: WorkerPool = WorkerPool(
            self.dispatcher,
            registry,
            TokenizerStore(),
            self.requests.running,
            self.orphans,
            Dialer(),
            lambda: None,
            clock=loop.time,
            failover=options,
        )
        self.connections = [self._connect(worker) for worker in self.workers]

    @property
    def identity(self) -> str:
        """Identity of the one model that all workers serve."""
        model = self.connections[0].model
        assert model is not None
        return model.identity

    def break_connection(self, i: int) -> None:
        """Breaks the stream to worker `i` and dials again, at once or after a while."""
        self.connections[i].break_off()
        self.loop.call_later(0.05 + self.rnd.choice([0.0, 0.3, 1.5]), self._redial, i)

    def crash(self, i: int) -> None:
        """Worker `i` dies and restarts."""
        self.workers[i].crash()
        for router in self.routers:
            router.connections[i].break_off()
            self.loop.call_later(0.06, router._refuse, i)
        self.loop.call_later(self.rnd.uniform(0.1, 2.0), self._restart, i)

    def freeze(self, i: int) -> None:
        """Worker `i` stops for a while: for too long, sometimes."""
        seconds = self.rnd.choice([0.3, 1.0, 4.0])
        self.workers[i].freeze(seconds)
        for router in self.routers if seconds > 2 else []:
            connection = router.connections[i]
            self.loop.call_later(2.0, connection.break_off, Fault.SILENT)
            self.loop.call_later(seconds + 0.1, router._redial, i)

    def cordon(self, i: int) -> None:
        """Cordons worker `i` for a while, and perhaps moves its running requests."""
        self.workers[i].set_intake(self.rnd.choice([wpb.INTAKE_CORDONED, wpb.INTAKE_EVICTING]))
        self.loop.call_later(self.rnd.uniform(0.1, 1.5), self.workers[i].set_intake, wpb.INTAKE_OPEN)

    def _refuse(self, i: int) -> None:
        """A dial meets a closed port."""
        if self.workers[i].is_dead:
            refused = Session(self.workers[i].name, "", self.loop.time, Dialer())
            self.pool.session_closed(refused, Fault.REFUSED)

    def _restart(self, i: int) -> None:
        if self.workers[i].is_dead:
            self.workers[i] = SimWorker(self.loop, self.workers[i].name, self._config, next(self._incarnations))
            for router in self.routers:
                router._redial(i)

    def redial(self, connection: Connection) -> None:
        """Replaces an ended connection, unless that has already happened."""
        if connection in self.connections:
            self._redial(self.connections.index(connection))

    def _redial(self, i: int) -> None:
        worker = self.workers[i]
        if self.connections[i].is_over and not worker.is_dead:
            self.connections[i] = self._connect(worker)

    def _connect(self, worker: SimWorker) -> Connection:
        made = Connection(self, worker)
        made.dial()
        return made

    def replace_placement(self) -> None:
        """An operator changes the policy to one that knows no cache yet."""
        self.placement = PrefixAware(1 << 12)
        self.requests.configure(DelayGate(0.0), self.placement, MAX_QUEUED_REQUESTS, {})
        self.pool.caches.learn_anew(self.pool.sessions())

    def kill_router(self) -> None:
        """The router is gone and does not come back."""
        for connection in self.connections:
            connection.orphan()

    def check_nothing_left(self) -> None:
        """Asserts that no trace of any request is left anywhere, and that no stream had a gap."""
        assert self.gaps == 0, "gap"
        # A failed decision is repeated, so no other check would show it.
        assert task_failures() == self._failures
        assert self.requests.in_flight == 0
        assert len(self.dispatcher) == 0
        assert self.requests.tables()["sequences"] == 0
        assert self.pool.tables()["sessions_held"] == 0
        assert all(not connection.state.live for connection in self.connections)
        self.check_workers_idle()
        self.check_index()

    def check_index(self) -> None:
        """Asserts that the router's index equals each worker's cache, without any merely expected block."""
        if not isinstance(self.placement, PrefixAware):
            return
        index = self.placement._indexes[self.identity].pool
        assert set(index.workers) == {worker.name for worker in self.workers}
        for worker in self.workers:
            cached = worker.core.scheduler.block_manager.prefixes.cached_granules()
            assert index.held(worker.name) == set(cached), "the index differs from the cache"

    def check_workers_idle(self) -> None:
        """Asserts that no worker runs a sequence or holds a block."""
        for worker in self.workers:
            load = worker.core.load()
            assert worker.num_live == 0, "leak"
            assert all(sequences.outbox.is_empty for sequences in worker.routers.values())
            assert (load.decoding_seqs, load.waiting_seqs) == (0, 0)
            assert load.free_blocks == load.total_blocks
            worker.core.scheduler.check_integrity()
