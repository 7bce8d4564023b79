"""What digests of logits cost a decode step: `python -m tests.bench.digest_cost [--rows 1 8 32] [--steps 15]`.

Random weights in the shape of Qwen3-0.6B, greedy, in turns: steps without digests, then with those of one row, of one
row in eight, and of all rows. Prints the best and the median milliseconds of a step of each way. Steps that digest
compute the logits, which plain greedy ones do not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.shapes import QWEN3_0_6B
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

_BLOCK, _CONTEXT = 16, 64
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)


class Rows:
    """Sequences that decode together, of which the first `digested` have their logits digested in every step."""

    def __init__(self, count: int, digested: int) -> None:
        self.seqs: dict[int, Sequence] = {}
        per_seq = _CONTEXT // _BLOCK + 1
        for i in range(count):
            every = int(i < digested)
            seq = Sequence([7 + i] * _CONTEXT, _BLOCK, _GREEDY, num_prompt_tokens=_CONTEXT, logits_every=every)
            seq.block_table = list(range(i * per_seq, (i + 1) * per_seq))
            seq.num_computed_tokens = _CONTEXT - 1
            self.seqs[seq.id] = seq

    def step_ms(self, runner: ModelRunner) -> float:
        """Wall time of one step, again and again at the same position."""
        count = len(self.seqs)
        batch = ScheduledBatch(
            self.seqs,
            [1] * count,
            count,
            total_seqs_num=count,
            total_seqs_num_decode=count,
            total_tokens_num_decode=count,
        )
        began = time.perf_counter()
        output = runner.forward(batch)
        ended = time.perf_counter()
        assert len(output.logit_digests or {}) == sum(seq.logits_every for seq in self.seqs.values())
        return (ended - began) * 1e3


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), dtype="bfloat16", **QWEN3_0_6B)
        config = Config(model=str(path), dtype="bfloat16", kernels="cpu", max_model_len=256, kv_cache_block_size=_BLOCK)
        runner = ModelRunner(config, ModelConfig.from_folder(path))
    runner.allocate_kv_cache(max(given.rows) * (_CONTEXT // _BLOCK + 1))
    for count in given.rows:
        ways = {number: Rows(count, number) for number in sorted({0, 1, -(-count // 8), count})}
        told: dict[int, list[float]] = {number: [] for number in ways}
        for turn in range(given.steps + 2):
            for number, rows in ways.items():
                taken = rows.step_ms(runner)
                if turn > 1:
                    told[number].append(taken)
        said = ", ".join(
            f"{number} digested {min(values):.1f} ms ({statistics.median(values):.1f})"
            for number, values in told.items()
        )
        print(f"{count} rows: {said}")


if __name__ == "__main__":
    main()
