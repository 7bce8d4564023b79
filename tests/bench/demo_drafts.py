"""The demo model with its EAGLE-3 head against itself without: `python -m tests.bench.demo_drafts`.

Stories, in one process (`LLMEngine`) and through a router and a worker, so many at once, or one after the other. An
engine, or a service, with the head and one without it take turns, in an order that changes from round to round; look at
the ratios of neighbours. Every stream is compared. In one process CPU time is that of the engine's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import grpc
import structlog
import torch
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.serve.command import DEMO_HEAD
from common.config import SpeculativeConfig
from common.params.config_parts import EAGLE3
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import wait_workers
from worker.llm_engine import LLMEngine, default_config

Streams: TypeAlias = list[list[int]]
Row: TypeAlias = dict[str, str | float]

_DEMO: Final = DEMO_HEAD.parent / "checkpoint"
_HEROES: Final = ("fox", "cat", "dog", "bear", "owl", "hen", "cow", "pig")
_PROCESS, _SERVICE = "process", "service"
# A library of other sources then ends the benchmark.
_NATIVE: Final = ["--kernels", "cpu"]
_TOKENS: Final = pb.OutputOptions(return_token_ids=True)


@dataclass(frozen=True, slots=True)
class Story:
    """A request."""

    prompt: str
    seed: int
    temperature: float
    max_tokens: int


class Side(Protocol):
    """Answers stories: with the head, or without."""

    def answer(self, stories: list[Story], at_once: int) -> Streams:
        """Tokens of each story, with `at_once` requests at a time."""
        ...


class InProcess:
    """An engine in this process."""

    def __init__(self, spec: SpeculativeConfig | None) -> None:
        self.engine = LLMEngine(replace(default_config(str(_DEMO)), kernels="cpu", speculative_config=spec))

    def answer(self, stories: list[Story], at_once: int) -> Streams:
        return [
            answer["token_ids"]
            for group in _groups(stories, at_once)
            for answer in self.engine.generate(
                [story.prompt for story in group],
                [
                    {"temperature": story.temperature, "top_p": 1.0, "seed": story.seed, "max_tokens": story.max_tokens}
                    for story in group
                ],
            )
        ]


class ThroughService:
    """A router and a worker in separate processes, and a client in this one."""

    def __init__(self, running: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._channel = loop.run_until_complete(_connected(running.router.address))

    def answer(self, stories: list[Story], at_once: int) -> Streams:
        return self._loop.run_until_complete(self._answer(stories, at_once))

    async def _answer(self, stories: list[Story], at_once: int) -> Streams:
        found: Streams = []
        for group in _groups(stories, at_once):
            found += await asyncio.gather(*map(self._one, group))
        return found

    async def _one(self, story: Story) -> list[int]:
        params = pb.SamplingParams(
            temperature=story.temperature, top_p=1.0, seed=story.seed, max_tokens=story.max_tokens
        )
        found: list[int] = []
        async for part in InferenceServiceStub(self._channel).Generate(
            pb.GenerateRequest(text=story.prompt, sampling_params=params, output_options=_TOKENS)
        ):
            found.extend(part.token_ids)
        return found


@dataclass(slots=True)
class Turns:
    """What the turns of one side took: tokens per second, by the clock and by the thread's CPU time."""

    side: Side
    rates: list[float] = field(default_factory=list)
    of_cpu: list[float] = field(default_factory=list)

    def turn(self, stories: list[Story], at_once: int) -> Streams:
        """Answers, and returns the streams."""
        wall, cpu = time.perf_counter(), time.thread_time()
        found = self.side.answer(stories, at_once)
        tokens = sum(map(len, found))
        self.rates.append(tokens / (time.perf_counter() - wall))
        self.of_cpu.append(tokens / (time.thread_time() - cpu))
        return found


def measure(where: str, sides: Mapping[str, Side], temperature: float, at_once: int, args: argparse.Namespace) -> Row:
    """Prints a line: tokens per second of both, and their ratios. Returns them for a file of results."""
    plain, drafting = (Turns(sides[name]) for name in ("plain", "drafting"))
    for number in range(args.rounds + 1):
        first = number * args.answers
        stories = [
            Story(f"Once upon a time there was a {_HEROES[i % len(_HEROES)]}", i, temperature, args.tokens)
            for i in range(first, first + args.answers)
        ]
        order = (plain, drafting) if number % 2 else (drafting, plain)
        one, other = (each.turn(stories, at_once) for each in order)
        if one != other:
            raise SystemExit("a stream has changed")
    ratios = _ratios(drafting.rates, plain.rates)
    row: Row = {
        "where": where,
        "temperature": str(temperature),
        "at_once": str(at_once),
        "plain": round(statistics.median(plain.rates[1:])),
        "drafting": round(statistics.median(drafting.rates[1:])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
    }
    by_cpu = statistics.median(_ratios(drafting.of_cpu, plain.of_cpu))
    print(
        f"{where}, temperature {temperature}, {at_once} at once: {row['plain']} tokens/s plain, {row['drafting']} with "
        f"drafts, {row['ratio']} times ({', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})"
        + (f"; by CPU time {by_cpu:.3f} times" if where == _PROCESS else ""),
        flush=True,
    )
    return row


def _ratios(drafting: list[float], plain: list[float]) -> list[float]:
    """Ratios of the rounds, without the first one, which warms up."""
    return [fast / slow for fast, slow in zip(drafting[1:], plain[1:], strict=True)]


def _groups(stories: list[Story], at_once: int) -> Iterator[list[Story]]:
    return (stories[i : i + at_once] for i in range(0, len(stories), at_once))


async def _connected(address: str) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(address)
    await channel.channel_ready()
    return channel


@contextmanager
def sides(where: str, spec: SpeculativeConfig) -> Iterator[dict[str, Side]]:
    """Both sides, which run side by side and are asked in turns."""
    if where == _PROCESS:
        yield {"plain": InProcess(None), "drafting": InProcess(spec)}
        return
    given = {"method": spec.method, "model": spec.model, "num_speculative_tokens": spec.num_speculative_tokens}
    given["adaptive"] = spec.adaptive
    options = {"plain": _NATIVE, "drafting": [*_NATIVE, "--speculative-config", json.dumps(given)]}
    with tempfile.TemporaryDirectory(prefix="demo-drafts-") as folder, ExitStack() as stack:
        loop, made = asyncio.new_event_loop(), dict[str, Side]()
        stack.callback(loop.close)
        for name, own in options.items():
            (logs := Path(folder) / name).mkdir()
            running = stack.enter_context(
                running_service(logs, _DEMO, worker_options=own, environment={"FISSILE_LOG_LEVEL": "warning"})
            )
            wait_workers(running, 1, within_s=60)
            made[name] = ThroughService(running, loop)
        yield made


def main() -> None:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=[_PROCESS, _SERVICE], nargs="+", default=[_PROCESS, _SERVICE])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--answers", type=int, default=64, help="of a turn")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer at most")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--drafts", type=int, default=3, help="most drafts of a sequence and step")
    parser.add_argument("--fixed", action="store_true", help="verify all drafts, whether that pays or not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    spec = SpeculativeConfig(args.drafts, EAGLE3, model=str(DEMO_HEAD), adaptive=not args.fixed)
    rows = []
    for where in args.where:
        with sides(where, spec) as both:
            rows += [
                measure(where, both, temperature, at_once, args)
                for temperature in args.temperature
                for at_once in args.at_once
            ]
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
