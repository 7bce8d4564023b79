"""Throughput of one large batch on a GPU, batch-invariant and tuned: `python -m tests.bench.gpu_batch --model FOLDER`.

The work that SGLang published for its deterministic inference: Qwen3-8B, 256 requests of 1,024 tokens in and 1,024 out.
All requests arrive at once, are greedy and ignore the end of sequence. Prints output tokens per second of the whole
job, prompts included, and those of steps in which all requests decode. With fewer `--tokens` prompts weigh more, so
that the first figure is lower than that of the whole work.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.gpu_steps import GREEDY, WAYS
from worker.llm_engine import LLMEngine


@dataclass(frozen=True)
class Throughput:
    """Output tokens per second of one way.

    Attributes:
        way: to run, of gpu_steps.WAYS.
        requests, context, tokens: of the work.
        seconds: of the whole job.
        tokens_per_s: output tokens per second of it.
        decode_tokens_per_s: of steps in which all requests decode.
    """

    way: str
    requests: int
    context: int
    tokens: int
    seconds: float
    tokens_per_s: float
    decode_tokens_per_s: float


def throughput(way: str, options: argparse.Namespace) -> Throughput:
    """Runs the work once, after a short one that warms up."""
    engine = LLMEngine(
        Config(
            model=options.model,
            kernels="triton",
            dtype="bfloat16",
            max_model_len=options.context + options.tokens + 16,
            max_num_batched_tokens=options.budget,
            max_num_seqs=options.requests,
            **WAYS[way],
        )
    )
    draw = random.Random(0)
    prompts = [draw.choices(range(5, 305), k=options.context) for _ in range(options.requests)]
    engine.generate([prompt[::-1] for prompt in prompts[:8]], SamplingParams(max_tokens=4, **GREEDY))
    start = time.perf_counter()
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=options.tokens, **GREEDY))
    times, last, total = [], start, 0
    while engine.core.has_unfinished():
        total += sum(len(answer["token_ids"]) for answer in engine.step())
        times.append(time.perf_counter() - last)
        last += times[-1]
    total += sum(len(answer["token_ids"]) for answer in engine.step())
    engine.close()
    if total != options.requests * options.tokens:
        raise RuntimeError(f"{total} tokens came, not {options.requests * options.tokens}")
    # All sequences decode in the last steps.
    step = statistics.median(times[-max(1, options.tokens // 2) :])
    work = (options.requests, options.context, options.tokens)
    return Throughput(way, *work, last - start, total / (last - start), options.requests / step)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--budget", type=int, default=16_384, help="most tokens of a step")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["invariant, graphs", "tuned, graphs"])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    found = []
    for way in options.ways:
        each = throughput(way, options)
        work = f"{each.requests} x ({each.context} in, {each.tokens} out)"
        rates = f"{each.tokens_per_s:.0f} tokens/s, {each.decode_tokens_per_s:.0f} of decodes alone"
        print(f"{way}: {work}: {each.seconds:.2f} s, {rates}", flush=True)
        found.append(asdict(each))
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
