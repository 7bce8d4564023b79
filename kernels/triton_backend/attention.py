"""Paged attention of mixed steps: prefill, chunks and decodes in one launch.

A program computes a query tile: some tokens of one sequence and the query heads of one key head, BLOCK_M rows of a
matrix product. It walks the keys in tiles at absolute positions [j * BLOCK_N, (j + 1) * BLOCK_N). Each key tile has a
softmax of its own; its largest score, sum and weighted values, all float32, are merged in the order of key tiles
(docs/explanation/determinism.md). Either one program merges all key tiles of its query tile, or the key tiles are
divided among several programs and a second kernel merges them: the machine code of a key tile and the float operations
of the merge are the same. A key tile that a row does not see leaves the row's numbers unchanged, and one that it sees
as a whole needs no mask. So with key tiles of fixed size, a row's bits depend on its own keys alone: not on chunks,
other sequences or padding, nor on the division of key tiles.

Arguments that change from step to step are not specialised. Otherwise a step could wait for the compiler, and a number
of rows divisible by 16 could run other machine code than its neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels.interface import AttentionMetaData, AttentionOps
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.kv_write import write_kv
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import Shape, StepPlan, plan
from kernels.triton_backend.target import Settings

# Reach of rows that see every key before them.
WHOLE = 1 << 30
# Programs that fill any GPU that we know a few times over, since sequences differ in length.
PROGRAMS = 512
# Most bytes of key tiles' results that wait for the merge kernel. Beyond it, each program merges its own key tiles.
PARTIAL_BYTES = 256 << 20
# Heads of a program that merges.
_MERGE_HEADS = 1
# Rows of a program: for decodes, for a few tokens, for prompts. agreement.py compares only these at start.
ROW_SIZES = (16, 64, 128)
_LOG2_E = math.log2(math.e)


@triton.jit
def _owner(item, starts, seqs, BLOCK_Q: tl.constexpr):
    """Index of the sequence of a query tile: the last one whose first tile is at most `item`; `seqs` for padding rows.

    Sequence s begins at tile starts[s] // BLOCK_Q + s, because each has at most one tile that is not full. With a
    BLOCK_Q of 0, items are rows.
    """
    low = 0
    high = seqs + 1
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts + middle)
        if BLOCK_Q > 0:
            first = first // BLOCK_Q + middle
        if first <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _merge(m, total, values, other_m, other_total, other_values):
    """Merges two softmaxes: largest scores (powers of 2) and sums [M], weighted values [M, D]; (-inf, 0, 0) is neutral.

    `tl.fma` is written out and no other fusion is allowed, so that the compiler cannot choose which results are
    rounded.
    """
    highest = tl.maximum(m, other_m)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    own = tl.exp2(m - base)
    other = tl.exp2(other_m - base)
    total = tl.fma(total, own, other_total * other)
    values = tl.fma(values, own[:, None], other_values * other[:, None])
    return highest, total, values


@triton.jit
def _finished(m, total, values, sinks, head, used, SINKS: tl.constexpr):
    """Weighted values [M, D] divided by the sums, after adding a sink, if any; zeros for rows without keys."""
    if SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0) * 1.4426950408889634
        m, total, values = _merge(
            m, total, values, sink, tl.full(m.shape, 1.0, tl.float32), tl.full(values.shape, 0.0, tl.float32)
        )
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    return values * inverse[:, None]


@triton.jit
def _attend_tile(
    q,
    keys,
    values,
    table,
    position,
    start,
    high,
    slot_stride,
    window,
    factor,
    cap_factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Softmax over the keys [start, start + BLOCK_N) for rows at `position` [M]: largest scores, sums, weighted values.

    Without MASKED every row sees every key of the tile.
    """
    columns = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_N)
    key = start + rows
    # Slots past the end are never read: 0 x NaN would be NaN.
    inside = key < high
    if PAGE % BLOCK_N == 0:
        first_slot = tl.load(table + start // PAGE).to(tl.int64) * PAGE + start % PAGE
        places = first_slot * slot_stride + (rows[:, None] * slot_stride + columns[None, :])
    else:
        block = tl.load(table + key // PAGE, mask=inside, other=0) if MASKED else tl.load(table + key // PAGE)
        slot = block.to(tl.int64) * PAGE + key % PAGE
        places = slot[:, None] * slot_stride + columns[None, :]
    if MASKED or BLOCK_D > D:
        mask = tl.broadcast_to((columns < D)[None, :], (BLOCK_N, BLOCK_D))
        if MASKED:
            mask = mask & inside[:, None]
        k = tl.load(keys + places, mask=mask, other=0.0).to(q.dtype)
    else:
        k = tl.load(keys + places).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        # The tanh of scaled scores; the cap itself is in `factor`.
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_factor) + 1.0)
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    m = tl.max(scores, 1) * factor
    base = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(tl.fma(scores, factor, -base[:, None])).to(q.dtype)
    # A product with ones adds in the order of keys. The order of a reduction depends on how threads share the tile, and
    # so on its number of rows. All columns are equal.
    total = tl.max(tl.dot(p, tl.full((BLOCK_N, 8), 1.0, q.dtype), input_precision="ieee"), 1)
    if MASKED or BLOCK_D > D:
        v = tl.load(values + places, mask=mask, other=0.0).to(q.dtype)
    else:
        v = tl.load(values + places).to(q.dtype)
    return m, total, tl.dot(p, v, input_precision="ieee")


