"""Fissile's steps against the machine's floor: `python -m tests.bench.peers.steps [--output FILE]`.

The whole model on our native kernels, in bfloat16 and with weights of 8 and of 4 bits, in turns: greedy decodes of 1, 8
and 32 sequences at 256 tokens of context, a prefill of 512 tokens. The floors are those of `floors.py`, with the limits
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.cli.bench.machine import cpu_model
from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.decode_step import BLOCK_SIZE, MOST_SEQUENCES, batch_of, measure
from tests.bench.peers import noise, peak, report
from tests.bench.peers.checkpoint import SHAPES, add_shape_option
from tests.bench.peers.floors import Machine, Shape, decode_floor, prefill_floor
from tests.bench.peers.folder import PeerFolder, add_folder_option, need
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner

BATCHES: Final = (1, 8, MOST_SEQUENCES)
CONTEXT: Final = 256
PREFILL: Final = 512
_GREEDY: Final = SamplingParams(temperature=0.0)
# Bytes of a weight by what `--quantize` says; int8 has a scale of four bytes for 128 numbers, int4 of two for 32.
_WEIGHT_BYTES: Final = {"no": 2.0, "int8": 1.0 + 4 / 128, "int4": 18 / 32}


def load(model: Path, quantize: str) -> ModelRunner:
    """The model with a KV cache for the largest batch."""
    config = Config(model=str(model), dtype="bfloat16", kernels="cpu", max_model_len=PREFILL, quantize=quantize)
    runner = ModelRunner(config, ModelConfig.from_folder(str(model)))
    runner.allocate_kv_cache(MOST_SEQUENCES * PREFILL // BLOCK_SIZE)
    return runner


def limits(shape: Shape, machine: Machine, size: float) -> dict[str, tuple[float, float]]:
    """Floor in seconds and operations of each step, by its name; `size` is bytes of a weight."""
    floors = {
        f"decode of {batch}": (
            decode_floor(shape, machine, batch, CONTEXT, size),
            shape.decode_flops(batch, CONTEXT),
        )
        for batch in BATCHES
    }
    prefill = prefill_floor(shape, machine, PREFILL, size), shape.prefill_flops(PREFILL)
    return {**floors, f"prefill of {PREFILL}": prefill}


def step_lines(
    runners: Mapping[str, ModelRunner], shape: Shape, machine: Machine, vocab_size: int, steps: int
) -> list[report.Line]:
    """One line of kind `step` for each step of each runner; runners are named as in _WEIGHT_BYTES, and take turns."""
    batches = {f"decode of {n}": batch_of(n, CONTEXT, 1, vocab_size, _GREEDY) for n in BATCHES}
    batches[f"prefill of {PREFILL}"] = batch_of(1, PREFILL, PREFILL, vocab_size, _GREEDY)
    lines: list[report.Line] = []
    for name, batch in batches.items():
        before = noise.read([])
        times = measure(dict(runners), batch, steps)
        quiet = noise.is_quiet(noise.shares(before, noise.read([])))
        for weights, taken in times.items():
            floor_s, flops = limits(shape, machine, _WEIGHT_BYTES[weights])[name]
            walls = [wall for wall, _ in taken]
            line: dict[str, Any] = {"kind": "step", "step": name, "weights": weights, "quiet": quiet}
            line |= {"best_s": min(walls), "median_s": statistics.median(walls), "floor_s": floor_s, "flops": flops}
            lines.append(line)
    return lines


def main() -> None:
    """Prints the table; with `--output` appends JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folder_option(parser)
    add_shape_option(parser)
    parser.add_argument("--quantize", nargs="+", choices=list(_WEIGHT_BYTES), default=list(_WEIGHT_BYTES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON lines, appended to")
    options = parser.parse_args()
    how = f"python -m tests.bench.peers.checkpoint --folder {options.folder} --shape {options.shape}"
    model = need(PeerFolder(options.folder).checkpoint(options.shape) / "tokenizer.json", how).parent
    torch.set_num_threads(options.threads)
    machine, config = peak.measure(options.threads), SHAPES[options.shape]
    about: Mapping[str, Any] = {"cpu": cpu_model(), "threads": options.threads, "config": config}
    lines: list[report.Line] = [{"kind": "machine", "read": machine.read, "flops": machine.flops, **about}]
    runners = {quantize: load(model, quantize) for quantize in options.quantize}
    lines += step_lines(runners, Shape.of(config), machine, config["vocab_size"], options.steps)
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(report.text(lines))


if __name__ == "__main__":
    main()
