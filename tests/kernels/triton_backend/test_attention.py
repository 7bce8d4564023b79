"""Paged attention against a reference in float64, and to the bit against itself in other steps.

Slots that no test wrote hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies

from kernels import float8
from kernels.interface import KVSpec
from kernels.triton_backend.attention import (
    PARTIAL_BYTES,
    PROGRAMS,
    WHOLE,
    AttentionTiles,
    Scores,
    attend,
    attention,
    tiles_of,
)
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan, plan, staged
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels.row_alone import multiply_rows_alone
from tests.unit.kernels.steps import Rows, metadata, reference_attention, scattered_blocks

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
# Small enough for short sequences to have many tiles.
SMALL = AttentionTiles(block_m=16, heads=2, block_n=16, dealt=1, num_warps=4, mfma=None)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@dataclass(frozen=True)
class Pool:
    """Sequences whose keys and values [Hkv, length, D] are in a cache; queries [length, Hq, D] for all their rows."""

    cache: DeviceKVCache
    blocks: list[list[int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]

    def plan(self, parts: list[tuple[int, int, int]], shape: Shape | None = None) -> StepPlan:
        """The step of rows [start, end) of sequences, as (sequence, start, end)."""
        step = metadata([Rows(a, b, self.blocks[s]) for s, a, b in parts], self.cache.block_size)
        if shape is None:
            return plan(step, CPU, self.cache.block_size)
        return StepPlan.over(torch.from_numpy(staged(step, shape)), shape)

    def rows(self, parts: list[tuple[int, int, int]], padding: int = 0) -> torch.Tensor:
        """The queries of the rows, a slice of a wider tensor, with NaN in padding rows."""
        q = torch.cat([self.queries[s][a:b] for s, a, b in parts])
        wide = q.new_full((len(q) + padding, q.shape[1] + 3, q.shape[2]), torch.nan)
        wide[: len(q), : q.shape[1]] = q
        return wide[:, : q.shape[1]]

    def expected(self, parts: list[tuple[int, int, int]], scores: Scores) -> torch.Tensor:
        found = []
        for s, a, b in parts:
            args = (self.queries[s][a:b], self.keys[s][:, :b], self.values[s][:, :b], a, scores.scale)
            found.append(reference_attention(*args, scores.window, scores.sinks, scores.softcap))
        return torch.cat(found)


def pool(
    lengths: list[int],
    heads: tuple[int, int] = (2, 1),
    dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = FP32,
    cache_dtype: torch.dtype | None = None,
) -> Pool:
    generator = torch.Generator().manual_seed(sum(lengths))
    num_blocks = sum(-(-n // block_size) for n in lengths) + 2
    cache = DeviceKVCache.allocate(KVSpec(heads[1], dim), 2, num_blocks, block_size, cache_dtype or dtype, CPU)
    float8.raw(cache.data).fill_(0x80 if cache_dtype == FNUZ else 0x7F if cache_dtype == FP8 else torch.nan)
    blocks = scattered_blocks(lengths, block_size, num_blocks, seed=1)
    keys, values = ([torch.randn(n, heads[1], dim, generator=generator).to(dtype) for n in lengths] for _ in range(2))
    slots = metadata([Rows(0, n, b) for n, b in zip(lengths, blocks, strict=True)], block_size).slot_mapping
    for side, rows in ((cache.keys(1), keys), (cache.values(1), values)):
        stored = float8.saturated(torch.cat(rows), cache.data.dtype)
        float8.raw(side).view(-1, heads[1], dim)[torch.from_numpy(slots)] = float8.raw(stored)
    keys, values = (
        [float8.saturated(x, cache.data.dtype).float().transpose(0, 1) for x in xs] for xs in (keys, values)
    )
    queries = [torch.randn(n, heads[0], dim, generator=generator).to(dtype) for n in lengths]
    return Pool(cache, blocks, keys, values, queries)


# A whole prompt, a decode, a chunk.
LENGTHS = [19, 41, 70]
STEP = [(0, 0, 19), (1, 40, 41), (2, 64, 70)]
PLAIN = Scores(0.25)
TOLERANCE = {FP32: 3e-6, FP16: 3e-3, BF16: 2e-2}


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "scores"),
    [
        ((3, 3), 16, 16, PLAIN),
        ((7, 1), 80, 1, Scores(0.1, window=5)),
        ((8, 1), 64, 64, Scores(0.1, window=1, sinks=torch.linspace(-2, 3, 8))),
        ((8, 2), 96, 32, Scores(0.1, sinks=torch.linspace(-9, 9, 8))),
        ((2, 1), 24, 128, Scores(1.0, softcap=2.0)),
        ((2, 1), 256, 48, Scores(0.06, window=18, softcap=20.0)),
    ],
)
def test_mixed_steps(settings: Settings, heads: tuple[int, int], dim: int, block_size: int, scores: Scores) -> None:
    """Every group of heads, odd head dims and block sizes; windows, sinks and caps."""
    found = pool(LENGTHS, heads, dim, block_size)
    actual = attention(
        found.rows(STEP),
        found.cache,
        1,
        found.plan(STEP),
        scores.scale,
        settings,
        scores.window,
        scores.sinks,
        scores.softcap,
    )
    assert actual.dtype == FP32
    torch.testing.assert_close(actual.double(), found.expected(STEP, scores), rtol=3e-6, atol=3e-6)


def test_more_query_heads_per_key_head_than_tile_rows(settings: Settings) -> None:
    found = pool([20], (71, 1))
    step = [(0, 18, 20)]
    actual = attention(found.rows(step), found.cache, 1, found.plan(step), 0.25, settings)
    torch.testing.assert_close(actual.double(), found.expected(step, PLAIN), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(FP16, FP16), (BF16, BF16), (BF16, FP8), (FP16, FNUZ), (FP32, FP8), (FP16, FP32), (FP32, BF16)],
)
def test_dtypes(settings: Settings, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    found = pool([19, 70], (4, 2), 32, 16, dtype, cache_dtype)
    step = [(0, 7, 19), (1, 69, 70)]
    actual = attention(found.rows(step), found.cache, 1, found.plan(step), 0.2, settings)
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), found.expected(step, Scores(0.2)), rtol=tolerance, atol=tolerance)


def test_long_sequences_are_dealt_out(settings: Settings) -> None:
    """A decode and a chunk across key tiles of the real length, in both forms."""
    length = 200
    found = pool([length, 3], (2, 1), 16, 64)
    step = [(0, length - 1, length), (1, 2, 3)]
    step_plan = found.plan(step)
    tiles = tiles_of(found.rows(step), found.cache, step_plan.shape, WHOLE, settings)
    assert (tiles.dealt, tiles.block_n) == (4, 64)
    actual = attention(found.rows(step), found.cache, 1, step_plan, 0.25, settings)
    torch.testing.assert_close(actual.double(), found.expected(step, PLAIN), rtol=3e-6, atol=3e-6)
    whole = attend(found.rows(step), found.cache, 1, step_plan, PLAIN, replace(tiles, dealt=1))
    assert torch.equal(actual, whole)


@pytest.mark.parametrize("dealt", [1, 2])
def test_tiles_before_a_window_are_not_read(dealt: int) -> None:
    found = pool([90])
    step, scores = [(0, 85, 90)], Scores(0.25, window=20)
    expected = found.expected(step, scores)
    for block in found.blocks[0][:4]:
        found.cache.data[1, :, block] = torch.nan
    tiles = replace(SMALL, dealt=dealt)
    actual = attend(found.rows(step), found.cache, 1, found.plan(step), scores, tiles)
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("scores", [PLAIN, Scores(0.25, 40, torch.tensor([0.5, -1.0]), 3.0)], ids=["plain", "all"])
def test_bits_are_equal_in_any_step(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a sequence as one prompt, as chunks, as decodes; alone, among others; dealt out or not."""
    multiply_rows_alone(monkeypatch)
    found = pool([70, 40])
    prompt = [(0, 0, 70)]
    whole = attend(found.rows(prompt), found.cache, 1, found.plan(prompt), scores, SMALL)
    torch.testing.assert_close(whole.double(), found.expected(prompt, scores), rtol=3e-6, atol=3e-6)
    steps = [[(1, 25, 31), (0, 37, 50)], [(0, 50, 69), (1, 39, 40)], [(0, 69, 70)], [(1, 31, 32), (0, 64, 65)]]
    for parts in steps:
        own = next(i for i, part in enumerate(parts) if part[0] == 0)
        first = sum(b - a for _, a, b in parts[:own])
        _, start, end = parts[own]
        for dealt in (1, 3):
            step = found.plan(parts)
            actual = attend(found.rows(parts), found.cache, 1, step, scores, replace(SMALL, dealt=dealt))
            assert torch.equal(actual[first : first + end - start], whole[start:end]), (parts, dealt)


