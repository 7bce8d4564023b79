"""Tiles of matrix products and of attention on a GPU: time, share of the floor, and whether bits change.

    python -m tests.bench.gpu_tiles [--share 1/4] [--products | --attention] [--json FILE]

Shapes are Qwen3-8B's, numbers random bfloat16. Each line has one division of one product: its time, how much of that is
the floor (bytes over the bandwidth of a copy, or operations over the rate of a large product), and `same` if the result
has the float32 bits of the first line of the shape. PyTorch's product comes last. Weights rotate past the cache.
With `--share 2/4` a process takes every fourth candidate; processes compile side by side and measure one at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import numpy as np
import torch

from kernels.interface import AttentionMetaData, KVSpec
from kernels.triton_backend import attention, linear, plan, target, tiles
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.packed_weight import PackedWeight, pack
from kernels.triton_backend.target import Settings
from kernels.triton_backend.tiles import Cut, Tiles
from tests.bench.gpu_steps import Device, measured

# N and K of a layer's products and of the head.
PRODUCTS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (24_576, 4096),
    "down": (4096, 12_288),
    "head": (151_936, 4096),
}
FEW_ROWS, MANY_ROWS = (1, 16, 64), (128, 256, 512, 8192)
# Weights that rotate hold at least this many bytes, several times the cache of an H200.
ROTATED_BYTES = 400 << 20
REPLAYS = 7
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Tokens of the prompt, and (sequences, keys) of decodes.
PROMPT, DECODES = 8192, ((1, 1024), (8, 1024), (64, 1024), (256, 1024))


@dataclass(frozen=True)
class Measured:
    """One candidate; `floor_share` is the floor divided by the time."""

    work: str
    candidate: str
    time_us: float
    floor_share: float
    same: bool

    def __str__(self) -> str:
        same = "same" if self.same else "other"
        return f"{self.work:24} {self.candidate:44} {self.time_us:9.1f} us {self.floor_share:5.0%} {same}"


class Lock:
    """Lock between processes that measure on one GPU."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits for the lock."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def replay_time(runs: list[Callable[[], object]], device: torch.device, lock: Lock) -> float:
    """Seconds of one of `runs`, which are captured in sequence and replayed."""
    if device.type != "cuda":
        runs[0]()
        return math.nan
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # Inputs are made on another stream.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        runs[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with lock.held():
            with torch.cuda.graph(graph, stream=stream):
                for run in runs:
                    run()
            times = [_replayed(graph) for _ in range(REPLAYS)]
    return statistics.median(times) / len(runs)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def few_row_tiles() -> list[Tiles]:
    """Candidates for decodes: matrix instructions of 64 rows, and of 16."""
    return [
        Tiles(rows, columns, inner, warps, stages)
        for rows, columns, inner, warps, stages in (
            (16, 32, 256, 4, 4),
            (16, 64, 256, 4, 4),
            (16, 64, 128, 4, 5),
            (16, 128, 128, 4, 4),
            (64, 32, 128, 4, 5),
            (64, 32, 256, 4, 4),
            (64, 64, 128, 4, 5),
            (64, 64, 64, 4, 6),
            (64, 128, 64, 4, 4),
            (64, 128, 128, 4, 4),
        )
    ]


def some_row_tiles() -> list[Tiles]:
    """Candidates for a few hundred rows."""
    return [
        Tiles(rows, columns, inner, warps, stages)
        for rows, columns, inner, warps, stages in (
            (64, 128, 64, 4, 4),
            (64, 128, 64, 4, 5),
            (64, 256, 64, 8, 4),
            (128, 64, 64, 4, 5),
            (128, 64, 64, 8, 5),
            (128, 64, 128, 4, 4),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 8, 5),
            (256, 64, 64, 8, 4),
            (256, 128, 64, 8, 3),
        )
    ]


