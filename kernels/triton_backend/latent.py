"""Attention over a latent cache, DeepSeek's in its absorbed form: one key a token, whose first numbers are its value.

A program takes the heads of one token, or of a few neighbouring ones, as the rows of its matrix products. Keys come in
splits whose length follows from the row's own position. Each split starts a new softmax, and splits are merged in order
by one expression. So programs may take one split each, merged by another kernel, or all splits, depending on the size
of the step: a row's bits are the same (docs/explanation/determinism.md). A split or tile that a row does not see leaves
the row's numbers unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels.interface import AttentionMetaData, LatentAttentionOps
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.kv_write import write_rows
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.selection import select_tokens
from kernels.triton_backend.sequences import num_tiles, sequence_of
from kernels.triton_backend.target import Settings

# A split's keys: the first of SPLIT_KEYS, 2 SPLIT_KEYS, 4 SPLIT_KEYS, ... at which a row has MAX_SPLITS or fewer.
SPLIT_KEYS = 256
MAX_SPLITS = 32
# From this number of programs on, each program takes all splits of its rows, because they fill a GPU; also if the
# splits of all rows would take more memory than this.
FULL_GRID = 256
PARTS_BYTES = 256 << 20
# Heads of a program that merges splits.
MERGE_HEADS = 4
# By whether the target is AMD's. Its instruction is the same for 16 rows and for 32.
_OPTIONS = {
    True: {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16},
    False: {"num_warps": 8, "num_stages": 2},
}


@dataclass(frozen=True)
class LatentTiles:
    """Size of a program's tile.

    Attributes:
        tokens: neighbouring tokens, at positions from a multiple of this on.
        heads: of each token; a power of two, 16 or more.
        keys: at a time.
        options: for the compiler.
    """

    tokens: int
    heads: int
    keys: int
    options: Mapping[str, int]


@triton.jit
def _split_length(position, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Number of keys in each split of a row that sees the keys up to `position`."""
    length = SPLIT_KEYS
    while length * MAX_SPLITS <= position:
        length *= 2
    return length


@triton.jit
def _merged(highest, total, values, other_highest, other_total, other_values, scale):
    """Merges two parts of a softmax: the highest score [M], the sum of weights [M], weighted values [M, Dv].

    Products and sums are fused only where it is written, so that each kernel merges to the same bits.
    """
    both = tl.maximum(highest, other_highest)
    finite = tl.where(both == float("-inf"), 0.0, both)
    weight = tl.exp2((highest - finite) * scale)
    other_weight = tl.exp2((other_highest - finite) * scale)
    total = tl.fma(other_total, other_weight, total * weight)
    weight = tl.broadcast_to(weight[:, None], values.shape)
    other_weight = tl.broadcast_to(other_weight[:, None], values.shape)
    return both, total, tl.fma(other_values, other_weight, values * weight)


