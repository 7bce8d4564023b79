"""Token selection: the indexer of DeepSeek sparse attention (DeepSeek-V3.2).

One kernel scores a row's tokens and writes integers that order them by score, equal scores by position. Another finds
the integer of the k-th token, eight bits at a time by histograms, and lists the selected tokens in the order of
positions: a row that selects all its tokens attends to them as without a selection, to the bit. The division of the
work among programs changes neither.

Both visit no more tokens than a row sees, a number that they read on the device: in a captured step, whose tensors have
room for the longest sequence of a worker, short sequences cost no more than in any other step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.sequences import sequence_of

# Orders held at once, 4 bytes each; more are computed in panels of rows.
PANEL_BYTES = 256 << 20
# Tokens that a program scores before it takes others, and of those at a time.
PROGRAM_KEYS = 512
TILE_KEYS = 64
# Number of scoring programs, or the number of rows if that is larger.
PROGRAMS = 2048
# Tokens of a row that are looked at in one go when the selected ones are found.
SELECT_BLOCK = 2048
# Below the order of any score.
_LEAST_ORDER = tl.constexpr(-(2**31))


@triton.jit
def _order(score):
    """Sort key int32 of a score: greater for a higher score; NaN and -inf have the lowest."""
    score = tl.where(score > -3.0e38, score, -3.0e38)
    # One zero, not two.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _visible(cu_seqlens_q, seq_lens, row, num_seqs):
    """Sequence of a row, and the number of its tokens that the row sees; 0 for a padding row."""
    sequence, _ = sequence_of(cu_seqlens_q, row, num_seqs, 1)
    end = tl.load(cu_seqlens_q + sequence + 1)
    return sequence, tl.where(row < end, tl.load(seq_lens + sequence) - end + row + 1, 0)


@triton.jit(
    do_not_specialize=["first_row", "num_seqs", "num_blocks", "width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "tables"],
)
def _order_kernel(
    q,
    q_token_stride,
    q_head_stride,
    weights,
    weights_stride,
    keys,
    key_stride,
    cu_seqlens_q,
    seq_lens,
    tables,
    orders,
    first_row,
    num_heads,
    num_seqs,
    num_blocks,
    width,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PROGRAM_KEYS: tl.constexpr,
):
    """Program (row of the panel, z of Z): sort keys of the tokens in parts z, z + Z, ... that the row sees.

    A part has PROGRAM_KEYS tokens; all index heads are rows of one product.
    """
    row = first_row + tl.program_id(0)
    sequence, visible = _visible(cu_seqlens_q, seq_lens, row, num_seqs)
    if tl.program_id(1) * PROGRAM_KEYS >= visible:
        return
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, HEAD_PAD)
    is_number = columns < HEAD_DIM
    mask = (heads < num_heads)[:, None] & is_number[None, :]
    queries = q + row.to(tl.int64) * q_token_stride + heads * q_head_stride
    query = tl.load(queries[:, None] + columns[None, :], mask=mask, other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    weight = tl.load(weights + row.to(tl.int64) * weights_stride + heads, mask=heads < num_heads, other=0.0)
    table = tables + sequence.to(tl.int64) * num_blocks
    results = orders + tl.program_id(0).to(tl.int64) * width
    parts = tl.cdiv(visible, PROGRAM_KEYS)
    tiles = PROGRAM_KEYS // KEYS
    own_parts = tl.cdiv(parts - tl.program_id(1), tl.num_programs(1))
    for index in range(0, own_parts * tiles):
        part = tl.program_id(1) + index // tiles * tl.num_programs(1)
        positions = part * PROGRAM_KEYS + index % tiles * KEYS + tl.arange(0, KEYS)
        exists = positions < visible
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        rows = keys + (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * key_stride
        is_stored = exists[:, None] & is_number[None, :]
        key = tl.load(rows[:, None] + columns[None, :], mask=is_stored, other=0.0).to(query.dtype)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        weighted = tl.where(products < 0.0, 0.0, products) * weight[:, None]
        score = tl.sum(tl.where((heads < num_heads)[:, None], weighted, 0.0), 0)
        tl.store(results + positions, _order(score), mask=exists)


@triton.jit
def _next_bits(orders, visible, known, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Next eight bits of the `wanted`-th highest sort key with the known bits, and how many keys are still wanted."""
    bins = tl.arange(0, 256)
    counts = tl.zeros([256], tl.int32)
    for first in range(0, visible, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        counted = positions < visible
        order = tl.load(orders + positions, mask=counted, other=0)
        digit = order >> SHIFT
        if SHIFT == 24:
            # With the sign, from the lowest on.
            digit += 128
        else:
            digit = digit & 255
            counted = counted & ((order >> (SHIFT + 8)) == known)
        counts += tl.histogram(digit, 256, mask=counted)
    above = tl.sum(counts) - tl.cumsum(counts, 0)
    here = (above < wanted) & (above + counts >= wanted)
    found = tl.sum(tl.where(here, bins, 0))
    known = found - 128 if SHIFT == 24 else (known << 8) | found
    return known, wanted - tl.sum(tl.where(here, above, 0))


@triton.jit
def _border(orders, visible, topk, BLOCK: tl.constexpr):
    """The `topk`-th highest sort key of a row, and how many keys equal to it are selected."""
    known, wanted = _next_bits(orders, visible, 0, topk, 24, BLOCK)
    known, wanted = _next_bits(orders, visible, known, wanted, 16, BLOCK)
    known, wanted = _next_bits(orders, visible, known, wanted, 8, BLOCK)
    return _next_bits(orders, visible, known, wanted, 0, BLOCK)


@triton.jit(
    do_not_specialize=["first_row", "num_seqs", "width"], do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"]
)
def _select_kernel(
    orders, cu_seqlens_q, seq_lens, selection, first_row, num_seqs, width, topk, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row of the panel): positions of the `topk` highest sort keys, ascending, then -1."""
    row = first_row + tl.program_id(0)
    _, visible = _visible(cu_seqlens_q, seq_lens, row, num_seqs)
    own = orders + tl.program_id(0).to(tl.int64) * width
    chosen = selection + row.to(tl.int64) * topk
    border = tl.full((), _LEAST_ORDER, tl.int32)
    wanted = tl.full((), 0, tl.int32)
    if visible > topk:
        border, wanted = _border(own, visible, topk, BLOCK)
    placed = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for first in range(0, visible, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        exists = positions < visible
        order = tl.load(own + positions, mask=exists, other=_LEAST_ORDER)
        is_equal = exists & (order == border)
        is_tie = is_equal & (equal + tl.cumsum(is_equal.to(tl.int32), 0) <= wanted)
        is_chosen = (order > border) | is_tie
        places = placed + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(chosen + places, positions, mask=is_chosen)
        placed += tl.sum(is_chosen.to(tl.int32))
        equal += tl.sum(is_equal.to(tl.int32))
    for first in range(placed, topk, BLOCK):
        places = first + tl.arange(0, BLOCK)
        tl.store(chosen + places, tl.full([BLOCK], -1, tl.int32), mask=places < topk)


def select_tokens(
    q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan
) -> torch.Tensor | None:
    """Selects the tokens that each row attends to, for `latent.latent_attention`; see LatentAttentionOps.select_tokens.

    Args:
        q: [T, Hi, Di] in the model dtype; the last stride is 1.
        weights: float32 [T, Hi], the last stride 1.
        cache: with an indexer, whose index keys are in any float dtype.
        layer: of the cache.
        plan: of the step; its block tables cover all keys of a row, including this step's.

    Returns:
        int32 [T, k]: positions in ascending order, then -1; only -1 for padding rows. None if no sequence of the plan's
            shape is longer than k.
    """
    spec, index = cache.index_spec, cache.index
    if spec is None or index is None or plan.shape.max_seqlen_k <= spec.topk:
        return None
    rows, width = q.shape[0], plan.shape.max_seqlen_k
    selection = torch.empty(rows, spec.topk, dtype=torch.int32, device=q.device)
    if not plan.shape.seqs:
        return selection.fill_(-1)
    panel = max(1, PANEL_BYTES // (4 * width))
    for start in range(0, rows, panel):
        count = min(panel, rows - start)
        orders = _orders(q, weights, index, layer, plan, start, count)
        launch(
            _select_kernel, (count,), orders, plan.cu_seqlens_q, plan.seq_lens, selection, start, plan.shape.seqs,
            width, spec.topk, BLOCK=SELECT_BLOCK, num_warps=8,
        )  # fmt: skip
    return selection


def _orders(
    q: torch.Tensor, weights: torch.Tensor, index: DeviceKVCache, layer: int, plan: StepPlan, start: int, count: int
) -> torch.Tensor:
    """Sort keys of the rows from `start` on, [count, longest sequence]. Entries after a row's own token are not
    written."""
    keys, width = index.keys(layer), plan.shape.max_seqlen_k
    orders = torch.empty(count, width, dtype=torch.int32, device=q.device)
    parts = min(triton.cdiv(width, PROGRAM_KEYS), max(1, PROGRAMS // count))
    launch(
        _order_kernel, (count, parts), q, q.stride(0), q.stride(1), weights,
        weights.stride(0), keys, keys.stride(1), plan.cu_seqlens_q, plan.seq_lens, plan.block_tables, orders, start,
        q.shape[1], plan.shape.seqs, plan.shape.blocks, width, HEAD_DIM=index.head_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(index.head_dim)), BLOCK_SIZE=index.block_size,
        WIDE=keys.dtype.itemsize > 1 and keys.dtype != q.dtype,
        HEADS=max(16, triton.next_power_of_2(q.shape[1])), KEYS=TILE_KEYS, PROGRAM_KEYS=PROGRAM_KEYS, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return orders