@pytest.mark.parametrize("parts", [[(0, 0, 9), (1, 40, 41)], [(0, 8, 9), (1, 40, 41)]], ids=["mixed", "decode"])
@pytest.mark.parametrize("dealt", [1, 2])
def test_padding_keeps_bits(parts: list[tuple[int, int, int]], dealt: int) -> None:
    """Plans for more rows, sequences, blocks and keys give the same bits, and zeros in rows of padding."""
    found = pool([9, 41])
    scores = Scores(0.25, sinks=torch.tensor([0.0, 1.0]))
    step = found.plan(parts)
    rows = step.shape.rows
    expected = attend(found.rows(parts), found.cache, 1, step, scores, replace(SMALL, dealt=dealt))
    shape = Shape(rows + 9, 5, 8, step.shape.max_seqlen_q, 128)
    for padded in (shape, replace(shape, max_seqlen_q=40)):
        tiles = replace(SMALL, dealt=dealt + 1)
        actual = attend(found.rows(parts, 9), found.cache, 1, found.plan(parts, padded), scores, tiles)
        assert torch.equal(actual[:rows], expected)
        assert torch.equal(actual[rows:], torch.zeros(9, 2, 16))


def test_rows_beyond_plan_are_padding() -> None:
    """Rows that pad a step to a multiple, which the plan does not know of."""
    found = pool([33])
    for parts in ([(0, 28, 33)], [(0, 32, 33)]):
        for dealt in (1, 2):
            actual = attend(
                found.rows(parts, 10), found.cache, 1, found.plan(parts), PLAIN, replace(SMALL, dealt=dealt)
            )
            count = parts[0][2] - parts[0][1]
            torch.testing.assert_close(actual[:count].double(), found.expected(parts, PLAIN), rtol=3e-6, atol=3e-6)
            assert not actual[count:].any()


