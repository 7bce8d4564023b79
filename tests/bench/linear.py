"""Matrix products of the native kernels: `python -m tests.bench.linear [--threads 2] [--against LIBRARY] [...]`.

The four products of a layer of Qwen3-0.6B, or its output head (--head), several layers' weights in turn, so that they
come from memory, not from a cache. Numbers of rows, weights of each dtype, and those of another build of the library of
the same interface with --against, take turns layer by layer: ratios hold on a busy machine too, to the first weights,
and of the cost to that of the first number of rows. One thread is timed by its CPU time, several by the clock.
Beside them what the machine gave in the same run: the rate of reading memory, and of PyTorch's float32 product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.cpu import instruction_sets, library, linear
from tests.stored_weights import grouped_weight

# (outputs, inputs) of queries, keys and values together; output; gate and up together; down.
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
HEAD = ((151936, 1024),)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, **linear.FORMATS}
# K-quants of GGUF files: bits, group, and which parts the codes have (tests/stored_weights.py).
K_QUANTS = {
    "q4_k": (4, 32, torch.int8, True, True, False),
    "q5_k": (5, 32, torch.int8, True, True, False),
    "q6_k": (6, 16, torch.int8, False, False, False),
}


@dataclass(frozen=True)
class Candidate:
    """Weights of one dtype, packed by one library."""

    name: str
    library: CDLL
    rows_dtype: torch.dtype
    layers: list[list[linear.PanelLinear]]

    @property
    def numbers(self) -> int:
        """Of the weights of a layer."""
        return sum(packed.columns * packed.inner for packed in self.layers[0])

    @property
    def layer_bytes(self) -> int:
        return sum(packed.panels.nbytes for packed in self.layers[0])


def packed(name: str, suffix: str, lib: CDLL, weights: list[torch.Tensor], layers: int) -> Candidate:
    """A candidate; int8 and int4 are packed of bfloat16, K-quants of random codes."""
    if name in K_QUANTS:
        codes = [grouped_weight(rows, inner, *K_QUANTS[name]) for rows, inner in (weight.shape for weight in weights)]
        made = [[linear.pack_codes(lib, weight, None, torch.bfloat16) for weight in codes] for _ in range(layers)]
        return Candidate(name + suffix, lib, torch.bfloat16, made)
    dtype = DTYPES[name]
    own = torch.bfloat16 if dtype in linear.FORMATS.values() else dtype
    return Candidate(
        name + suffix,
        lib,
        own,
        [[linear.pack_any(lib, weight, None, own, dtype) for weight in weights] for _ in range(layers)],
    )


def candidates(options: argparse.Namespace) -> Iterator[Candidate]:
    """The candidates of the options; the first one is the baseline."""
    weights = [torch.randn(shape) * 0.02 for shape in (HEAD if options.head else SHAPES)]
    libraries = {"": library.load()}
    if options.against:
        libraries = {" against": library.load(options.against), **libraries}
    for lib in libraries.values():
        instruction_sets.take(lib, options.cpu_isa)
        lib.fissile_set_threads(options.threads)
    for dtype in options.dtypes:
        for suffix, lib in libraries.items():
            yield packed(dtype, suffix, lib, weights, options.layers)


def seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """What one call took."""
    start = clock()
    work()
    return clock() - start


def layer_seconds(
    compared: list[Candidate], counts: list[int], repeats: int, clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Of each number of rows and each candidate: the sum over the products of a layer of the best time of each."""
    best = {(rows, which): [float("inf")] * len(one.layers[0]) for rows in counts for which, one in enumerate(compared)}
    # Not within the turns: PyTorch's threads, once they have converted, look for work on the cores that are timed.
    inputs = {
        (rows, weight.inner, one.rows_dtype): torch.randn(rows, weight.inner).to(one.rows_dtype)
        for rows in counts
        for one in compared
        for weight in one.layers[0]
    }
    time.sleep(0.5)
    for turn, rows in enumerate(counts * repeats):
        for which, one in enumerate(compared):
            times = best[rows, which]
            for product, weight in enumerate(one.layers[turn % len(one.layers)]):
                x = inputs[rows, weight.inner, one.rows_dtype]
                times[product] = min(times[product], seconds(partial(linear.linear, one.library, x, weight), clock))
    return {rows: [sum(best[rows, which]) for which in range(len(compared))] for rows in counts}


def peaks(repeats: int, clock: Callable[[], float]) -> tuple[float, float]:
    """GFLOP/s of PyTorch's float32 product of 1024 x 1024 matrices, and GB/s of its sum of 256 MiB."""
    a, b, long = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.ones(1 << 26)
    product = min(seconds(lambda: a @ b, clock) for _ in range(repeats))
    reading = min(seconds(long.sum, clock) for _ in range(repeats))
    return 2 * 1024**3 / product / 1e9, long.nbytes / reading / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES, *K_QUANTS), default=["bfloat16", "int8"])
    parser.add_argument("--cpu-isa", choices=instruction_sets.CHOICES, default=instruction_sets.AUTO)
    parser.add_argument("--layers", type=int, default=4, help="layers whose weights are used in turn")
    parser.add_argument("--repeats", type=int, default=24, help="calls of each product, of which the best counts")
    parser.add_argument("--head", action="store_true", help="the product of the output head")
    parser.add_argument("--against", type=Path, help="another libfissile_cpu.so, compared as the first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    compared = list(candidates(options))
    flops, reading = peaks(options.repeats, clock)
    print(f"{options.threads} threads; PyTorch float32 {flops:.0f} GFLOP/s, reading {reading:.1f} GB/s")
    print(f"{'rows':>4}  {'weights':<18}{'ms a layer':>11}{'GFLOP/s':>9}{'GB/s':>7}{'ratio':>7}{'cost':>7}")
    times = layer_seconds(compared, options.rows, options.repeats, clock)
    for rows in options.rows:
        for which, one in enumerate(compared):
            taken = times[rows][which]
            rates = f"{2 * rows * one.numbers / taken / 1e9:9.1f}{one.layer_bytes / taken / 1e9:7.1f}"
            ratios = f"{times[rows][0] / taken:7.2f}{taken / times[options.rows[0]][which]:7.2f}"
            print(f"{rows:4}  {one.name:<18}{taken * 1e3:11.2f}{rates}{ratios}", flush=True)


if __name__ == "__main__":
    main()
