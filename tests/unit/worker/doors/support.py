"""A worker with the demo model in this process, its adapter, and a context as gRPC gives it to a servicer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import Config
from common.text.tokenizer import Tokenizer, tokenizer_files
from worker.config.model_config import ModelConfig
from worker.doors.door_adapter import DoorAdapter
from worker.doors.door_request import DoorFinish, DoorOutput, DoorPrompt, DoorRequest, DoorUsage, EngineDoor
from worker.server import Worker, WorkerOptions

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "checkpoint"
NUM_BLOCKS = 256
CONFIG = Config(
    model=str(DEMO),
    enable_prefix_caching=True,
    num_kvcache_blocks=NUM_BLOCKS,
    max_num_batched_tokens=512,
    enable_constraints=True,
)
DOOR = EngineDoor(
    "test", {"temperature": "sampling.temperature", "token_ids": "token_ids.ids", "constraint.regex": "guided.regex"}
)


@dataclass
class FakeContext:
    """The part of a servicer's context that the adapter reads."""

    left_s: float | None = None
    metadata: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def time_remaining(self) -> float | None:
        return self.left_s

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata


def fake_context(left_s: float | None = None, metadata: Sequence[tuple[str, str]] = ()) -> Any:
    """A context, of a type that callers take for gRPC's."""
    return FakeContext(left_s, metadata)


@dataclass
class Collected:
    """All events of one call, joined."""

    prompt: DoorPrompt | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finishes: dict[int, DoorFinish] = field(default_factory=dict)
    usage: DoorUsage | None = None

    def add(self, event: DoorPrompt | DoorOutput) -> None:
        if isinstance(event, DoorPrompt):
            assert self.prompt is None
            assert not self.tokens
            self.prompt = event
            return
        assert event.index not in self.finishes
        self.tokens.setdefault(event.index, []).extend(event.token_ids)
        self.logprobs.setdefault(event.index, []).extend(event.logprobs)
        self.text[event.index] = self.text.get(event.index, "") + event.text
        if event.finish is not None:
            self.finishes[event.index] = event.finish


async def answered(adapter: DoorAdapter, request: DoorRequest, context: Any = None) -> Collected:
    """Runs a request to its end."""
    found = Collected()
    async with asyncio.timeout(60), adapter.call(DOOR, request, context or fake_context()) as call:
        while not call.is_done:
            for event in await call.next_events():
                found.add(event)
        found.usage = call.usage
    return found


@contextlib.asynccontextmanager
async def demo_worker(config: Config = CONFIG, **options: Any) -> AsyncIterator[tuple[Worker, DoorAdapter]]:
    """A worker that serves, and an adapter of its engine."""
    worker = Worker(WorkerOptions(config, "demo", port=0, threads=1, **options))
    await worker.start()
    stop = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stop))
    await worker.wait_ready()
    files = tokenizer_files(config.model)
    model_config = ModelConfig.from_folder(config.model)
    yield worker, DoorAdapter(worker.service, worker.engine, Tokenizer.from_files(files), config, model_config, files)
    stop.set()
    await asyncio.wait_for(serving, 60)
    assert worker.engine.join(60)
