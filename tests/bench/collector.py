"""Pauses between two steps, with the interpreter's garbage collection and with the worker's between steps.

    python -m tests.bench.collector [seconds]

The real engine thread and event loop with a made-up model of 2 ms a step, which leaves the interpreter free like a
forward pass. 64 sequences run one after another, 2,000 wait, and the event loop handles 2,000 calls a second that end
with an exception, each of which leaves a cycle. Modes alternate three times; prints medians of the runs.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from dataclasses import dataclass

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.unit.worker.session.support import submit_group
from worker.cli.worker import SWITCH_INTERVAL_S
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import Sequence
from worker.garbage import GarbageCollector
from worker.session import engine_thread
from worker.session.engine_loop import EngineLoop
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

NUM_SEQS = 64
CALLS_PER_S = 2000
NUM_WAITING = 2000
STEP_S = 0.002
WARMUP_S = 2.0
PARTS = (0.5, 0.999, 1.0)
CONFIG = Config(max_num_seqs=NUM_SEQS, num_kvcache_blocks=100_000, max_model_len=4096, enable_prefix_caching=True)


class Automatic(GarbageCollector):
    """Freezes loaded objects at the start; the interpreter collects the rest by itself."""

    def start(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def between_steps(self) -> None:
        pass

    def while_idle(self) -> None:
        pass


class Timed:
    """Notes the gaps between steps."""

    def __init__(self, inner: SimulatedRunner) -> None:
        self.inner = inner
        self.gaps: list[float] = []
        self.ended: float | None = None

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        if self.ended is not None:
            self.gaps.append(time.perf_counter() - self.ended)
        output = self.inner.forward(batch)
        self.ended = time.perf_counter()
        return output


class Endless:
    """A listener that puts a new sequence in the place of each that ends."""

    def __init__(self, engine: EngineLoop) -> None:
        self.engine = engine
        self.count = 0
        self.closed = False

    def submit(self) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=20 + self.count % 60, ignore_eos=True)
        prompt = [1 + (self.count * 7 + i) % 900 for i in range(200)]
        seq = Sequence(prompt, 16, params, arrive_time=time.monotonic())
        submit_group(self.engine, self, self.count, [seq])

    def on_output(self, output: RequestOutput) -> None:
        if output.end is not None and not self.closed:
            self.submit()

    def on_step(self, step: int, submit_seen: int | None) -> None:
        pass


async def fail() -> None:
    """A call that ends with an exception, whose traceback holds the frame that holds it."""
    try:
        raise ValueError(list(range(10)))
    except ValueError as error:
        kept = error
        await asyncio.sleep(0)
        assert kept.__traceback__ is not None


async def calls(until: float) -> None:
    """Calls at an even rate."""
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        await asyncio.gather(*(fail() for _ in range(CALLS_PER_S // 100)))
        await asyncio.sleep(0.01)


class Collections:
    """The collections of this process while it is entered: thread time, so that other processes count little."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._began = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.ms.append(1000 * (time.thread_time() - self._began))


@dataclass
class Measured:
    """Milliseconds: gaps between steps in order of size, and collections."""

    gaps: list[float]
    collections: list[float]


async def measure(seconds: float) -> Measured:
    engine = EngineLoop()
    runner = Timed(SimulatedRunner(1000, None, FixedCost(STEP_S), num_blocks=CONFIG.num_kvcache_blocks))
    engine.start(lambda: EngineCore(CONFIG, runner))
    await engine.wait_started()
    listener = Endless(engine)
    for _ in range(NUM_SEQS + NUM_WAITING):
        listener.submit()
    # Everything begins.
    await calls(asyncio.get_running_loop().time() + WARMUP_S)
    first = len(runner.gaps)
    with Collections() as collections:
        await calls(asyncio.get_running_loop().time() + seconds)
    gaps = runner.gaps[first:]
    listener.closed = True
    engine.end_all("the benchmark is over")
    await engine.wait_idle()
    engine.stop()
    engine.join(10)
    return Measured(sorted(1000 * gap for gap in gaps), collections.ms)


def report(name: str, runs: list[Measured], seconds: float) -> str:
    middle, far, longest = (statistics.median(r.gaps[int(part * (len(r.gaps) - 1))] for r in runs) for part in PARTS)
    most, total = (statistics.median(each(run.collections) for run in runs) for each in (max, sum))
    collected = f"collections up to {most:.2f} ms, {total / seconds:.2f} ms a second"
    return f"{name:14} {collected}; gaps median {middle:.2f} ms, p99.9 {far:.2f}, longest {longest:.2f}"


def main(seconds: float) -> None:
    """Prints a line for each mode."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    modes: dict[str, type[GarbageCollector]] = {"automatic": Automatic, "between steps": GarbageCollector}
    runs: dict[str, list[Measured]] = {name: [] for name in modes}
    for _ in range(3):
        for name, mode in modes.items():
            engine_thread.GarbageCollector = mode  # type: ignore[attr-defined]
            runs[name].append(asyncio.run(measure(seconds)))
    for name, measured in runs.items():
        print(report(name, measured, seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