@settings(max_examples=8)
@given(data=strategies.data())
def test_any_step(data: strategies.DataObject) -> None:
    """Steps of any sequences, tiles and options agree with the reference, and with themselves dealt out."""
    draw = data.draw
    lengths = draw(strategies.lists(strategies.integers(1, 90), min_size=1, max_size=2))
    parts = [(s, draw(strategies.integers(max(0, n - 9), n - 1)), n) for s, n in enumerate(lengths)]
    heads, dim = draw(strategies.sampled_from([(2, 1), (3, 1), (6, 2)])), draw(strategies.sampled_from([16, 20]))
    window = draw(strategies.none() | strategies.integers(1, 100))
    sinks = torch.randn(heads[0]) if draw(strategies.booleans()) else None
    scores = Scores(0.25, window, sinks, draw(strategies.sampled_from([0.0, 5.0])))
    tiles = replace(SMALL, heads=heads[0] // heads[1], block_n=draw(strategies.sampled_from([16, 32])))
    found = pool(lengths, heads, dim, draw(strategies.sampled_from([1, 16, 48])))
    args = (found.rows(parts), found.cache, 1, found.plan(parts), scores)
    actual = attend(*args, tiles)
    torch.testing.assert_close(actual.double(), found.expected(parts, scores), rtol=5e-6, atol=5e-6)
    assert torch.equal(attend(*args, replace(tiles, dealt=draw(strategies.integers(2, 4)))), actual)


def test_no_rows(settings: Settings) -> None:
    found = pool([3])
    empty = found.plan([(0, 3, 3)])
    assert attention(torch.empty(0, 2, 16), found.cache, 1, empty, 0.25, settings).shape == (0, 2, 16)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_invariant_tiles_are_equal_in_every_step(target: str, dim: int) -> None:
    """Only the number of dealt parts depends on the step, and the memory of unmerged sums is bounded."""
    cache = DeviceKVCache(torch.empty(1, 2, 1, 16, 8, dim, dtype=BF16, device="meta"), dim)
    tiles = set()
    for rows, seqs, longest in ((1, 1, 100_000), (1, 1, 5), (256, 256, 3000), (64, 64, 131_072), (8192, 1, 8192)):
        q = torch.empty(rows, 32, dim, dtype=BF16, device="meta")
        shape = Shape(rows, seqs, -(-longest // 16), rows // seqs, longest)
        found = tiles_of(q, cache, shape, WHOLE, Settings(TARGETS[target]))
        held = q.numel() * 4 * found.slots(shape, WHOLE)
        assert found.dealt == 1 or (held <= PARTIAL_BYTES and found.dealt <= found.slots(shape, WHOLE))
        tiles.add(replace(found, dealt=1))
    assert len(tiles) == 1


def test_tuned_tiles_follow_the_step() -> None:
    cache = DeviceKVCache(torch.empty(1, 2, 1, 16, 8, 128, dtype=BF16, device="meta"), 128)
    tuned = Settings(TARGETS["sm_90"], batch_invariant=False)

    def tiles(rows: int, seqs: int, longest: int) -> AttentionTiles:
        q = torch.empty(rows, 32, 128, dtype=BF16, device="meta")
        return tiles_of(q, cache, Shape(rows, seqs, longest, rows // seqs, longest), WHOLE, tuned)

    decode, large, prefill = tiles(1, 1, 100_000), tiles(512, 512, 1000), tiles(8192, 1, 8192)
    assert decode.block_m == 16
    assert decode.dealt >= PROGRAMS // 32
    assert (large.block_m, large.dealt) == (16, 1)
    assert (prefill.block_m, prefill.dealt) == (128, 1)


def test_sliding_window_limits_key_tiles() -> None:
    """Key tiles that a query tile sees, by trying every place of its rows."""
    tiles = replace(SMALL, block_m=16, heads=4, block_n=32)
    for reach in (1, 30, 33, 64, 200):
        most = 0
        for first in range(400):
            low, high = max(first - reach + 1, 0), min(first + tiles.block_q, 400)
            most = max(most, (high - 1) // 32 - low // 32 + 1)
        assert tiles.slots(Shape(1, 1, 25, 1, 400), reach) in (most, most + 1), reach
    assert np.ceil(400 / 32) == tiles.slots(Shape(1, 1, 25, 1, 400), WHOLE)
