"""Frames as a router writes them, and a real engine that is stepped by hand instead of by a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from fissile.worker.v1 import worker_pb2 as wpb

from common.config import Config
from common.wire.block_hash import hash_chain
from worker.engine.core import EngineCore
from worker.engine.outputs import EngineLoad, RequestOutput
from worker.engine.sequence import Sequence
from worker.engine.step_record import StepRing
from worker.engine.turns import Cancel, Command, EndAll, EngineTurns, SetDeadline, StepListener, Submit, TicketReceipt
from worker.session.cache_events import KvLog
from worker.session.deliveries import Deliveries, OwnedSequence
from worker.session.router_state import SessionEngine
from worker.session.sequence_builder import EngineLimits
from worker.session.worker_info import WorkerFacts
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
NUM_BLOCKS = 256
MAX_MODEL_LEN = 1024
LIMITS = EngineLimits(VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE, hash_seed=7, weights_digest="d")
CONFIG = Config(
    max_num_seqs=32,
    max_num_batched_tokens=512,
    num_kvcache_blocks=NUM_BLOCKS,
    max_model_len=MAX_MODEL_LEN,
    enable_prefix_caching=True,
    hash_seed=7,
)
FACTS = WorkerFacts(
    worker_id="w",
    instance_id="i",
    model="m",
    architecture="a",
    tokenizer_sha256="",
    version="0",
    block_size=BLOCK_SIZE,
    hash_seed=7,
    vocab_size=VOCAB_SIZE,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_model_len=MAX_MODEL_LEN,
    total_blocks=NUM_BLOCKS,
    numerics="n",
)


def simulated_core(
    config: Config = CONFIG, step_s: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """An engine without a model."""
    return EngineCore(config, simulated_runner(config, step_s), clock)


def simulated_runner(config: Config = CONFIG, step_s: float = 0.0) -> SimulatedRunner:
    """The runner of `simulated_core`."""
    return SimulatedRunner(VOCAB_SIZE, None, FixedCost(step_s), num_blocks=config.num_kvcache_blocks)


def params(max_tokens: int = 4, **fields: object) -> wpb.SamplingParams:
    return wpb.SamplingParams(top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def chain_hash(prompt: Many[int]) -> int:
    """What a router sends along."""
    return (hash_chain(prompt, BLOCK_SIZE, seed=LIMITS.hash_seed) or [0])[-1]


def record(rid: int, prompt: Many[int] = (1, 2, 3), max_tokens: int = 4, **fields: object) -> wpb.SubmitSequence:
    """A sequence that is complete."""
    made = wpb.SubmitSequence(
        rid=rid,
        prompt_len=len(prompt),
        token_ids=prompt,
        params=params(max_tokens),
        seed=rid,
        chain_hash=chain_hash(prompt),
    )
    made.MergeFrom(wpb.SubmitSequence(**fields))  # type: ignore[arg-type]
    return made


def submit(serial: int, *records: wpb.SubmitSequence, more: bool = False) -> wpb.SessionRequest:
    return wpb.SessionRequest(submit=wpb.Submit(serial=serial, seqs=records, more=more))


def long_prompt(rid: int, prompt: Many[int], cut: int) -> tuple[wpb.SubmitSequence, wpb.Extend]:
    """A sequence whose prompt comes in two pieces."""
    first = record(rid, prompt, more=True)
    del first.token_ids[cut:]
    return first, wpb.Extend(rid=rid, token_ids=prompt[cut:])


class Listener(StepListener, Protocol):
    """Gets the outputs of several sequences."""

    def on_output(self, output: RequestOutput) -> None: ...


@dataclass(eq=False)
class Heard:
    """A sequence in the engine whose listener receives its outputs together with those of others."""

    seq: Sequence
    owner: Listener
    end_pos: int = 0

    def __post_init__(self) -> None:
        self.end_pos = self.seq.num_tokens

    def on_output(self, output: RequestOutput) -> None:
        self.owner.on_output(output)


def submit_group(engine: SessionEngine, listener: Listener, serial: int, seqs: Iterable[Sequence]) -> None:
    """Gives an engine a group of a router."""
    engine.submit_group(TicketReceipt(listener, serial), [Heard(seq, listener) for seq in seqs])


class SteppedEngine:
    """An EngineCore as Sessions see it; `step` does the work of one turn of the engine thread."""

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self.core = core
        self.deliveries = Deliveries()
        self._turns = EngineTurns(core, clock)
        self._commands: list[Command] = []
        self.kv_log = KvLog()

    @property
    def load(self) -> EngineLoad | None:
        """The load at this moment."""
        return self.core.load()

    @property
    def num_steps(self) -> int:
        """Engine steps since the start."""
        return self.core.num_steps

    @property
    def steps(self) -> StepRing:
        """Records of the core's newest steps."""
        return self.core.steps

    def busy_s(self, now: float) -> float:
        """No step is ever under way between calls."""
        return 0.0

    def submit_group(self, receipt: TicketReceipt, live: Many[OwnedSequence]) -> None:
        """Takes a group at the next step."""
        self.deliveries.add(live)
        self._commands.append(Submit(receipt, [each.seq for each in live]))

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences at the next step."""
        self._commands.append(Cancel([seq_id for seq_id in seq_ids if seq_id in self.deliveries]))

    def set_deadline(self, seq_id: int, deadline: float | None) -> None:
        """Gives a sequence another deadline at the next step."""
        self._commands.append(SetDeadline(seq_id, deadline))

    def end_all(self, message: str) -> None:
        """Ends everything at the next step."""
        self._commands.append(EndAll(message))

    def step(self) -> None:
        commands, self._commands = self._commands, []
        turn = self._turns.run(commands)
        self.deliveries.deliver(turn)
        self.kv_log.append(turn.granules)
        self.core.scheduler.check_integrity()
