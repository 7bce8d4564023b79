"""Token selection: the indexer of DeepSeek sparse attention, batch-invariant, in PyTorch.

Scores come from the items of kernels/torch_backend/attention.py (query tile x KV tile, products of one fixed shape),
over the cache of index keys with the index heads as one head group. The further operations are exact or elementwise:
relu, weights, a sum over heads in a fixed pairwise order, a comparison with the k-th score. So a row's selection does
not depend on the rest of the step. Attention to the selected tokens is then dense attention in which every row is a
sequence of its own, whose keys are the selected tokens in the order of positions. If a row selects all tokens, these
are the same products as those of the dense plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionMetaData
from kernels.torch_backend import attention
from kernels.torch_backend.attention import (
    KV_TILE,
    LOWEST,
    AttentionPlan,
    Gathered,
    Group,
    PagedKVCache,
    Panel,
    Workspace,
    tiled_queries,
)
from kernels.upload import slots_at

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SelectionPlan:
    """Selections of one step in every layer.

    Attributes:
        keys: the cache of index keys.
        scoring: items of the index queries over them.
        topk: tokens that a row attends to, at most.
        num_heads: Hq of the attention that follows.
        visible: int64 [tokens], tokens up to each row's own.
        sequences: int64 [tokens], the sequence of each row.
    """

    keys: PagedKVCache
    scoring: AttentionPlan
    topk: int
    num_heads: int
    visible: Ints
    sequences: Ints


def plan(metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> SelectionPlan | None:
    """The selection plan of a step; None if no sequence is longer than `topk`, so that nothing need be selected."""
    spec = cache.index_spec
    if spec is None or cache.index is None or metadata.seq_lens.max() <= spec.topk:
        return None
    lengths = np.diff(metadata.cu_seqlens_q)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    position_0 = metadata.cu_seqlens_q[1:] - metadata.seq_lens
    return SelectionPlan(
        keys=cache.index,
        scoring=attention.plan(metadata, cache.index, spec.num_heads),
        topk=spec.topk,
        num_heads=num_heads,
        visible=np.arange(metadata.num_tokens) - position_0[sequences] + 1,
        sequences=sequences,
    )


def highest(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Mask bool [R, W] of the `topk` highest of the first `visible` int64 [R] scores in each row of [R, W].

    Of equal scores the first ones win. Scores that are NaN or -inf count as equal and lowest.
    """
    seen = torch.arange(scores.shape[1]) < visible.unsqueeze(1)
    ranked = torch.where(seen & (scores > LOWEST), scores, LOWEST)
    threshold = ranked.topk(min(topk, scores.shape[1])).values[:, -1:]
    above = ranked > threshold
    ties = (ranked == threshold) & seen
    room = topk - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1) <= room))


