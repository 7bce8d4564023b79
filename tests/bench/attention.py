"""Speed of attention, back ends side by side: `python -m tests.bench.attention [--kernels torch cpu] [...]`.

One layer of Qwen3-0.6B's heads over a KV cache that is larger than the processor's: decodes of 32, 8 and 1 sequences,
and a prefill. The back ends take turns. Each figure is a fraction of what the same run reaches in a sum over a large
array (bytes) and in products of large float32 matrices (operations), by PyTorch with the same threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import numpy as np
import torch

from kernels.interface import AttentionMetaData, KernelBackend, KVSpec
from kernels.select import CPU_BACKENDS, select_backend

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 16, 8, 128, 16
# Keys and values of all layers together exceed this size, so that no cache holds the next layer's.
CACHE_BYTES = 128 << 20
MOST_LAYERS = 64


@dataclass(frozen=True)
class Work:
    """The last `new` rows of each of some sequences of `context` tokens."""

    sequences: int
    context: int
    new: int

    def __str__(self) -> str:
        kind = "decode" if self.new == 1 else f"prefill of {self.new} tokens"
        return f"{kind}, {self.sequences} x {self.context}"

    @property
    def blocks(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values that one layer reads."""
        return self.sequences * self.context * KV_HEADS * DIM * 2 * dtype.itemsize

    @property
    def operations(self) -> int:
        """Of one layer: two products, of a multiplication and an addition each."""
        return 4 * DIM * HEADS * self.sequences * sum(range(self.context - self.new + 1, self.context + 1))

    def metadata(self) -> AttentionMetaData:
        """The step, its blocks all over the pool."""
        pool = np.random.default_rng(0).permutation(self.sequences * self.blocks)
        tables = pool.reshape(self.sequences, self.blocks).astype(np.int64)
        positions = np.arange(self.context - self.new, self.context)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return AttentionMetaData(
            cu_seqlens_q=np.arange(self.sequences + 1, dtype=np.int64) * self.new,
            seq_lens=np.full(self.sequences, self.context, np.int64),
            block_tables=tables,
            slot_mapping=slots.ravel(),
        )


def attention(backend: KernelBackend, work: Work, dtype: torch.dtype, kv_dtype: torch.dtype) -> Callable[[], None]:
    """A function that attends in the next layer each time."""
    layers = min(MOST_LAYERS, -(-CACHE_BYTES // work.kv_bytes(kv_dtype)))
    blocks = work.sequences * work.blocks
    cache = backend.kv_cache.allocate(KVSpec(KV_HEADS, DIM), layers, blocks, BLOCK_SIZE, kv_dtype)
    rows = torch.randn(blocks * BLOCK_SIZE, KV_HEADS, DIM).to(dtype)
    fill = Work(1, blocks * BLOCK_SIZE, blocks * BLOCK_SIZE).metadata()
    fill.plan = backend.attention.plan(fill, cache, HEADS)
    for layer in range(layers):
        backend.attention.write(cache, layer, rows, rows, fill)
    step = work.metadata()
    step.plan = backend.attention.plan(step, cache, HEADS)
    q = torch.randn(work.sequences * work.new, HEADS, DIM).to(dtype)
    layer = 0

    def attend() -> None:
        nonlocal layer
        backend.attention.apply(q, cache, layer, step, DIM**-0.5)
        layer = (layer + 1) % layers

    return attend


Clock = Callable[[], float]


def best_of(functions: Sequence[Callable[[], object]], times: int, clock: Clock) -> list[float]:
    """The least seconds that each took, in turns."""
    best = [float("inf")] * len(functions)
    for _ in range(times):
        for i, function in enumerate(functions):
            start = clock()
            function()
            best[i] = min(best[i], clock() - start)
    return best


def peaks(clock: Clock) -> tuple[float, float]:
    """Bytes per second read from memory, and float32 operations per second."""
    numbers, a = torch.ones(64 << 20), torch.randn(1024, 1024)
    (read,) = best_of([numbers.sum], 10, clock)
    (multiplied,) = best_of([lambda: a @ a], 10, clock)
    return numbers.nbytes / read, 2 * 1024**3 / multiplied


def main() -> None:
    """Prints a line for each workload and back end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=list(CPU_BACKENDS), default=list(CPU_BACKENDS))
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--kv-dtype", help="of the cache; the model's if left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=256, help="of the decodes")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50, help="timed calls of each back end, of which the best counts")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time, for busy machines; with one thread only"
    )
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error(f"--cpu-time is of one thread, not of --threads {options.threads}")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    kv_dtype = dtype if options.kv_dtype is None else getattr(torch, options.kv_dtype)
    backends = {name: select_backend(name) for name in options.kernels}
    bandwidth, rate = peaks(clock)
    print(f"peaks: {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s")
    decodes = [Work(count, options.context, 1) for count in (32, 8, 1)]
    for work in [*decodes, Work(1, options.prefill, options.prefill)]:
        functions = [attention(backend, work, dtype, kv_dtype) for backend in backends.values()]
        for name, seconds in zip(backends, best_of(functions, options.steps, clock), strict=True):
            read, done = work.kv_bytes(kv_dtype) / seconds, work.operations / seconds
            print(
                f"{work}: {name} {seconds * 1e3:.3f} ms, {read / 1e9:.1f} GB/s ({read / bandwidth:.0%}), "
                f"{done / 1e9:.1f} GFLOP/s ({done / rate:.0%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
