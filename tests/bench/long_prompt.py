"""Gaps of streams beside a long prompt: `python -m tests.bench.long_prompt [--folder FOLDER] [--rounds 3]`.

Random weights of Qwen3-0.6B's shape in bfloat16. Four streams decode when a prompt of 3,000 tokens arrives. Engines
with and without a prefill slice take turns. Prints the usual decode step, the streams' longest gap until the prompt's
first token, the prompt's time to first token, and the tokens per second of all sequences, prompt tokens included. In
the first round the engine does not know its speed yet.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.decode_step import SHAPES
from tests.checkpoints import make_checkpoint
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine, default_config
from worker.model.model_runner import ModelRunner

_USUAL_STEPS: Final = 20


@dataclass(frozen=True)
class Round:
    """One measurement: usual step, longest gap and time to first token in seconds; rate in tokens per second."""

    usual: float
    longest_gap: float
    ttft: float
    rate: float


def measure(core: EngineCore, streams: int, prompt_tokens: int, place: int) -> Round:
    """Measures one long prompt beside `streams` sequences, then ends them."""
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    beside = [Sequence([10 + place, i, 1, 2, 3, 4, 5, 6], 16, params) for i in range(streams)]
    core.add_group(beside)
    steps = list[float]()
    while len(steps) < _USUAL_STEPS:
        begin = time.monotonic()
        core.step()
        steps.append(time.monotonic() - begin)
    begin, before = time.monotonic(), sum(seq.num_tokens for seq in beside)
    long = Sequence([20 + place] * prompt_tokens, 16, SamplingParams(max_tokens=1))
    core.add_group([long])
    last, gaps = [begin] * streams, list[float]()
    counts = [seq.num_tokens for seq in beside]
    while not long.is_finished:
        core.step()
        now = time.monotonic()
        for i, seq in enumerate(beside):
            if seq.num_tokens > counts[i]:
                gaps.append(now - last[i])
                counts[i], last[i] = seq.num_tokens, now
    gaps += [now - each for each in last]
    rate = (prompt_tokens + sum(counts) - before) / (now - begin)
    for seq in beside:
        core.abort(seq.id)
    while core.has_unfinished():
        core.step()
    return Round(statistics.median(steps[_USUAL_STEPS // 2 :]), max(gaps), now - begin, rate)


def rounds(folder: Path, options: argparse.Namespace) -> Iterator[tuple[float, Round]]:
    """Yields (slice, Round) for each slice in turn, `options.rounds` times."""
    config = replace(
        default_config(folder), dtype="bfloat16", max_model_len=options.prompt + 1000, num_kvcache_blocks=1000
    )
    cores = {slice_s: _core(replace(config, prefill_slice_s=slice_s)) for slice_s in options.slices}
    for place in range(options.rounds):
        for slice_s, core in cores.items():
            yield slice_s, measure(core, options.streams, options.prompt, place)


def _core(config: Config) -> EngineCore:
    core = LLMEngine(config).core
    assert isinstance(core.runner, ModelRunner)
    # As in a worker: the first use of a KV cache page takes 4 ms, and 56 pages are first used at once.
    core.runner.touch_kv_cache()
    return core


def main() -> None:
    """Prints one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of a checkpoint; default: random weights of the shape")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--slices", type=float, nargs="+", default=[0.0, 0.25], help="seconds; 0 is none")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=3000, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # A worker collects garbage only between steps.
    gc.disable()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.folder is None:
            shape = dict(SHAPES["qwen3-0.6b"], max_position_embeddings=options.prompt + 1000)
            shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
            make_checkpoint(folder, "qwen3", dtype="bfloat16", **shape)
        for slice_s, found in rounds(folder, options):
            gap = f"usual step {1000 * found.usual:.0f} ms, longest gap {1000 * found.longest_gap:.0f} ms"
            print(
                f"slice {slice_s:g} s: {gap}, time to first token {found.ttft:.1f} s, {found.rate:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
