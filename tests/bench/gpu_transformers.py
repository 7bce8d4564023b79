"""transformers' continuous batching beside our engine, in turn on the same work: `gpu_steps --compared BATCH [...]`.

Both hold the same random weights on the same device and answer the same prompts, other ones in each repetition,
greedily and past any end of sequence. Every answer's tokens are counted. Its thread computes without `inference_mode`:
within that each of its requests fails, at once and with no tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from common.params.sampling_params import SamplingParams
from worker.llm_engine import LLMEngine

# Tokens of a page of its cache, its default.
_PAGE = 256
_NO_ID = -1
# Ids of prompts, which any vocabulary of a test has.
_IDS = range(5, 305)
Answers = list[list[int]]


@dataclass(frozen=True)
class Work:
    """Requests that come at once.

    Attributes:
        batch: how many.
        context: tokens of each prompt.
        tokens: of each answer.
        budget: most tokens of a step.
    """

    batch: int
    context: int
    tokens: int
    budget: int

    def prompts(self, repetition: int) -> list[list[int]]:
        """Of one repetition, each `context` long."""
        draw = random.Random(repetition)
        return [draw.choices(_IDS, k=self.context) for _ in range(self.batch)]


@dataclass(frozen=True)
class Throughput:
    """What one engine made of a work.

    Attributes:
        engine: `fissile` or `transformers`.
        work: what it was.
        tokens_per_s: output tokens per second of each repetition, prompts included in the time.
    """

    engine: str
    work: Work
    tokens_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


class Transformers:
    """A checkpoint in transformers.

    Args:
        folder: of the checkpoint.
        dtype: name of the model's.
        device: where it computes.
    """

    def __init__(self, folder: Path, dtype: str, device: torch.device) -> None:
        torch_dtype: torch.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[
            dtype
        ]
        # With a flash attention installed transformers would choose that.
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, attn_implementation="sdpa")
        self._model = loaded.to(device).eval()
        # Ids from the checkpoint would end answers.
        self._model.generation_config.eos_token_id = _NO_ID
        self._model.generation_config.do_sample = False

    @contextmanager
    def session(self, work: Work) -> Iterator[Callable[[list[list[int]]], Answers]]:
        """What answers prompts of a work: with a cache that holds it all, and a step of the same size as ours."""
        pages = work.batch * -(-(work.context + work.tokens) // _PAGE) + 1
        config = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=work.budget, allow_block_sharing=False)
        hints = WorkloadHints(work.context, work.tokens, work.batch)
        with self._model.continuous_batching_context_manager(
            generation_config=self._model.generation_config, continuous_batching_config=config, workload_hints=hints
        ) as manager:
            yield lambda prompts: _answers(manager, prompts, work.tokens)

    @property
    def attention(self) -> str:
        """Which implementation of attention it uses."""
        return str(self._model.config._attn_implementation)


def _answers(manager: Any, prompts: list[list[int]], tokens: int) -> Answers:
    ids = manager.add_requests(prompts, max_new_tokens=tokens)
    found: dict[str, list[int]] = {}
    while len(found) < len(ids):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            found[result.request_id] = result.generated_tokens
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' batching ended before its requests")
    return [found[request_id] for request_id in ids]


def own_answers(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> Answers:
    """What our engine makes of prompts."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    return [answer["token_ids"] for answer in engine.generate(list(prompts), params)]


def compare(engine: LLMEngine, peer: Transformers, work: Work, repetitions: int) -> tuple[Throughput, Throughput]:
    """Both engines in turn, ours and theirs first by turns; a repetition more comes first, which does not count.

    Raises:
        RuntimeError: an answer has another number of tokens than was asked for.
    """
    rates: dict[str, list[float]] = {"fissile": [], "transformers": []}
    with peer.session(work) as theirs:
        runs = [("fissile", lambda prompts: own_answers(engine, prompts, work.tokens)), ("transformers", theirs)]
        for repetition in range(repetitions + 1):
            for name, run in runs if repetition % 2 else reversed(runs):
                rate = _rate(name, run, work, repetition)
                rates[name] += [rate] if repetition else []
    ours, others = (Throughput(name, work, tuple(rates[name])) for name in rates)
    return ours, others


def _rate(name: str, run: Callable[[list[list[int]]], Answers], work: Work, repetition: int) -> float:
    """Tokens per second; the last token of each is on the host when `run` ends."""
    prompts = work.prompts(repetition)
    start = time.perf_counter()
    answers = run(prompts)
    seconds = time.perf_counter() - start
    counts = sorted({len(answer) for answer in answers})
    if counts != [work.tokens] or len(answers) != work.batch:
        raise RuntimeError(f"{name} gave {len(answers)} answers of {counts} tokens, not {work.batch} of {work.tokens}")
    return work.batch * work.tokens / seconds