@triton.jit
def _split(
    q_values,
    q_rest,
    keys,
    key_stride,
    table,
    chosen,
    start,
    end,
    visible,
    scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of M rows to the keys [start, end), of which a row sees the first `visible` [M].

    Returns the highest score before the scale [M], the sum of the weights [M] and the weighted values [M, VALUE_PAD].
    """
    ROWS: tl.constexpr = q_values.shape[0]
    columns = tl.arange(0, VALUE_PAD)
    rest = VALUE_DIM + tl.arange(0, REST_PAD)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for first in range(start, end, KEYS):
        places = first + tl.arange(0, KEYS)
        exists = places < end
        positions = places
        if SELECTED:
            positions = tl.load(chosen + places, mask=exists, other=0)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        rows = keys + (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * key_stride
        # Values after a sequence's end may be NaN, and 0 times NaN is NaN, so they are not read.
        mask = exists[:, None] & (columns < VALUE_DIM)[None, :]
        key = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(q_values.dtype)
        scores = tl.dot(q_values, tl.trans(key), input_precision="ieee")
        if HEAD_DIM > VALUE_DIM:
            mask = exists[:, None] & (rest < HEAD_DIM)[None, :]
            key_rest = tl.load(rows[:, None] + rest[None, :], mask=mask, other=0.0).to(q_values.dtype)
            scores = tl.dot(q_rest, tl.trans(key_rest), scores, input_precision="ieee")
        scores = tl.where(exists[None, :] & (places[None, :] < visible[:, None]), scores, float("-inf"))
        both = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(both == float("-inf"), 0.0, both)
        # Subtracted before the scale: the difference of equal scores is 0, and no product can be fused with it.
        weights = tl.exp2((scores - finite[:, None]) * scale)
        shrink = tl.exp2((highest - finite) * scale)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        values = tl.dot(weights.to(key.dtype), key, values * shrink[:, None], input_precision="ieee")
        highest = both
    return highest, total, values


# A plan's tensors are adjacent in memory: their addresses depend on the step's size, for which nothing is compiled.
@triton.jit(
    do_not_specialize=["num_seqs", "num_blocks", "num_splits"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "tables", "chosen"],
)
def _latent_attention_kernel(
    q,
    q_token_stride,
    q_head_stride,
    keys,
    key_stride,
    cu_seqlens_q,
    seq_lens,
    tables,
    chosen,
    out,
    parts,
    part_values,
    num_heads,
    num_seqs,
    num_blocks,
    num_splits,
    topk,
    scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SELECTED: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (tile, heads, split): attention of HEADS heads of TOKENS tokens to one split, or to all in order."""
    sequence, tile = sequence_of(cu_seqlens_q, tl.program_id(0), num_seqs, TOKENS)
    first_row = tl.load(cu_seqlens_q + sequence)
    seq_len = tl.load(seq_lens + sequence)
    first_position = seq_len - tl.load(cu_seqlens_q + sequence + 1) + first_row
    base = (first_position // TOKENS + tile) * TOKENS
    if base >= seq_len:
        return
    limit = tl.minimum(base + TOKENS, seq_len)
    if SELECTED:
        limit = tl.minimum(limit, topk)
    # That of the tile's last row, and of each other: it grows at multiples of TOKENS only.
    length = _split_length(limit - 1, SPLIT_KEYS, MAX_SPLITS)
    if SPLIT and tl.program_id(2) * length >= limit:
        return

    places = tl.arange(0, TOKENS * HEADS)
    positions = base + places // HEADS
    heads = tl.program_id(1) * HEADS + places % HEADS
    is_row = (positions >= first_position) & (positions < seq_len) & (heads < num_heads)
    rows = (first_row + positions - first_position).to(tl.int64)
    visible = tl.minimum(positions + 1, limit)
    columns = tl.arange(0, VALUE_PAD)
    rest = VALUE_DIM + tl.arange(0, REST_PAD)
    queries = q + rows * q_token_stride + heads * q_head_stride
    mask = is_row[:, None] & (columns < VALUE_DIM)[None, :]
    q_values = tl.load(queries[:, None] + columns[None, :], mask=mask, other=0.0)
    q_rest = tl.load(queries[:, None] + rest[None, :], mask=is_row[:, None] & (rest < HEAD_DIM)[None, :], other=0.0)
    if WIDE:
        q_values = q_values.to(tl.float32)
        q_rest = q_rest.to(tl.float32)
    table = tables + sequence.to(tl.int64) * num_blocks
    list_start = chosen
    if SELECTED:
        list_start = chosen + (first_row + base - first_position).to(tl.int64) * topk

    results = rows * num_heads + heads
    if SPLIT:
        start = tl.program_id(2) * length
        highest, total, values = _split(
            q_values, q_rest, keys, key_stride, table, list_start, start, tl.minimum(start + length, limit), visible,
            scale, HEAD_DIM, VALUE_DIM, VALUE_PAD, REST_PAD, BLOCK_SIZE, SELECTED, KEYS,
        )  # fmt: skip
        results = results * num_splits + tl.program_id(2)
        tl.store(parts + 2 * results, highest, mask=is_row)
        tl.store(parts + 2 * results + 1, total, mask=is_row)
        tl.store(part_values + results[:, None] * VALUE_DIM + columns[None, :], values, mask=mask)
    else:
        highest = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
        total = tl.zeros([TOKENS * HEADS], tl.float32)
        values = tl.zeros([TOKENS * HEADS, VALUE_PAD], tl.float32)
        for start in range(0, limit, length):
            other_highest, other_total, other_values = _split(
                q_values, q_rest, keys, key_stride, table, list_start, start, tl.minimum(start + length, limit),
                visible, scale, HEAD_DIM, VALUE_DIM, VALUE_PAD, REST_PAD, BLOCK_SIZE, SELECTED, KEYS,
            )  # fmt: skip
            highest, total, values = _merged(
                highest, total, values, other_highest, other_total, other_values, scale
            )  # fmt: skip
        # Padding rows have seen nothing.
        values = values / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + results[:, None] * VALUE_DIM + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "num_splits"], do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"])
def _merge_kernel(
    cu_seqlens_q,
    seq_lens,
    out,
    parts,
    part_values,
    num_heads,
    num_seqs,
    num_splits,
    topk,
    scale,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (row, heads): merges the splits of HEADS of the row's heads in their order."""
    row = tl.program_id(0)
    sequence, _ = sequence_of(cu_seqlens_q, row, num_seqs, 1)
    end = tl.load(cu_seqlens_q + sequence + 1)
    if row >= end:
        return
    visible = tl.load(seq_lens + sequence) - end + row + 1
    if SELECTED:
        visible = tl.minimum(visible, topk)
    length = _split_length(visible - 1, SPLIT_KEYS, MAX_SPLITS)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    columns = tl.arange(0, VALUE_PAD)
    mask = is_head[:, None] & (columns < VALUE_DIM)[None, :]
    results = row.to(tl.int64) * num_heads + heads
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    values = tl.zeros([HEADS, VALUE_PAD], tl.float32)
    for split in range(0, tl.cdiv(visible, length)):
        part = results * num_splits + split
        other_highest = tl.load(parts + 2 * part, mask=is_head, other=0.0)
        other_total = tl.load(parts + 2 * part + 1, mask=is_head, other=1.0)
        other_values = tl.load(part_values + part[:, None] * VALUE_DIM + columns[None, :], mask=mask, other=0.0)
        highest, total, values = _merged(highest, total, values, other_highest, other_total, other_values, scale)
    values = values / total[:, None]
    tl.store(out + results[:, None] * VALUE_DIM + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


class TritonLatentAttentionOps(LatentAttentionOps):
    """Latent attention by tiles and splits that `settings` choose."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @override
    def write(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        write_rows(cache, layer, k, metadata.plan)

    @override
    def write_index(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        assert cache.index is not None
        write_rows(cache.index, layer, k, metadata.plan)

    @override
    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, metadata: AttentionMetaData
    ) -> torch.Tensor | None:
        return select_tokens(q, weights, cache, layer, metadata.plan)

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        return latent_attention(q, cache, layer, metadata.plan, scale, selection, self._settings)


def latent_attention(
    q: torch.Tensor,
    cache: DeviceKVCache,
    layer: int,
    plan: StepPlan,
    scale: float,
    selection: torch.Tensor | None,
    settings: Settings,
) -> torch.Tensor:
    """Latent attention by these kernels; padding rows give zeros. See LatentAttentionOps.apply.

    Args:
        q: [T, Hq, D] in the model dtype; the last stride is 1.
        cache: latent, of one head of D numbers, in any float dtype.
        layer: of the cache.
        plan: of the step; its block tables cover all keys of a row, including this step's.
        scale: of scores, above 0.
        selection: result of `selection.select_tokens`, int32 [T, k]; None for all tokens up to a row's own.
        settings: decide the tiles.

    Returns:
        [T, Hq, Dv] in the model dtype.
    """
    shape, keys = plan.shape, cache.keys(layer)
    out = q.new_zeros(*q.shape[:2], cache.value_dim)
    if not shape.rows or not shape.seqs:
        return out
    topk = 0 if selection is None else selection.shape[1]
    tiles = _tiles(q, cache, shape, settings)
    programs = (num_tiles(shape.rows, shape.seqs, tiles.tokens), triton.cdiv(q.shape[1], tiles.heads))
    splits = min(MAX_SPLITS, triton.cdiv(min(shape.max_seqlen_k, topk or shape.max_seqlen_k), SPLIT_KEYS))
    split = splits > 1 and _splits_pay(q, cache, shape, tiles, splits)
    values = {
        "VALUE_DIM": cache.value_dim,
        "VALUE_PAD": _padded(cache.value_dim),
        "SELECTED": selection is not None,
        "SPLIT_KEYS": SPLIT_KEYS,
        "MAX_SPLITS": MAX_SPLITS,
    }
    part_rows = q.shape[0] * q.shape[1] * splits if split else 0
    parts = torch.empty(part_rows, 2, dtype=torch.float32, device=q.device)
    part_values = torch.empty(part_rows, cache.value_dim, dtype=torch.float32, device=q.device)
    chosen = plan.memory if selection is None else selection
    results = (out, parts, part_values, q.shape[1], shape.seqs)
    base_2 = scale * math.log2(math.e)
    launch(
        _latent_attention_kernel, (*programs, splits if split else 1), q, q.stride(0), q.stride(1), keys,
        keys.stride(1), plan.cu_seqlens_q, plan.seq_lens, plan.block_tables, chosen, *results, shape.blocks, splits,
        topk, base_2, HEAD_DIM=cache.head_dim, REST_PAD=_rest_pad(cache), BLOCK_SIZE=cache.block_size,
        WIDE=_is_wide(q.dtype, keys.dtype), SPLIT=split, TOKENS=tiles.tokens, HEADS=tiles.heads, KEYS=tiles.keys,
        **tiles.options, **values,
    )  # fmt: skip
    if split:
        launch(
            _merge_kernel, (shape.rows, triton.cdiv(q.shape[1], MERGE_HEADS)), plan.cu_seqlens_q, plan.seq_lens,
            *results, splits, topk, base_2, HEADS=MERGE_HEADS, num_warps=4, **values,
        )  # fmt: skip
    return out


def _splits_pay(q: torch.Tensor, cache: DeviceKVCache, shape: Shape, tiles: LatentTiles, splits: int) -> bool:
    """True if each program should take one split: there are few rows, and memory for the parts."""
    working = max(triton.cdiv(shape.rows, tiles.tokens), shape.seqs) * triton.cdiv(q.shape[1], tiles.heads)
    part_bytes = 4 * q.shape[0] * q.shape[1] * cache.value_dim * splits
    return bool(working < FULL_GRID and part_bytes <= PARTS_BYTES)


def _padded(width: int) -> int:
    """Next power of two that a matrix instruction accepts."""
    return max(16, 1 << (width - 1).bit_length())


def _rest_pad(cache: DeviceKVCache) -> int:
    """Padded number of key components after those that are the value."""
    return _padded(cache.head_dim - cache.value_dim)


def _is_wide(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """True if products are in float32, because the model dtype cannot represent all numbers of the cache dtype."""
    return cache_dtype.itemsize > 1 and cache_dtype != dtype


def _tiles(q: torch.Tensor, cache: DeviceKVCache, shape: Shape, settings: Settings) -> LatentTiles:
    """Chooses tiles whose rows are tokens times heads.

    With an indexer, a program takes one token, which has keys of its own; also without a selection, so that a row that
    selects all has the bits of a row without a selection.
    """
    wide = q.dtype == torch.float32 or _is_wide(q.dtype, cache.data.dtype)
    # Two accumulators of 32 rows and 512 columns are half of a program's registers; 32 queries and 16 keys in float32
    # are 111 KB of shared memory.
    rows = 16 if wide and settings.target.shared_bytes < 131_072 else 32
    keys = 16 if wide else 32
    heads = min(rows, _padded(q.shape[1]))
    alone = cache.index_spec is not None or (not settings.batch_invariant and shape.max_seqlen_q == 1)
    return LatentTiles(1 if alone else rows // heads, heads, keys, _OPTIONS[settings.target.is_amd])