class TokenSelector:
    """Runs selection plans. Keeps its buffers, so one object serves one thread."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._kernels: dict[tuple[object, ...], _ScoreKernel] = {}

    def select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        plan: SelectionPlan,
    ) -> AttentionPlan:
        """Plan of attention to the selected tokens, over `cache.by_token()`; see `LatentAttentionOps`."""
        positions = self._positions(q, weights, layer, plan)
        selected = AttentionMetaData(
            cu_seqlens_q=np.arange(len(plan.visible) + 1),
            seq_lens=np.minimum(plan.visible, plan.topk),
            block_tables=slots_at(positions, plan.sequences[:, None], metadata.block_tables, cache.block_size),
            slot_mapping=metadata.slot_mapping,
        )
        return attention.plan(selected, cache.by_token(), plan.num_heads)

    def _positions(self, q: torch.Tensor, weights: torch.Tensor, layer: int, plan: SelectionPlan) -> Ints:
        """Positions that each row selected, ascending, then zeros: [tokens, topk]."""
        tokens = len(plan.visible)
        queries = tiled_queries(q, tokens, 1, plan.scoring, 1.0)
        row_weights = tiled_queries(weights.unsqueeze(-1), tokens, 1, plan.scoring, 1.0)
        kernel = self._kernel(plan.keys, plan.scoring, q.shape[1])
        keys, _ = plan.keys.granules(layer)
        positions = np.zeros((tokens, plan.topk), np.int64)
        for panel in plan.scoring.panels:
            rows = _rows(plan.scoring, panel)
            scores = self._scores(kernel, panel, queries, row_weights, keys)[rows < tokens]
            rows = rows[rows < tokens]
            chosen = highest(scores, torch.from_numpy(plan.visible)[rows], plan.topk).numpy()
            which, where = np.nonzero(chosen)
            positions[rows.numpy()[which], chosen.cumsum(1)[which, where] - 1] = where
        return positions

    def _scores(
        self, kernel: _ScoreKernel, panel: Panel, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Scores [query tiles of the panel * tokens of a tile, positions]; LOWEST past the KV tiles of a query tile."""
        counts = torch.tensor(panel.tile_counts)
        kv_tiles = torch.arange(len(counts)).repeat_interleave(counts)
        items = self._workspace.get("items", (len(kv_tiles), kernel.tokens_per_tile, KV_TILE))
        for group in panel.groups:
            kernel.run(group, queries, weights, keys, items[group.first : group.first + group.count])
        shape = (panel.stop - panel.start, len(counts), kernel.tokens_per_tile, KV_TILE)
        scores = torch.full(shape, LOWEST)
        scores[panel.item_tiles, kv_tiles] = items
        return scores.transpose(1, 2).reshape(-1, len(counts) * KV_TILE)

    def _kernel(self, index: PagedKVCache, scoring: AttentionPlan, num_heads: int) -> _ScoreKernel:
        key = (scoring.group_size, scoring.rows, num_heads, index.head_dim, index.granule, index.data.dtype)
        if key not in self._kernels:
            self._kernels[key] = _ScoreKernel(index, scoring, num_heads)
        return self._kernels[key]


def _rows(scoring: AttentionPlan, panel: Panel) -> torch.Tensor:
    """Row of the step of each place in the panel's query tiles, int64; padding places have none."""
    size = scoring.tokens_per_tile
    return scoring.tile_tokens[panel.start * size : panel.stop * size]


class _ScoreKernel:
    """Computes groups of items into scores [items, tokens of a tile, KV_TILE]; products always see all items."""

    def __init__(self, index: PagedKVCache, scoring: AttentionPlan, num_heads: int) -> None:
        size, rows = scoring.group_size, scoring.rows
        self.tokens_per_tile = scoring.tokens_per_tile
        self._num_heads = num_heads
        self._q = torch.zeros(size, 1, rows, index.head_dim)
        self._k = Gathered(size, index)
        self._weights = torch.zeros(size, 1, rows, 1)
        self._products = torch.zeros(size, rows, KV_TILE)

    def run(
        self, group: Group, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Fills `scores` of the group's items."""
        n = group.count
        torch.index_select(queries, 0, group.query_tiles, out=self._q[:n])
        torch.index_select(weights, 0, group.query_tiles, out=self._weights[:n])
        self._k.gather(keys, group)
        torch.bmm(self._q.squeeze(1), self._k.wide.squeeze(1).transpose(1, 2), out=self._products)
        weighted = self._products[:n].relu_().mul_(self._weights[:n].squeeze(1))
        used = weighted[:, : self.tokens_per_tile * self._num_heads]
        scores.copy_(_summed(used.view(n, self.tokens_per_tile, self._num_heads, KV_TILE)))


def _summed(x: torch.Tensor) -> torch.Tensor:
    """Sum of x [..., H, W] over H, in pairs: the order depends on H only, which `torch.sum` does not promise."""
    while (count := x.shape[-2]) > 1:
        half = count // 2
        pairs = x[..., :half, :] + x[..., half : 2 * half, :]
        x = pairs if count % 2 == 0 else torch.cat((pairs, x[..., -1:, :]), dim=-2)
    return x.squeeze(-2)