@triton.jit
def _attend_tiles(
    m,
    total,
    weighted,
    first,
    end,
    dealt,
    queries,
    keys,
    values,
    partials,
    softmaxes,
    tables,
    seq,
    kv_head,
    position,
    row,
    head,
    columns,
    used,
    mask,
    high,
    table_stride,
    slot_stride,
    slots,
    window,
    factor,
    cap_factor,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Merges key tiles first, first + dealt, ... below `end`; with `dealt` > 1 it also stores each tile's result."""
    table = tables + seq.to(tl.int64) * table_stride
    for index in tl.range(first, end, dealt, num_stages=STAGES):
        tile_m, tile_total, tile_weighted = _attend_tile(
            queries, keys + kv_head * D, values + kv_head * D, table, position, index * BLOCK_N, high, slot_stride,
            window, factor, cap_factor, D, BLOCK_D, PAGE, BLOCK_N, MASKED, WINDOWED, CAPPED,
        )  # fmt: skip
        if dealt > 1:
            place = (row.to(tl.int64) * NUM_HEADS + head) * slots + index % slots
            tl.store(softmaxes + place * 2, tile_m, mask=used)
            tl.store(softmaxes + place * 2 + 1, tile_total, mask=used)
            tl.store(partials + place[:, None] * D + columns[None, :], tile_weighted, mask=mask)
        m, total, weighted = _merge(m, total, weighted, tile_m, tile_total, tile_weighted)
    return m, total, weighted


_ALTERING = ["seqs", "rows", "one_row", "table_stride", "slots", "window"]
_PLACED = ["starts", "lengths", "tables"]


@triton.jit(do_not_specialize=_ALTERING, do_not_specialize_on_alignment=_PLACED)
def _attention_kernel(
    q,
    keys,
    values,
    out,
    partials,
    softmaxes,
    starts,
    lengths,
    tables,
    sinks,
    seqs,
    rows,
    one_row,
    table_stride,
    q_row_stride,
    q_head_stride,
    slot_stride,
    slots,
    window,
    factor,
    cap_factor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (query tile, key head and HEADS of its query heads, z of Z): key tiles z, z + Z, ... of those it sees.

    With Z = 1 the result goes to `out`, otherwise each key tile's to `partials` and `softmaxes`.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # A sequence's last tiles have the most keys and begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if one_row:
        seq = tl.minimum(tile, seqs)
        first_tile = seq
    else:
        seq = _owner(tile, starts, seqs, BLOCK_Q)
        first_tile = tl.load(starts + seq) // BLOCK_Q + seq
    start_row = tl.load(starts + seq)
    end_row = tl.load(starts + seq + 1, mask=seq < seqs, other=0)
    end_row = tl.where(seq < seqs, end_row, rows)
    first_token = (tile - first_tile) * BLOCK_Q
    if start_row + first_token >= end_row:
        return
    length = tl.load(lengths + seq, mask=seq < seqs, other=0)
    context = length - (end_row - start_row)

    kv_head = tl.program_id(1) // HEAD_TILES
    places = tl.arange(0, BLOCK_M)
    token = first_token + places // HEADS
    group_head = tl.program_id(1) % HEAD_TILES * HEADS + places % HEADS
    row = start_row + token
    used = (places < BLOCK_Q * HEADS) & (row < end_row) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    columns = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (columns < D)[None, :]
    q_places = row.to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride + columns[None, :]
    queries = tl.load(q + q_places, mask=mask, other=0.0)

    low = 0
    if WINDOWED:
        low = tl.maximum(context + first_token - window + 1, 0)
    high = tl.minimum(context + first_token + BLOCK_Q, length)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    weighted = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    dealt = tl.num_programs(2)
    # Every row sees all keys of the tiles before this one.
    whole = 0 if WINDOWED else tl.minimum(context + first_token + 1, high) // BLOCK_N
    first = low // BLOCK_N + tl.program_id(2)
    # This program's first tile from `whole` on. Such tiles are few, and not worth a pipeline's memory.
    first_masked = first + tl.maximum(whole - first + dealt - 1, 0) // dealt * dealt
    m, total, weighted = _attend_tiles(
        m, total, weighted, first, whole, dealt, queries, keys, values, partials, softmaxes, tables, seq, kv_head,
        context + token, row, head, columns, used, mask, high, table_stride, slot_stride, slots, window, factor,
        cap_factor, NUM_HEADS, D, BLOCK_D, PAGE, BLOCK_N, STAGES, False, WINDOWED, CAPPED,
    )  # fmt: skip
    m, total, weighted = _attend_tiles(
        m, total, weighted, first_masked, tl.cdiv(high, BLOCK_N), dealt, queries, keys, values, partials, softmaxes,
        tables, seq, kv_head, context + token, row, head, columns, used, mask, high, table_stride, slot_stride, slots,
        window, factor, cap_factor, NUM_HEADS, D, BLOCK_D, PAGE, BLOCK_N, STAGES if WINDOWED else 1, True, WINDOWED,
        CAPPED,
    )  # fmt: skip
    if dealt == 1:
        found = _finished(m, total, weighted, sinks, head, used, SINKS)
        out_places = (row.to(tl.int64) * NUM_HEADS + head)[:, None] * D + columns[None, :]
        tl.store(out + out_places, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_ALTERING, do_not_specialize_on_alignment=_PLACED)
def _merge_kernel(
    out,
    partials,
    softmaxes,
    starts,
    lengths,
    sinks,
    seqs,
    slots,
    window,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (row, part of its heads): merges the results of the key tiles that the row sees, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    used = head < NUM_HEADS
    seq = _owner(row, starts, seqs, 0)
    end_row = tl.load(starts + seq + 1, mask=seq < seqs, other=0)
    # Padding rows are after the end, and see nothing.
    position = tl.load(lengths + seq, mask=seq < seqs, other=0) - (end_row - row)
    position = tl.where(seq < seqs, position, -1)
    low = 0
    if WINDOWED:
        low = tl.maximum(position - window + 1, 0)
    columns = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (columns < D)[None, :]
    m = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.full([HEADS], 0.0, tl.float32)
    weighted = tl.full([HEADS, BLOCK_D], 0.0, tl.float32)
    first_place = (row.to(tl.int64) * NUM_HEADS + head) * slots
    for index in tl.range(low // BLOCK_N, (position + BLOCK_N) // BLOCK_N, loop_unroll_factor=4):
        place = first_place + index % slots
        tile_m = tl.load(softmaxes + place * 2, mask=used, other=0.0)
        tile_total = tl.load(softmaxes + place * 2 + 1, mask=used, other=0.0)
        tile_weighted = tl.load(partials + place[:, None] * D + columns[None, :], mask=mask, other=0.0)
        m, total, weighted = _merge(m, total, weighted, tile_m, tile_total, tile_weighted)
    found = _finished(m, total, weighted, sinks, head, used, SINKS)
    out_places = (row.to(tl.int64) * NUM_HEADS + head)[:, None] * D + columns[None, :]
    tl.store(out + out_places, found.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Scores:
    """Rules by which products of queries and keys become scores.

    Attributes:
        scale: they are multiplied by it, above 0.
        window: tokens that a row sees, itself included; None for all.
        sinks: float32 [Hq], scores that take part in the softmax without a value; None for none.
        softcap: scores become softcap * tanh(score / softcap); 0 for off.
    """

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    softcap: float = 0.0

    @property
    def reach(self) -> int:
        """Number of tokens that a row sees."""
        return WHOLE if self.window is None else self.window


@dataclass(frozen=True)
class AttentionTiles:
    """Division of a step among programs.

    Attributes:
        block_m: rows of a program, heads x tokens, 16 or more, so that matrix instructions are used.
        heads: query heads of a program.
        block_n: keys of a tile.
        dealt: number of programs that share the key tiles of a query tile.
        num_warps: of a program.
        stages: of its software pipeline.
        mfma: rows of AMD's matrix instructions, so that each warp has rows of its own; None for other makers.
    """

    block_m: int
    heads: int
    block_n: int
    dealt: int
    num_warps: int
    mfma: int | None
    stages: int = 2

    @property
    def block_q(self) -> int:
        """Tokens of one program."""
        return self.block_m // self.heads

    def programs(self, rows: int, shape: Shape, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Query tiles of a step, including those of padding rows, and number of parts of the heads."""
        query_tiles = rows // self.block_q + shape.seqs + 1
        if shape.max_seqlen_q <= 1:
            query_tiles = shape.seqs + math.ceil(rows / self.block_q)
        return query_tiles, num_kv_heads * math.ceil(num_heads // num_kv_heads / self.heads)

    def slots(self, shape: Shape, reach: int) -> int:
        """Most key tiles that a query tile sees."""
        seen = min(shape.max_seqlen_k, reach + self.block_q - 1)
        return max(1, min(math.ceil(shape.max_seqlen_k / self.block_n), (seen - 2) // self.block_n + 2))


class TritonAttentionOps(AttentionOps):
    """Attention operations, with tiles chosen by `settings`."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device

    @override
    def plan(self, metadata: AttentionMetaData, cache: DeviceKVCache, num_heads: int) -> StepPlan:
        return plan(metadata, self._device, cache.block_size)

    @override
    def write(
        self, cache: DeviceKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        write_kv(cache, layer, k, v, metadata.plan)

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        return attention(q, cache, layer, metadata.plan, scale, self._settings, window, sinks, softcap)


def attention(
    q: torch.Tensor,
    cache: DeviceKVCache,
    layer: int,
    plan: StepPlan,
    scale: float,
    settings: Settings,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the cache, which already has the step's keys: [T, Hq, D] in q's dtype.

    See AttentionOps, and `Scores` for the last three arguments. Rows and heads of q may have gaps. Keys and values of
    any dtype are converted to q's for the products. Rows after the plan's last token, and sequences without keys, give
    zeros. Takes up to PARTIAL_BYTES of memory while it runs.
    """
    scores = Scores(scale, window, sinks, softcap)
    return attend(q, cache, layer, plan, scores, tiles_of(q, cache, plan.shape, scores.reach, settings))


def tiles_of(q: torch.Tensor, cache: DeviceKVCache, shape: Shape, reach: int, settings: Settings) -> AttentionTiles:
    """Chooses tiles for a step whose rows see `reach` tokens.

    In batch-invariant settings only `dealt` depends on the step, and `block_m` too if tiles agree.
    """
    _, num_heads, head_dim = q.shape
    group = num_heads // cache.num_kv_heads
    by_rows = not settings.batch_invariant or settings.attention_agrees(q.dtype, head_dim)
    rows = group * max(1, shape.max_seqlen_q) if by_rows else None
    tiles = shaped_tiles(rows, group, q, cache, settings)
    return replace(tiles, dealt=_dealt(tiles, q, cache.num_kv_heads, shape, reach))


def shaped_tiles(
    rows: int | None, group: int, q: torch.Tensor, cache: DeviceKVCache, settings: Settings
) -> AttentionTiles:
    """Tiles for programs that have up to `rows` rows of a sequence; for any number of rows if that is None."""
    block_m, block_d, is_half = 64, _block_d(q.shape[2]), q.element_size() == 2
    if rows is not None:
        sizes = ROW_SIZES if block_d <= 128 and is_half else ROW_SIZES[:-1]
        block_m = next((size for size in sizes if rows <= size), sizes[-1])
    tile_row_bytes = block_d * max(q.element_size(), cache.data.element_size())
    # Tiles of 128 keys need Hopper's shared memory, and for many rows eight warps.
    is_wide = rows is not None and settings.target.name == "sm_90" and is_half and block_d <= 128
    tile_bytes = (128 if is_wide else 64) * 256
    return AttentionTiles(
        block_m=block_m,
        heads=min(group, block_m),
        block_n=min(tile_bytes // 256, max(16, tile_bytes // tile_row_bytes)),
        dealt=1,
        num_warps=8 if block_m > 64 or (block_d > 128 and not settings.target.is_amd) else 4,
        mfma=16 if settings.target.is_amd else None,
    )


def _dealt(tiles: AttentionTiles, q: torch.Tensor, num_kv_heads: int, shape: Shape, reach: int) -> int:
    """Number of programs that share the key tiles of a query tile, so that all programs fill the GPU."""
    rows, num_heads, head_dim = q.shape
    slots = tiles.slots(shape, reach)
    if rows * num_heads * slots * (head_dim + 2) * 4 > PARTIAL_BYTES:
        return 1
    return min(slots, math.ceil(PROGRAMS / math.prod(tiles.programs(rows, shape, num_heads, num_kv_heads))))


def _block_d(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def attend(
    q: torch.Tensor,
    cache: DeviceKVCache,
    layer: int,
    plan: StepPlan,
    scores: Scores,
    tiles: AttentionTiles,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`attention` with given tiles; `out_dtype` float32 keeps digits that q's dtype rounds away."""
    rows, num_heads, head_dim = q.shape
    out = q.new_empty(rows, num_heads, head_dim, dtype=out_dtype or q.dtype)
    if rows == 0:
        return out
    slots = tiles.slots(plan.shape, scores.reach)
    held = (rows, num_heads, slots) if tiles.dealt > 1 else (0, 0, 0)
    partials = q.new_empty(*held, head_dim, dtype=torch.float32)
    softmaxes = q.new_empty(*held, 2, dtype=torch.float32)
    softcap = scores.softcap
    launch(
        _attention_kernel,
        (*tiles.programs(rows, plan.shape, num_heads, cache.num_kv_heads), tiles.dealt),
        *(q, cache.keys(layer), cache.values(layer), out, partials, softmaxes),
        *(plan.cu_seqlens_q, plan.seq_lens, plan.block_tables, scores.sinks),
        *(plan.shape.seqs, rows, int(plan.shape.max_seqlen_q <= 1), plan.block_tables.stride(0)),
        *(q.stride(0), q.stride(1), cache.num_kv_heads * head_dim, slots, scores.reach),
        (softcap or scores.scale) * _LOG2_E,
        2.0 * _LOG2_E * scores.scale / softcap if softcap else 0.0,
        GROUP=num_heads // cache.num_kv_heads,
        HEADS=tiles.heads,
        PAGE=cache.block_size,
        BLOCK_M=tiles.block_m,
        CAPPED=softcap > 0,
        num_warps=tiles.num_warps,
        STAGES=tiles.stages,
        enable_fp_fusion=False,
        **({"matrix_instr_nonkdim": tiles.mfma} if tiles.mfma else {}),
        **_constants(q, scores, tiles),
    )
    if tiles.dealt > 1:
        launch(
            _merge_kernel,
            (rows, math.ceil(num_heads / _MERGE_HEADS)),
            *(out, partials, softmaxes, plan.cu_seqlens_q, plan.seq_lens, scores.sinks),
            *(plan.shape.seqs, slots, scores.reach),
            HEADS=_MERGE_HEADS,
            num_warps=4,
            enable_fp_fusion=False,
            **_constants(q, scores, tiles),
        )
    return out


def _constants(q: torch.Tensor, scores: Scores, tiles: AttentionTiles) -> dict[str, int | bool]:
    """Constants that both kernels share."""
    return {
        "NUM_HEADS": q.shape[1],
        "D": q.shape[2],
        "BLOCK_D": _block_d(q.shape[2]),
        "BLOCK_N": tiles.block_n,
        "WINDOWED": scores.window is not None,
        "SINKS": scores.sinks is not None,
    }
