"""Steps on a GPU against what its memory and its matrix units could do: `python -m tests.bench.gpu_steps [...]`.

Random weights. For each way to run (captured or not, batch-invariant or tuned): decodes of several batch sizes,
launched ahead as a worker does, and one long prompt. The floor of a decode is what it must read, all weights once and
the keys and values of its sequences, over the bandwidth of a copy; that of a prompt is its multiplications over the
rate of a large product, both measured first. `--compared BATCH [...]` puts transformers' continuous batching beside the
first of these ways, output tokens per second of whole requests (tests/bench/gpu_transformers.py). `--json FILE` keeps
the figures. For a try without a GPU: TRITON_INTERPRET=1 or --kernels cpu, with --shape tiny --batches 1 --prefill 16
--context 8 --steps 3.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.gpu_transformers import Throughput, Transformers, Work, compare
from tests.checkpoints import make_checkpoint
from tests.shapes import NAMED
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

# How to run, by name.
WAYS: dict[str, dict[str, Any]] = {
    "invariant, graphs": {},
    "invariant, eager": {"enforce_eager": True},
    "tuned, graphs": {"batch_invariant": False},
    "tuned, eager": {"batch_invariant": False, "enforce_eager": True},
}
BLOCK_SIZE = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
PRODUCT = {"cuda": 8192, "cpu": 512}
REPETITIONS = 10


@dataclass(frozen=True)
class Device:
    """What the machine did.

    Attributes:
        name: of the GPU.
        bandwidth: bytes per second, read and written, of a copy.
        rate: operations per second of a product of bfloat16.
    """

    name: str
    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Figure:
    """One measurement, seconds; `floor_share` is how much of `time_s` the floor is."""

    way: str
    work: str
    time_s: float
    floor_s: float

    @property
    def floor_share(self) -> float:
        return self.floor_s / self.time_s


def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the best of some runs."""
    run()
    times = []
    for _ in range(REPETITIONS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(device: torch.device) -> Device:
    """What the machine does now."""
    kind, size = device.type, PRODUCT[device.type]
    source = torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = fastest(lambda: target.copy_(source), device)
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    product_s = fastest(lambda: a @ b, device)
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"
    return Device(name, 2 * len(source) / copy_s, 2 * size**3 / product_s)


def step_times(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> list[float]:
    """Seconds between the ends of all steps of requests that begin together."""
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, **GREEDY))
    times, last = [], time.perf_counter()
    while engine.core.has_unfinished():
        engine.step()
        times.append(time.perf_counter() - last)
        last += times[-1]
    return times


def figures(way: str, engine: LLMEngine, device: Device, options: argparse.Namespace) -> Iterator[Figure]:
    """Decodes of each batch size, and one prompt."""
    runner = engine.core.runner
    assert isinstance(runner, ModelRunner)
    weights, kv_bytes = weight_numbers(runner), runner.kv_block_bytes / BLOCK_SIZE
    for batch in options.batches:
        prompts = [[(7 * i + j) % 300 + 5 for j in range(options.context)] for i in range(batch)]
        times = step_times(engine, prompts, options.steps + 4)[-options.steps : -1]
        read = weights * runner.dtype.itemsize + batch * (options.context + options.steps / 2) * kv_bytes
        yield Figure(way, f"decode of {batch}", statistics.median(times), read / device.bandwidth)
    prompt = [j % 300 + 5 for j in range(options.prefill)]
    engine.generate([prompt[:-1]], SamplingParams(max_tokens=1, **GREEDY))
    start = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1, **GREEDY))
    config, tokens = runner.model_config, options.prefill
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens**2
    head = config.hidden_size * config.vocab_size
    operations = 2 * (weights - head) * tokens + 2 * head + attention
    yield Figure(way, f"prompt of {tokens}", time.perf_counter() - start, operations / device.rate)


def weight_numbers(runner: ModelRunner) -> int:
    """Numbers of all matrices that a step multiplies by: embeddings are looked up, and the head counts."""
    config = runner.model_config
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer + config.hidden_size * config.vocab_size


def comparisons(folder: Path, device: torch.device, options: argparse.Namespace) -> Iterator[Throughput]:
    """Ours and theirs of each batch size, in turn; their memory for keys and values comes beside ours."""
    works = [Work(batch, options.context, options.steps, max(options.prefill, 2048)) for batch in options.compared]
    blocks = max(work.batch * -(-(work.context + work.tokens) // BLOCK_SIZE) for work in works) + 1
    own = replace(
        config(str(folder), options.ways[0], options),
        max_model_len=options.context + options.steps,
        max_num_seqs=max(options.compared),
        num_kvcache_blocks=blocks,
    )
    engine, peer = LLMEngine(own), Transformers(folder, options.dtype, device)
    for work in works:
        ours, theirs = compare(engine, peer, work, options.repetitions)
        line = f"{work.batch} requests: {ours.median:.1f} tokens/s, transformers ({peer.attention}) {theirs.median:.1f}"
        print(f"{options.ways[0]}: {line}: {ours.median / theirs.median:.2f} times", flush=True)
        yield from (ours, theirs)
    engine.close()


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(NAMED), default="qwen3-8b")
    parser.add_argument("--model", help="folder of a checkpoint that is there, instead of one of that shape")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt before a decode")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of each batch size")
    parser.add_argument("--compared", nargs="+", type=int, default=[], help="batch sizes for transformers beside ours")
    parser.add_argument("--repetitions", type=int, default=3, help="of a comparison")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = measured(device)
    print(f"{machine.name}: {machine.bandwidth / 1e9:.0f} GB/s, {machine.rate / 1e12:.1f} TFLOP/s", flush=True)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or made
        if not options.model:
            shape = NAMED[options.shape] | {"max_position_embeddings": 32_768}
            make_checkpoint(made, dtype=options.dtype, tokenizer=False, device=device.type, **shape)
        for way in options.ways:
            engine = LLMEngine(config(folder, way, options))
            for figure in figures(way, engine, machine, options):
                share = f"{figure.floor_share:.0%} of it is the floor"
                print(f"{way}: {figure.work}: {figure.time_s * 1e3:.2f} ms, {share}", flush=True)
                found.append(asdict(figure) | {"floor_share": figure.floor_share})
            engine.close()
            del engine
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        throughputs = [asdict(each) for each in comparisons(Path(folder), device, options)] if options.compared else []
    if options.json:
        kept = {"machine": asdict(machine), "figures": found, "throughputs": throughputs}
        options.json.write_text(json.dumps(kept, indent=1))


def config(folder: str, way: str, options: argparse.Namespace) -> Config:
    """An engine's, run one of the WAYS."""
    longest = max(options.prefill, options.context + options.steps) + 16
    return Config(
        model=folder,
        dtype=options.dtype,
        kernels=options.kernels,
        max_model_len=longest,
        max_num_batched_tokens=max(options.prefill, 2048),
        max_num_seqs=max(options.batches),
        **WAYS[way],
    )


if __name__ == "__main__":
    main()
