"""Kernels of engine steps on a GPU: how often each runs, how long, and the time between kernels.

    python -m tests.bench.gpu_trace --model FOLDER [--batches 1 64] [--prefill 8192] [--json FILE]

Decodes of each batch size run as a worker runs them (captured, launched ahead), then one prompt. For each: the time of
a step, the share of it in which a kernel runs, the gaps between kernels, and a line for each kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.gpu_steps import GREEDY
from worker.llm_engine import LLMEngine

MOST_LINES = 16


@dataclass(frozen=True)
class Traced:
    """Kernels of one kind of step.

    Attributes:
        work: what ran.
        steps: how many were traced.
        step_us: from the first kernel to the end of the last one, for each step.
        busy_share: part of that time in which a kernel ran.
        gap_us: median time between a kernel and the next one.
        kernels: (name, runs of a step, microseconds of a run), the longest in all first.
    """

    work: str
    steps: int
    step_us: float
    busy_share: float
    gap_us: float
    kernels: list[tuple[str, float, float]]

    def lines(self) -> Iterator[str]:
        yield f"{self.work}: {self.step_us:.0f} us, {self.busy_share:.0%} busy, median gap {self.gap_us:.2f} us"
        for name, runs, time_us in self.kernels[:MOST_LINES]:
            yield f"  {name:46} {runs:7.1f} x {time_us:8.2f} us = {runs * time_us:9.0f} us"


def traced(work: str, steps: int, events: list[Any]) -> Traced:
    """Sums up the device's events of some steps."""
    spans = sorted((each.time_range.start, each.time_range.end, _name(each.name)) for each in events)
    if not spans:
        return Traced(work, steps, 0.0, 0.0, 0.0, [])
    of_name: dict[str, list[float]] = defaultdict(list)
    busy, gaps, last = 0.0, [], spans[0][0]
    for start, end, name in spans:
        of_name[name].append(end - start)
        gaps.append(max(0.0, start - last))
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    whole = last - spans[0][0]
    kernels = sorted(
        ((name, len(times) / steps, sum(times) / len(times)) for name, times in of_name.items()),
        key=lambda kernel: -kernel[1] * kernel[2],
    )
    return Traced(work, steps, whole / steps, busy / whole, sorted(gaps)[len(gaps) // 2], kernels)


def _name(kernel: str) -> str:
    """Name of a kernel without its arguments."""
    return re.sub(r"\(.*|<.*|^void ", "", kernel)[-46:] or kernel[:46]


def device_events(trace: Any) -> list[Any]:
    """Events of the GPU itself, of a profile."""
    return [event for event in trace.events() or [] if event.device_type == DeviceType.CUDA]


def decodes(engine: LLMEngine, batch: int, context: int, steps: int) -> Traced:
    """Traces decode steps of `batch` sequences, after their prompts and some further steps."""
    # Steps of the prompts, and some of decodes.
    before = -(-batch * context // engine.config.max_num_batched_tokens) + 6
    params = SamplingParams(max_tokens=before + steps + 6, **GREEDY)
    for i in range(batch):
        engine.add_request([(7 * i + j) % 300 + 5 for j in range(context)], params)
    for _ in range(before):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    while engine.core.has_unfinished():
        engine.step()
    return traced(f"decode of {batch}", steps, device_events(trace))


def prompt(engine: LLMEngine, tokens: int) -> Traced:
    params = SamplingParams(max_tokens=1, **GREEDY)
    engine.generate([[j % 200 + 5 for j in range(tokens)]], params)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        engine.generate([[j % 300 + 5 for j in range(tokens)]], params)
        torch.cuda.synchronize()
    return traced(f"prompt of {tokens}", 1, device_events(trace))


def main(arguments: list[str] | None = None) -> int:
    """Prints the kernels of each work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt before a decode")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are traced")
    parser.add_argument("--eager", action="store_true", help="kernel by kernel instead of captured")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU: there is nothing to trace")
        return 0
    engine = LLMEngine(
        Config(
            model=options.model,
            kernels="triton",
            dtype="bfloat16",
            max_model_len=max(options.prefill, options.context + options.steps) + 32,
            max_num_batched_tokens=max(options.prefill, 2048),
            max_num_seqs=max(options.batches, default=1),
            enforce_eager=options.eager,
        )
    )
    found = [decodes(engine, batch, options.context, options.steps) for batch in options.batches]
    found += [prompt(engine, options.prefill)] if options.prefill else []
    for each in found:
        print(*each.lines(), sep="\n", flush=True)
    engine.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