def many_row_tiles() -> list[Tiles]:
    return [
        Tiles(rows, columns, inner, warps, stages)
        for rows, columns, inner, warps, stages in (
            (64, 256, 64, 4, 4),
            (128, 128, 64, 8, 3),
            (128, 128, 64, 8, 4),
            (128, 128, 64, 8, 5),
            (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
            (256, 128, 64, 8, 4),
        )
    ]


def product_candidates(rows: int, columns: int, inner: int, settings: Settings) -> list[Cut]:
    """The division that serves first, then others of the same parts of K, then other parts."""
    serving = tiles.cut(settings, "half", rows, columns, inner)
    parts = {serving.parts, 1, 2} if rows <= max(FEW_ROWS) and columns < 10_000 else {serving.parts}
    found = [serving]
    candidates = few_row_tiles if rows <= max(FEW_ROWS) else some_row_tiles if rows <= 512 else many_row_tiles
    for each, count in product(candidates(), sorted(parts)):
        unit = max(each.inner, 128)
        length = -(-inner // (count * unit)) * unit
        if -(-inner // length) == count:
            found.append(Cut(each, count, length, count > 1 and rows <= 256))
    return found


def products(options: argparse.Namespace, device: Device, lock: Lock) -> Iterator[Measured]:
    """Every candidate of every product."""
    settings, place = Settings(target.current()), options.device
    shapes = {"tiny": (96, 256)} if options.tiny else PRODUCTS
    for (name, (columns, inner)), rows in product(shapes.items(), (*FEW_ROWS, *MANY_ROWS)):
        if name == "head" and rows > max(FEW_ROWS):
            continue
        count = 1 if options.tiny else max(1, min(24, ROTATED_BYTES // (2 * columns * inner)))
        weights = [
            pack(torch.randn(columns, inner, device=place) / 64, None, torch.bfloat16, None, place)
            for _ in range(count)
        ]
        x = torch.randn(rows if not options.tiny else min(rows, 20), inner, device=place).bfloat16()
        moved, operations = 2 * columns * inner + 2 * len(x) * (columns + inner), 2 * len(x) * columns * inner
        floor = max(moved / device.bandwidth, operations / device.rate)
        candidates = product_candidates(rows, columns, inner, settings)
        first: torch.Tensor | None = None
        for index, cut in enumerate(candidates):
            if index and index % options.of != options.share:
                continue
            try:
                result = linear.linear_in(x, weights[0], cut, settings, torch.float32)
                first = result if first is None else first
                runs = [_product(x, weight, cut, settings) for weight in weights]
                time_s = replay_time(runs, place, lock)
            except Exception as error:  # a candidate may not fit into the chip's memory
                print(f"{name} {rows}: {cut}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            if index == 0 and options.share:
                continue
            each = cut.tiles
            title = f"{each.rows}x{each.columns}x{each.inner} w{each.warps} s{each.stages} parts {cut.parts}"
            title += " split" if cut.split else ""
            yield Measured(f"{name} {rows}", title, time_s * 1e6, floor / time_s, torch.equal(first, result))
        if options.share == 0:
            runs = [_pytorch(x, weight) for weight in weights]
            time_s = replay_time(runs, place, lock)
            yield Measured(f"{name} {rows}", "PyTorch", time_s * 1e6, floor / time_s, same=False)


def _product(x: torch.Tensor, weight: PackedWeight, cut: Cut, settings: Settings) -> Callable[[], object]:
    return lambda: linear.linear_in(x, weight, cut, settings)


def _pytorch(x: torch.Tensor, weight: PackedWeight) -> Callable[[], object]:
    return lambda: x @ weight.numbers.t()


def attention_candidates(rows_of_each: int, serving: attention.AttentionTiles) -> list[attention.AttentionTiles]:
    """The tiles that serve first."""
    others = [
        replace(serving, block_m=block_m, block_n=block_n, num_warps=warps, stages=stages)
        for block_m, block_n, warps, stages in product(
            (64, 128) if rows_of_each > 1 else (16,), (64, 128), (4, 8) if rows_of_each > 1 else (4,), (2, 3)
        )
    ]
    dealt = [replace(serving, dealt=count) for count in (1, 2, 4, 8)] if rows_of_each == 1 else []
    return [serving, *dealt, *others]


def attentions(options: argparse.Namespace, device: Device, lock: Lock) -> Iterator[Measured]:
    """Every candidate of a prompt's attention and of decodes'."""
    settings, place = Settings(target.current()), options.device
    works = [(1, PROMPT, PROMPT), *((seqs, 1, keys) for seqs, keys in DECODES)]
    if options.tiny:
        works = [(1, 40, 40), (2, 1, 40)]
    for seqs, rows, keys in works:
        page = 16
        blocks = -(-keys // page)
        spec = KVSpec(KV_HEADS, HEAD_DIM)
        # Layers rotate as weights do.
        layers = max(1, min(36, ROTATED_BYTES // (seqs * blocks * page * KV_HEADS * HEAD_DIM * 4)))
        cache = DeviceKVCache.allocate(spec, layers, seqs * blocks, page, torch.bfloat16, place)
        cache.data.normal_()
        step = AttentionMetaData(
            cu_seqlens_q=np.arange(seqs + 1, dtype=np.int64) * rows,
            seq_lens=np.full(seqs, keys, np.int64),
            block_tables=np.random.default_rng(0).permutation(seqs * blocks).reshape(seqs, blocks).astype(np.int64),
            slot_mapping=np.zeros(seqs * rows, np.int64),
        )
        made = plan.plan(step, place, page)
        q = torch.randn(seqs * rows, HEADS, HEAD_DIM, device=place).bfloat16()
        scores = attention.Scores(HEAD_DIM**-0.5)
        seen = seqs * rows * keys if rows == 1 else keys * keys / 2
        moved = 4 * seqs * keys * KV_HEADS * HEAD_DIM + 4 * q.numel()
        floor = max(moved / device.bandwidth, 4 * seen * HEADS * HEAD_DIM / device.rate)
        serving = attention.tiles_of(q, cache, made.shape, scores.reach, settings)
        first: torch.Tensor | None = None
        for index, each in enumerate(attention_candidates(rows, serving)):
            if index and index % options.of != options.share:
                continue
            try:
                result = attention.attend(q, cache, 0, made, scores, each, torch.float32)
                first = result if first is None else first
                runs = [_attention(q, cache, layer, made, scores, each) for layer in range(layers)]
                time_s = replay_time(runs, place, lock)
            except Exception as error:  # a candidate may not fit into the chip's memory
                print(f"attention {seqs}x{rows}: {each}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            if index == 0 and options.share:
                continue
            title = f"{each.block_m}x{each.block_n} w{each.num_warps} s{each.stages} x{each.dealt}"
            work = f"attention {seqs}x{rows} of {keys}"
            yield Measured(work, title, time_s * 1e6, floor / time_s, torch.equal(first, result))


def _attention(
    q: torch.Tensor,
    cache: DeviceKVCache,
    layer: int,
    made: plan.StepPlan,
    scores: attention.Scores,
    each: attention.AttentionTiles,
) -> Callable[[], object]:
    return lambda: attention.attend(q, cache, layer, made, scores, each)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", default="1/1", help="which candidates, as NUMBER/PROCESSES")
    parser.add_argument("--products", action="store_true", help="products alone")
    parser.add_argument("--attention", action="store_true", help="attention alone")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a try without a GPU")
    parser.add_argument("--lock", type=Path, default=Path(tempfile.gettempdir(), "gpu_tiles.lock"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    number, _, count = options.share.partition("/")
    options.share, options.of = int(number) - 1, int(count)
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lock = Lock(options.lock)
    with lock.held():
        machine = measured(options.device)
    found = []
    for measure, wanted in ((products, not options.attention), (attentions, not options.products)):
        for each in measure(options, machine, lock) if wanted else ():
            print(each, flush=True)
            found.append(asdict(each))
    if options.json:
        options.json.write_text(json.dumps({"machine": asdict(machine), "measured": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
