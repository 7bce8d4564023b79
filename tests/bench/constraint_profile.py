"""Where CPU time of constrained answers goes: `python -m tests.bench.constraint_profile FOLDER [--in-flight 1 8 32]`.

The checkpoint is that of tests.bench.constraints, with one layer: what grammars take does not depend on the model, but
what is left in the processor's caches for them does. CPU time of the threads that run each part, microseconds per
token; the ways take turns, and the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from kernels.cpu.sampling import CpuSamplingOps
from tests.bench.constraints import NONE, WAYS, Way, make_runner
from worker.engine.scheduler import Scheduler
from worker.garbage import GarbageCollector
from worker.llm_engine import LLMEngine
from worker.model.grammar_masks import GrammarMasks
from worker.model.model_runner import ModelRunner
from worker.model.sampler import Sampler

# None is within another.
PARTS: Final[list[tuple[str, type, str]]] = [
    ("masks, on a thread of their own", GrammarMasks, "confined"),
    ("histories of rows", Sampler, "begin"),
    ("sampling, which applies masks", CpuSamplingOps, "sample"),
    ("tokens given to grammars", Sampler, "end_complete"),
    ("search for forced text", Sampler, "forced"),
    ("scheduling", Scheduler, "schedule"),
    ("landing", Scheduler, "postprocess"),
    ("layers", ModelRunner, "_states"),
    ("logits", ModelRunner, "_logits"),
]
COMPARED: Final = {
    "none": NONE,
    "schema": "JSON Schema",
    "short": "the same, texts of at most 40 characters",
    "any": "any JSON object",
}
_REST: Final = "the rest"


class Profile:
    """CPU time of each part in a turn."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        for name, owner, function in PARTS:
            setattr(owner, function, self._timed(name, getattr(owner, function)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[name] += time.thread_time() - start

        return timed

    def turn(self, way: Way, tokens: int) -> dict[str, float]:
        """Microseconds per token of each part."""
        self.spent.clear()
        start = time.process_time()
        way.turn()
        self.spent[_REST] = time.process_time() - start - sum(self.spent.values())
        return {name: 1e6 * spent / tokens for name, spent in self.spent.items()}


def main() -> None:
    """Prints a line for each number in flight and part, and writes figures as JSON to an optional file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config, runner = make_runner(options.folder, max(options.in_flight))
    profile, collector, rows = Profile(), GarbageCollector(), list[dict[str, Any]]()
    for in_flight in options.in_flight:
        ways = {
            metric: Way(LLMEngine(config, runner=runner), WAYS[name], in_flight, options.tokens, 0.8)
            for metric, name in COMPARED.items()
        }
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        collector.start()
        for _ in range(options.rounds):
            for metric, way in ways.items():
                for part, value in profile.turn(way, in_flight * options.tokens).items():
                    found[part, metric].append(value)
                collector.between_steps()
        collector.stop()
        for part in [*(name for name, *_ in PARTS), _REST]:
            values = {metric: round(statistics.median(found.get((part, metric), [0.0])), 1) for metric in ways}
            print(f"{in_flight}, {part}: {values}", flush=True)
            rows += [
                {"in_flight": str(in_flight), "part": part, "metric": f"cpu_{metric}", "unit": "us", "value": value}
                for metric, value in values.items()
            ]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
