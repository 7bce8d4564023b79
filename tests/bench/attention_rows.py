"""Attention of a few rows of one sequence, as in steps that verify drafts: `python -m tests.bench.attention_rows`.

One layer after the other over a KV cache that is larger than the processor's caches, by the native kernels. Numbers of
rows, and with --against those of another build of the library of the same interface, take turns: ratios hold on a busy
machine too, to the other build, and of the cost to that of the first number of rows. One thread is timed by its CPU
time, several by the clock. The newest row's bits are compared in all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import asdict, dataclass
from pathlib import Path

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from kernels.cpu import attention, instruction_sets, library
from kernels.interface import KVSpec
from kernels.torch_backend.attention import PagedKVCache
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks

BLOCK = 16
# Of all layers together, at least, so that no cache has the next layer's; and most layers.
CACHE_BYTES = 160 << 20
MOST_LAYERS = 512


@dataclass(frozen=True)
class Heads:
    """Heads of a model; with a width of values its attention is latent."""

    query: int
    key: int
    dim: int
    value_dim: int = 0


SHAPES = {
    "qwen3-0.6b": Heads(16, 8, 128),
    "llama-3.2-1b": Heads(32, 8, 64),
    "llama-3-8b": Heads(32, 8, 128),
    "qwen3-32b": Heads(64, 8, 128),
    "deepseek-v3": Heads(16, 1, 576, 512),
}


@dataclass
class Cost:
    """What a number of rows takes in a context.

    Attributes:
        us: median microseconds of a layer.
        cost: median ratio to the first number of rows.
        ratio: median ratio of the other build to this one; 0 for none.
    """

    shape: str
    context: int
    rows: int
    us: float
    cost: float
    ratio: float = 0.0


class Sequence:
    """One sequence in the caches of `layers` layers, and its newest rows."""

    def __init__(self, heads: Heads, context: int, kv_dtype: torch.dtype, most: int) -> None:
        blocks = -(-context // BLOCK)
        self._heads, self._context = heads, context
        self._table = scattered_blocks([context], BLOCK, blocks, seed=1)[0]
        spec = KVSpec(heads.key, heads.dim, heads.value_dim)
        layers = min(MOST_LAYERS, -(-CACHE_BYTES // (spec.values_per_token * context * kv_dtype.itemsize)))
        self._cache = PagedKVCache.allocate(spec, layers, blocks, BLOCK, kv_dtype)
        self._cache.data[:] = torch.randn(self._cache.data.shape[1:]).to(kv_dtype)
        self._q = torch.randn(most, heads.query, heads.dim).bfloat16()
        self._layer = 0

    def next_layer(self) -> None:
        self._layer = (self._layer + 1) % len(self._cache.data)

    def attend(self, lib: CDLL, count: int) -> Callable[[], torch.Tensor]:
        """A function that computes the newest `count` rows in the layer that comes next."""
        step = attention.StepArrays(metadata([Rows(self._context - count, self._context, self._table)], BLOCK))
        q, scale = self._q[-count:], float(self._heads.dim**-0.5)
        if self._heads.value_dim:
            return lambda: attention.latent_attention(lib, q, self._cache, self._layer, step, scale, None)
        return lambda: attention.attention(lib, q, self._cache, self._layer, step, scale, None, None)


def measure(
    libraries: list[CDLL], shape: str, context: int, counts: list[int], repeats: int, options: argparse.Namespace
) -> list[Cost]:
    """Costs of some numbers of rows in one context; the last library's."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    sequence = Sequence(SHAPES[shape], context, getattr(torch, options.kv_dtype), max(counts))
    works = [[sequence.attend(lib, count) for lib in libraries] for count in counts]
    taken: list[list[list[float]]] = [[[] for _ in libraries] for _ in counts]
    for _ in range(repeats):
        newest = []
        for times, row in zip(taken, works, strict=True):
            for own, work in zip(times, row, strict=True):
                sequence.next_layer()
                start = clock()
                out = work()
                own.append(clock() - start)
                newest.append(out[-1])
        if not all(torch.equal(one, newest[0]) for one in newest):
            raise SystemExit("a row's bits depend on how many are computed, or on the build")
    first = taken[0][-1]
    return [
        Cost(
            shape,
            context,
            count,
            round(statistics.median(own[-1]) * 1e6, 1),
            round(_ratio(own[-1], first), 3),
            round(_ratio(own[0], own[-1]), 3) if len(libraries) > 1 else 0.0,
        )
        for count, own in zip(counts, taken, strict=True)
    ]


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def loaded(options: argparse.Namespace) -> list[CDLL]:
    """The other build first, if there is one."""
    libraries = [library.load()]
    if options.against:
        libraries.insert(0, library.load(options.against))
    for lib in libraries:
        instruction_sets.take(lib, options.cpu_isa)
        lib.fissile_set_threads(options.threads)
    return libraries


def main() -> None:
    """Prints a line for each context and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-isa", choices=instruction_sets.CHOICES, default=instruction_sets.AUTO)
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of all calls of one number of rows, by about")
    parser.add_argument("--against", type=Path, help="another libfissile_cpu.so, compared in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    libraries, found = loaded(options), []
    for shape in options.shapes:
        for context in options.contexts:
            repeats = max(15, min(400, options.tokens // context))
            for one in measure(libraries, shape, context, options.rows, repeats, options):
                against = f", {one.ratio:.2f} times as fast as the other build" if one.ratio else ""
                print(
                    f"{shape}, {context} tokens, {one.rows} rows: {one.us:.0f} us, {one.cost:.2f} of "
                    f"{options.rows[0]}{against}",
                    flush=True,
                )
                found.append(asdict(one))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
