"""Which tokens a query attends to: the indexer of DeepSeek sparse attention (DeepSeek-V3.2).

A kernel scores a row's tokens and writes numbers that order them: by score, then by position. They are all different,
so the k highest are one set whatever finds them. A row's selection lists them in the order of positions: a row that
selects all its tokens attends to them as if nothing had been selected, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.sequences import sequence_of

# Ranks held at once, 8 bytes each; more are computed in panels of rows.
PANEL_BYTES = 256 << 20
# Tokens that a program scores, and of those at a time.
PROGRAM_KEYS = 512
TILE_KEYS = 64
# The rank of a token that a row does not see.
INVISIBLE = torch.iinfo(torch.int64).min


@triton.jit
def _rank(score, position):
    """int64: greater for a higher score, of equal ones for the lower position; NaN and -inf are equal and lowest."""
    score = tl.where(score > -3.0e38, score, -3.0e38)
    # One zero, not two.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - position.to(tl.int64))


@triton.jit(
    do_not_specialize=["first_row", "num_seqs", "num_blocks", "width"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens", "tables"],
)
def _rank_kernel(
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
    ranks,
    first_row,
    num_heads,
    num_seqs,
    num_blocks,
    width,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    INVISIBLE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PROGRAM_KEYS: tl.constexpr,
):
    """Program (row of the panel, part): ranks of PROGRAM_KEYS tokens, with all index heads as rows of a product."""
    row = first_row + tl.program_id(0)
    sequence, _ = sequence_of(cu_seqlens_q, row, num_seqs, 1)
    end = tl.load(cu_seqlens_q + sequence + 1)
    visible = tl.where(row < end, tl.load(seq_lens + sequence) - end + row + 1, 0)
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
    results = ranks + tl.program_id(0).to(tl.int64) * width
    start = tl.program_id(1) * PROGRAM_KEYS
    seen = tl.maximum(0, tl.minimum(PROGRAM_KEYS, visible - start))
    for first in range(start, start + seen, KEYS):
        positions = first + tl.arange(0, KEYS)
        exists = positions < visible
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        rows = keys + (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * key_stride
        mask = exists[:, None] & is_number[None, :]
        key = tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(query.dtype)
        products = tl.dot(query, tl.trans(key), input_precision="ieee")
        weighted = tl.where(products < 0.0, 0.0, products) * weight[:, None]
        score = tl.sum(tl.where((heads < num_heads)[:, None], weighted, 0.0), 0)
        rank = tl.where(exists, _rank(score, positions), INVISIBLE)
        tl.store(results + positions, rank, mask=positions < width)
    for first in range(start + tl.cdiv(seen, KEYS) * KEYS, start + PROGRAM_KEYS, KEYS):
        positions = first + tl.arange(0, KEYS)
        tl.store(results + positions, tl.full([KEYS], INVISIBLE, tl.int64), mask=positions < width)


def select_tokens(
    q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan
) -> torch.Tensor | None:
    """See KernelBackend; what is returned is for `latent.latent_attention`.

    Args:
        q: [T, Hi, Di] in the model dtype, in any strides but for the last one, 1.
        weights: float32 [T, Hi], the last stride 1.
        cache: with an indexer, whose index keys are in any float dtype.
        layer: of the cache.
        plan: of the step; its block tables hold all keys of a row, this step's too.

    Returns:
        int32 [T, k]: positions in ascending order, then -1; only -1 for padding rows. None where no sequence of the
        plan's shape is longer than the k that a row attends to.
    """
    spec, index = cache.index_spec, cache.index
    if spec is None or index is None or plan.shape.max_seqlen_k <= spec.topk:
        return None
    rows, width = q.shape[0], plan.shape.max_seqlen_k
    selection = torch.empty(rows, spec.topk, dtype=torch.int32, device=q.device)
    panel = max(1, PANEL_BYTES // (8 * width))
    for start in range(0, rows, panel):
        count = min(panel, rows - start)
        ranks = _ranks(q, weights, index, layer, plan, start, count)
        selection[start : start + count] = _highest(ranks, spec.topk)
    return selection


def _ranks(
    q: torch.Tensor, weights: torch.Tensor, index: DeviceKVCache, layer: int, plan: StepPlan, start: int, count: int
) -> torch.Tensor:
    """int64 [count, longest sequence] of the rows from `start` on; INVISIBLE past a row's own token."""
    keys, width = index.keys(layer), plan.shape.max_seqlen_k
    ranks = torch.empty(count, width, dtype=torch.int64, device=q.device)
    if not plan.shape.seqs:
        return ranks.fill_(INVISIBLE)
    launch(
        _rank_kernel, (count, triton.cdiv(width, PROGRAM_KEYS)), q, q.stride(0), q.stride(1), weights,
        weights.stride(0), keys, keys.stride(1), plan.cu_seqlens_q, plan.seq_lens, plan.block_tables, ranks, start,
        q.shape[1], plan.shape.seqs, plan.shape.blocks, width, HEAD_DIM=index.head_dim,
        HEAD_PAD=max(16, triton.next_power_of_2(index.head_dim)), BLOCK_SIZE=index.block_size,
        WIDE=keys.dtype.itemsize > 1 and keys.dtype != q.dtype, INVISIBLE=INVISIBLE,
        HEADS=max(16, triton.next_power_of_2(q.shape[1])), KEYS=TILE_KEYS, PROGRAM_KEYS=PROGRAM_KEYS, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return ranks


def _highest(ranks: torch.Tensor, topk: int) -> torch.Tensor:
    """int32 [rows, topk]: positions of the highest ranks in ascending order, then -1."""
    best = ranks.topk(topk, dim=1, sorted=False).values
    nowhere = torch.iinfo(torch.int32).max
    positions = (0xFFFFFFFF - (best & 0xFFFFFFFF)).masked_fill_(best == INVISIBLE, nowhere).to(torch.int32)
    ascending = positions.sort(dim=1).values
    return ascending.masked_fill_(ascending == nowhere, -1)
