"""Time of a model's steps, back ends side by side: `python -m tests.bench.decode_step [--kernels torch cpu] [...]`.

Random weights. Decodes of 1, 8 and 32 sequences with top-k and top-p sampling, and one prefill. The back ends take
turns, step by step, so that what else runs on the machine meets them alike; look at ratios. CPU time is of all threads.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS
from tests.checkpoints import make_checkpoint
from tests.shapes import QWEN3_0_6B
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

# The demo model's shape, and Qwen3-0.6B's layers, of which --layers says how many.
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 640,
        "vocab_size": 1024,
    },
    "qwen3-0.6b": QWEN3_0_6B,
}
BLOCK_SIZE = 16
MOST_SEQUENCES = 32
TOP_K_AND_P = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)


def batch_of(
    sequences: int, context: int, new: int, vocab: int, params: SamplingParams = TOP_K_AND_P
) -> ScheduledBatch:
    """The last `new` of each sequence's `context` tokens."""
    rnd = random.Random(0)
    seqs = [Sequence([rnd.randrange(5, vocab) for _ in range(context)], BLOCK_SIZE, params) for _ in range(sequences)]
    for i, seq in enumerate(seqs):
        seq.block_table = list(range(i * seq.num_blocks, (i + 1) * seq.num_blocks))
        seq.num_computed_tokens = context - new
    return ScheduledBatch({seq.id: seq for seq in seqs}, [new] * sequences, sequences * new)


Times = dict[str, list[tuple[float, float]]]


def measure(runners: dict[str, ModelRunner], batch: ScheduledBatch, steps: int) -> Times:
    """Seconds of wall clock and of CPU that each step of each runner took."""
    for runner in runners.values():
        runner.forward(batch)
    times: Times = {name: [] for name in runners}
    for _ in range(steps):
        for name, runner in runners.items():
            start = time.perf_counter(), time.process_time()
            runner.forward(batch)
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times


def report(what: str, times: Times) -> None:
    """One line: medians, the best step, CPU, and how often each back end goes into the first one's CPU time."""
    parts, cpu = [], {}
    for name, steps in times.items():
        walls, cpus = ([step[i] * 1e3 for step in steps] for i in (0, 1))
        cpu[name] = statistics.median(cpus)
        parts.append(f"{name} {statistics.median(walls):.2f} ms (best {min(walls):.2f}), CPU {cpu[name]:.2f}")
    first, *others = cpu
    parts += [f"CPU {first}/{name} {cpu[first] / cpu[name]:.2f}" for name in others]
    print(f"{what}: " + "; ".join(parts), flush=True)


def profile(run: Callable[[], object], steps: int) -> None:
    """Where the time of some steps goes, by function."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        run()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    """Prints a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=list(CPU_BACKENDS), default=list(CPU_BACKENDS))
    parser.add_argument("--shape", choices=list(SHAPES), default="demo")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill; 0 for none")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = shape | {"num_hidden_layers": options.layers}
    longest = max(options.context, options.prefill)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), dtype=options.dtype, tokenizer=False, **shape)
        runners = {
            name: ModelRunner(
                Config(model=folder, dtype=options.dtype, kernels=name, max_model_len=longest),
                ModelConfig.from_folder(folder),
            )
            for name in options.kernels
        }
    for runner in runners.values():
        runner.allocate_kv_cache(MOST_SEQUENCES * -(-longest // BLOCK_SIZE))
    works = {
        f"decode of {n} at {options.context}": batch_of(n, options.context, 1, shape["vocab_size"])
        for n in (1, 8, MOST_SEQUENCES)
    }
    if options.prefill:
        works[f"prefill of {options.prefill}"] = batch_of(1, options.prefill, options.prefill, shape["vocab_size"])
    for what, batch in works.items():
        report(what, measure(runners, batch, options.steps))
        if options.profile:
            for runner in runners.values():
                profile(lambda runner=runner, batch=batch: runner.forward(batch), options.steps)  # type: ignore[misc]


if __name__ == "__main__":
    main()
