"""Tokens per second with drafts of a known acceptance, against plain decoding: `python -m tests.bench.speculation`.

Random weights. A proposer that knows what comes is right as often as is said, at every position; what it costs is not
in the result, but for `--ngrams`, which measures prompt lookup alone. Plain and drafting engines share one model and
take turns, round by round; look at ratios. CPU time is of all threads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from tests.bench.decode_step import SHAPES
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.engine.sequence import Sequence
from worker.engine.speculation.drafter import Proposer
from worker.engine.speculation.finished_answers import MOST_OF_PREFIX, FinishedAnswers
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

Row: TypeAlias = dict[str, str | float]

PROMPT = 32
LONGEST = 1024


class Right(Proposer):
    """Proposes the right tokens with a given probability each; other tokens after the first wrong one."""

    def __init__(self, streams: Mapping[int, list[int]], share: float, rnd: random.Random) -> None:
        self._streams = streams
        self._share = share
        self._rnd = rnd

    def propose(self, seq: Sequence, most: int) -> list[int]:
        behind = self._streams[seq.seed][seq.num_completion_tokens :][:most]
        return [token if self._rnd.random() < self._share else token ^ 1 for token in behind]


class Round:
    """One engine's turns: tokens, wall and CPU seconds of each."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def turn(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Generates, and returns the streams."""
        params = [
            {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": i} for i in range(len(prompts))
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        found = [answer["token_ids"] for answer in self.engine.generate(prompts, params)]
        self.rates.append(len(prompts) * tokens / (time.perf_counter() - wall))
        self.cpu.append(len(prompts) * tokens / (time.process_time() - cpu))
        return found


def measure(runner: ModelRunner, config: Config, options: argparse.Namespace, in_flight: int, share: float) -> Row:
    """Prints a line: tokens per second of both, and their ratios. Returns them for a file of results."""
    rnd = random.Random(1)
    prompts = [[rnd.randrange(5, 1000) for _ in range(PROMPT)] for _ in range(in_flight)]
    spec = SpeculativeConfig(options.drafts, NGRAM, adaptive=not options.fixed)
    plain = Round(LLMEngine(config, runner=runner))
    drafting = Round(LLMEngine(replace(config, speculative_config=spec), runner=runner))
    drafting.engine.core.measure_step_costs()
    streams = plain.turn(prompts, options.tokens)
    drafter = drafting.engine.core.scheduler.drafter
    drafter.proposer = Right(dict(enumerate(streams)), share, rnd)
    drafting.turn(prompts, options.tokens)
    for each in (plain, drafting):
        each.rates.clear()
        each.cpu.clear()
    for _ in range(options.rounds):
        plain.turn(prompts, options.tokens)
        if drafting.turn(prompts, options.tokens) != streams:
            raise SystemExit("a stream has changed")
    ratios = [fast / slow for fast, slow in zip(drafting.rates, plain.rates, strict=True)]
    of_cpu = [fast / slow for fast, slow in zip(drafting.cpu, plain.cpu, strict=True)]
    print(
        f"{in_flight} in flight, {share:.0%} right: {statistics.median(plain.rates):.1f} tokens/s plain, "
        f"{statistics.median(drafting.rates):.1f} with drafts, {statistics.median(ratios):.2f} times "
        f"({min(ratios):.2f} to {max(ratios):.2f}); by CPU time {statistics.median(of_cpu):.2f} times",
        flush=True,
    )
    return {
        "in_flight": str(in_flight),
        "right": f"{share:.0%}",
        "plain": round(statistics.median(plain.rates), 1),
        "drafting": round(statistics.median(drafting.rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
    }


def checkpoint(options: argparse.Namespace, shape: Mapping[str, Any]) -> AbstractContextManager[Path]:
    """A folder with the model: one that stays, or one for as long as the benchmark runs."""
    if options.folder is None:
        return _passing(shape)
    if not (options.folder / "config.json").is_file():
        make_checkpoint(options.folder, "qwen3", **shape)
    return nullcontext(options.folder)


@contextmanager
def _passing(shape: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="speculation-") as name:
        yield make_checkpoint(Path(name), "qwen3", **shape)


def ngrams(lengths: list[int]) -> None:
    """Prints the cost of a lookup in sequences of these lengths, one token later each time: alone, and with answers."""
    rnd = random.Random(1)
    for length, beside in ((length, beside) for length in lengths for beside in (0, MOST_OF_PREFIX)):
        prompt = [rnd.randrange(2000) for _ in range(length)]
        answers = FinishedAnswers(beside, 4) if beside else None
        for _ in range(beside // 256):
            assert answers is not None
            answers.add(Sequence([*prompt, *(rnd.randrange(2000) for _ in range(256))], 16, num_prompt_tokens=length))
        proposer, seq = NgramProposer(2, 4, answers), Sequence(prompt, 16)
        took = []
        for _ in range(300):
            seq.append_token(rnd.randrange(2000))
            start = time.thread_time()
            proposer.propose(seq, 4)
            took.append((time.thread_time() - start) * 1e6)
        where = f"{length} tokens" + (f" and {beside} of finished answers" if beside else "")
        print(f"lookup in {where}: {statistics.median(took):.1f} us (best {min(took):.1f})", flush=True)


def main() -> None:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="no")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--right", type=float, nargs="+", default=[0.0, 0.6, 0.8], help="parts of drafts that are right"
    )
    parser.add_argument("--drafts", type=int, default=8, help="most drafts of a sequence and step")
    parser.add_argument("--fixed", action="store_true", help="verify all drafts, whether that pays or not")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoint stays, for the next run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    parser.add_argument("--ngrams", type=int, nargs="+", metavar="TOKENS", help="only what prompt lookup costs")
    options = parser.parse_args()
    if options.ngrams:
        ngrams(options.ngrams)
        return
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = shape | {"num_hidden_layers": options.layers}
    with checkpoint(options, shape) as folder:
        blocks = max(options.in_flight) * -(-(PROMPT + options.tokens) // 16) + LONGEST // 16
        config = Config(
            model=str(folder),
            dtype=options.dtype,
            quantize=options.quantize,
            kernels="cpu",
            max_model_len=LONGEST,
            num_kvcache_blocks=blocks,
            # The two engines share a pool: blocks cached by one are overwritten by the other.
            enable_prefix_caching=False,
        )
        runner = ModelRunner(config, ModelConfig.from_folder(folder))
        runner.allocate_kv_cache(blocks)
        rows = [
            measure(runner, config, options, in_flight, share)
            for in_flight in options.in_flight
            for share in options.right
        ]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
