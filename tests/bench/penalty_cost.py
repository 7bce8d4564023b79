"""What penalties cost a step beside the model: `python -m tests.bench.penalty_cost [--rows 256] [--tokens 8000]`.

All rows decode random ids, few of them often as in texts, with a repetition, a presence and a frequency penalty;
`--uniform`: each as often, so that nearly every token is a new one. Prints medians of a step: `batch`, CPU
time of the engine's thread, more than without penalties; `counts`, that of the launching thread; `logits`, wall time
that greedy sampling takes longer; and `frame`, bytes that go to a rank, more than without penalties.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from common.params.sampling_params import SamplingParams
from kernels.interface import KernelBackend, SampleParams
from kernels.penalties import Penalties
from kernels.select import select_backend
from worker.engine.batch import ScheduledBatch, SequenceColumns
from worker.engine.sequence import Sequence
from worker.model.logit_adjustments import SeenTokens
from worker.ranks.batch_delta import BatchEncoder
from worker.ranks.frames import encode

_PROMPT = 50
PENALIZED = SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, max_tokens=10**6)
PLAIN = SamplingParams(max_tokens=10**6)


class Rows:
    """Sequences that decode together."""

    def __init__(self, rows: int, tokens: int, draw: Callable[[], int], params: SamplingParams) -> None:
        self.draw = draw
        seqs = [Sequence([draw() for _ in range(_PROMPT)], 16, params) for _ in range(rows)]
        for seq in seqs:
            seq.token_ids += [draw() for _ in range(tokens)]
            seq.num_computed_tokens = len(seq.token_ids) - 1
            seq.block_table = list(range(-(-len(seq.token_ids) // 16) + 20))
        self.seqs = {seq.id: seq for seq in seqs}
        self.columns = SequenceColumns(seqs)

    def step(self) -> ScheduledBatch:
        """The next step's batch."""
        count = len(self.seqs)
        return ScheduledBatch(
            self.seqs, [1] * count, count, total_seqs_num_decode=count, total_tokens_num_decode=count,
            columns=self.columns,
        )  # fmt: skip

    def land(self) -> None:
        """A token for every row."""
        for seq in self.seqs.values():
            seq.append_token(self.draw())
            seq.num_computed_tokens += 1


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> tuple[float, Any]:
    """Milliseconds by a clock, and the result."""
    began = clock()
    result = call()
    return (clock() - began) * 1e3, result


def sampled(backend: KernelBackend, logits: torch.Tensor, penalties: Penalties | None) -> Callable[[], Any]:
    """A call that samples all rows greedily, which takes a glance at each logit."""
    none, whole = np.zeros(len(logits), np.int64), np.ones(len(logits), np.float32)
    params = SampleParams(0 * whole, none, whole, 0 * whole, penalties=penalties)
    return lambda: backend.sampling.sample(logits, params, none.astype(np.uint64), none, none)


def measure(rows: int, tokens: int, vocab: int, steps: int, kernels: str, uniform: bool) -> dict[str, float]:
    """Medians of the steps after the first one, which counts the existing tokens."""
    backend, rnd = select_backend(kernels), random.Random(5)

    def draw() -> int:
        return rnd.randrange(vocab) if uniform else int(vocab ** rnd.random())

    penalized, plain = Rows(rows, tokens, draw, PENALIZED), Rows(rows, tokens, draw, PLAIN)
    encoder, plain_encoder, seen = BatchEncoder(), BatchEncoder(), SeenTokens()
    logits = torch.randn(rows, vocab)
    told: dict[str, list[float]] = {"batch": [], "counts": [], "logits": [], "frame": []}
    for number in range(steps + 1):
        own_ms, batch = timed(penalized.step)
        plain_ms, plain_batch = timed(plain.step)
        frames = [len(encode(one.encode(each))) for one, each in ((encoder, batch), (plain_encoder, plain_batch))]
        counts_ms, found = timed(partial(seen.penalties, batch.histories))
        without_ms, with_ms = (timed(sampled(backend, logits, one), time.perf_counter)[0] for one in (None, found))
        if number:
            values = (own_ms - plain_ms, counts_ms, with_ms - without_ms, float(frames[0] - frames[1]))
            for name, value in zip(told, values, strict=True):
                told[name].append(value)
        penalized.land()
        plain.land()
    return {name: statistics.median(values) for name, values in told.items()}


def main() -> None:
    """Prints a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 8000])
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", default="cpu")
    parser.add_argument("--uniform", action="store_true")
    given = parser.parse_args()
    for tokens in given.tokens:
        found = measure(given.rows, tokens, given.vocab, given.steps, given.kernels, given.uniform)
        times = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items() if name != "frame")
        print(f"{given.rows} rows of {tokens} tokens: {times}, frame {found['frame']:.0f} bytes")


if __name__ == "__main__":
    main()
