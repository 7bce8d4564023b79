"""Microseconds of a draft of the demo model's EAGLE-3 head: `python -m tests.bench.draft_cost [--at-once 1 8 32]`.

Stories in one process, three drafts behind each token. All drafts of a step are made in one call of the native kernels,
or by single operations, which is the way of other back ends: from step to step in turns, on the same sequences, since
both make the same drafts. Prints medians of steps in which every sequence has all its drafts, for each draft; what the
head takes in of the step is in them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import structlog
import torch

from common.cli.serve.command import DEMO_HEAD
from common.config import SpeculativeConfig
from common.params.config_parts import EAGLE3
from worker.llm_engine import LLMEngine, default_config
from worker.model.model_runner import ModelRunner
from worker.model.speculation.draft_proposer import SampledStep
from worker.model.speculation.model_proposers import EagleProposer, ModelProposer

_DRAFTS: Final = 3
_HEROES: Final = ("fox", "cat", "dog", "bear", "owl", "hen", "cow", "pig")
_WAYS: Final = {"one call": EagleProposer.propose, "single operations": ModelProposer.propose}


class Clock:
    """Has a head propose by one way after the other, and notes how long each takes."""

    def __init__(self, proposer: EagleProposer) -> None:
        self._proposer = proposer
        self._steps = 0
        # Of each way, seconds by drafts.
        self.told: dict[str, dict[int, list[float]]] = {way: {} for way in _WAYS}

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        self._steps += 1
        way = list(_WAYS)[self._steps % len(_WAYS)]
        began = time.perf_counter()
        drafts = _WAYS[way](self._proposer, step)
        taken = time.perf_counter() - began
        self.told[way].setdefault(sum(map(len, drafts.values())), []).append(taken)
        return drafts


def main() -> None:
    """Prints a line for each number of stories at once and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    torch.set_num_threads(1)
    spec = SpeculativeConfig(_DRAFTS, EAGLE3, str(DEMO_HEAD), adaptive=False)
    config = default_config(str(DEMO_HEAD.parent / "checkpoint"))
    engine = LLMEngine(replace(config, kernels="cpu", speculative_config=spec))
    runner = engine.core.runner
    assert isinstance(runner, ModelRunner)
    proposer = runner.draft_proposer
    assert isinstance(proposer, EagleProposer)
    for at_once in given.at_once:
        for temperature in (0.0, 1.0):
            clock = Clock(proposer)
            proposer.propose = clock.propose  # type: ignore[method-assign]
            for turn in range(given.rounds):
                _tell(engine, at_once, temperature, turn)
            count = _DRAFTS * at_once
            medians = {way: 1e6 * statistics.median(told[count]) / count for way, told in clock.told.items()}
            said = ", ".join(f"{way} {median:.1f} us" for way, median in medians.items())
            print(f"{at_once} at once, temperature {temperature:g}: {said} a draft", flush=True)
    engine.close()


def _tell(engine: LLMEngine, at_once: int, temperature: float, turn: int) -> None:
    prompts = [f"Once upon a time there was a {_HEROES[i % len(_HEROES)]}" for i in range(at_once)]
    params = [
        {"temperature": temperature, "max_tokens": 200, "ignore_eos": True, "seed": 100 * turn + i}
        for i in range(at_once)
    ]
    engine.generate(prompts, params)


if __name__ == "__main__":
    main()
