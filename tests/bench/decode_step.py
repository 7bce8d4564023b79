"""Time of one decode step of a 4M-parameter Qwen3 shape: `python -m tests.bench.decode_step [--threads 1]`."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config
from common.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from worker.batch import ScheduledBatch
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.sequence import Sequence

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 640,
    "vocab_size": 1024,
}
BLOCK_SIZE = 16


def decode_batch(sequences: int, context: int) -> ScheduledBatch:
    """One decode of each sequence, at `context` tokens, with top-k and top-p sampling."""
    rnd = random.Random(0)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    seqs = [Sequence([rnd.randrange(5, 1024) for _ in range(context)], BLOCK_SIZE, params) for _ in range(sequences)]
    for i, seq in enumerate(seqs):
        seq.block_table = list(range(i * seq.num_blocks, (i + 1) * seq.num_blocks))
        seq.num_computed_tokens = context - 1
    return ScheduledBatch({seq.id: seq for seq in seqs}, [1] * sequences, sequences)


def main() -> None:
    """Prints wall and CPU milliseconds per step, medians of `--steps` steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, **SHAPE)
        runner = ModelRunner(Config(model=folder, dtype="float32"), ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(64 * -(-options.context // BLOCK_SIZE))
    for sequences in (1, 8, 64):
        batch = decode_batch(sequences, options.context)
        runner.forward(batch)
        wall, cpu = [], []
        for _ in range(options.steps):
            start, start_cpu = time.perf_counter(), time.process_time()
            runner.forward(batch)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        print(
            f"B={sequences}: {statistics.median(wall) * 1e3:.1f} ms a step (best {min(wall) * 1e3:.1f}), "
            f"CPU {statistics.median(cpu) * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
