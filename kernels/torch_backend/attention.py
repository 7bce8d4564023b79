"""Batch-invariant attention over a paged KV cache, in PyTorch.

A query row meets its keys in tiles of KV_TILE at absolute positions [j * KV_TILE, (j + 1) * KV_TILE). Rows are grouped
into query tiles of a fixed number of tokens, one sequence each. The pair (query tile, KV tile) is an item; items are
computed GROUP at a time by batched products of one fixed shape, whatever the step holds. So decode, chunk and prefill
are one path, and a row's partial results do not depend on the rest of the step.

Each item yields, in float32, the largest score m, the largest probability p of the tile's own softmax, and the values
o weighted by that softmax. The tile's weight is exp(m - M) / p, with M the row's overall maximum, because 1 / p is the
tile's sum of exp(score - m). Weighted values are added in tile order and divided by the sum of the weights. A fully
masked tile has weight exp(-huge) = 0 and adds exact zeros, so skipping it equals computing it: a row's bits do not
depend on which rows share its query tile, that is, on chunk borders. With a window, the tiles wholly before it are
skipped for the same reason. A sink joins the sum of the weights once, after all tiles
(docs/explanation/determinism.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import float8, large_pages
from kernels.interface import AttentionMetaData, IndexSpec, KVSpec
from kernels.torch_backend.elementwise import exp2_, padded_length, softcapped

# Keys per tile.
KV_TILE = 64
# Rows of a batched product are a multiple of this, at least: head group x tokens of a query tile.
ROWS = 8
# Bytes of keys of one group: small enough for the caches near a core.
GROUP_BYTES = 1 << 19
MAX_GROUP = 16
# Bytes of partial results held at once; more are computed in panels of query tiles.
PANEL_BYTES = 32 << 20
# Added to the scores of invisible keys: finite, so that no infinity is subtracted from another; it swallows any score.
LOWEST = -3.0e38

Ints = npt.NDArray[np.int64]


class PagedKVCache:
    """Keys and values of all layers: [layers, 2, blocks + 1, Hkv, block_size, D] in any float dtype, FP8 too.

    The block is the outermost dimension inside a layer, so that blocks can be copied without knowing heads. The last
    block is never written: positions past a sequence's end refer to it. A latent cache is [layers, 1, blocks + 1, Hkv,
    block_size, D]: its values are the first `value_dim` numbers of its keys.

    Args:
        data: zeros of that shape.
        value_dim: D, or the width of a latent cache's values.
        index_spec: the sparse-attention indexer; None for full attention.
        index: its keys for the same blocks, a latent cache of one head.
    """

    def __init__(
        self,
        data: torch.Tensor,
        value_dim: int,
        index_spec: IndexSpec | None = None,
        index: PagedKVCache | None = None,
    ) -> None:
        layers, sides, blocks, self.num_kv_heads, self.block_size, self.head_dim = data.shape
        self.num_blocks = blocks - 1
        self.value_dim = value_dim
        self.latent = sides == 1
        self.index_spec = index_spec
        self.index = index
        # Keys that lie together both in a block and in a tile.
        self.granule = math.gcd(self.block_size, KV_TILE)
        self.data = data
        indexed = float8.raw(data)
        self._slots = indexed.view(layers, sides, -1, self.head_dim)
        self._granules = indexed.view(layers, sides, -1, self.granule * self.head_dim)

    @classmethod
    def allocate(
        cls, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        """A zeroed cache of `num_blocks` blocks that can be written."""
        sides = 1 if spec.latent_value_dim else 2
        shape = (num_layers, sides, num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
        index = None
        if spec.index is not None:
            keys = KVSpec(1, spec.index.head_dim, latent_value_dim=spec.index.head_dim)
            index = cls.allocate(keys, num_layers, num_blocks, block_size, dtype)
        data = large_pages.zeros(math.prod(shape), dtype).view(shape)
        return cls(data, spec.latent_value_dim or spec.head_dim, spec.index, index)

    def touch(self, progress: Callable[[int, int], None]) -> None:
        """Has the system give the cache's memory now, see `large_pages.touch`."""
        large_pages.touch(self.data, progress)
        if self.index is not None:
            self.index.touch(progress)

    def contents(self, block_id: int) -> list[torch.Tensor]:
        """A block's keys and values of all layers, and its index keys: views."""
        own = self.data[:, :, block_id]
        return [own] if self.index is None else [own, *self.index.contents(block_id)]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks in order, in all layers; see KVCacheOps.copy_blocks."""
        pairs = list(pairs)
        data = float8.raw(self.data)
        for source, target in pairs:
            data[:, :, target] = data[:, :, source]
        if self.index is not None:
            self.index.copy_blocks(pairs)

    def by_token(self) -> PagedKVCache:
        """A cache of one head in the same memory with blocks of one token, so that a block id is a slot."""
        layers, sides, blocks, _, block_size, head_dim = self.data.shape
        slots = self.data.view(layers, sides, blocks * block_size, 1, 1, head_dim)
        return PagedKVCache(slots, self.value_dim)

    def write(self, layer: int, slot_rows: torch.Tensor, *rows: torch.Tensor) -> None:
        """Stores k and v [tokens, Hkv, D], or a latent cache's k, in the rows `slot_rows` int64 [tokens * Hkv].

        They are rounded to the cache's dtype; numbers beyond its range become the largest.
        """
        for side, new in zip(self._slots[layer], rows, strict=True):
            stored = float8.saturated(new.reshape(-1, self.head_dim), self.data.dtype)
            side.index_copy_(0, slot_rows, float8.raw(stored))

    def granules(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as `float8.raw` [granules, granule * D], ordered by block, head and place in the block."""
        sides = self._granules[layer]
        return sides[0], sides[-1]


@dataclass(frozen=True)
class Group:
    """Up to `group_size` items that are computed by one pair of batched products.

    Attributes:
        first: index of the first item among the panel's partial results, a multiple of the group size.
        count: items of the group.
        query_tiles: int64 [count], query tile of each item.
        granule_rows: int64 [count * Hkv * granules of a tile], rows of the cache.
        visible: int64 [count * rows], which keys of the tile each row sees, see `visibility_biases`; None if every row
            sees all.
        unwritten: int64, gathered rows [count * Hkv * KV_TILE] past the sequence's end; None without any.
    """

    first: int
    count: int
    query_tiles: torch.Tensor
    granule_rows: torch.Tensor
    visible: torch.Tensor | None
    unwritten: torch.Tensor | None


@dataclass(frozen=True)
class Panel:
    """Query tiles [start, stop) and their items: the first KV tile of each query tile, then the second of each, ...

    Attributes:
        start: first query tile.
        stop: end of the query tiles.
        item_tiles: int64 [items], query tile of each item, counted from `start`.
        tile_counts: how many query tiles have a first, second, ... KV tile; never increasing, since they are sorted.
        groups: the items, in order.
    """

    start: int
    stop: int
    item_tiles: torch.Tensor
    tile_counts: list[int]
    groups: list[Group]


@dataclass(frozen=True)
class AttentionPlan:
    """Plan of one step's attention for all layers with the same window.

    Attributes:
        tile_tokens: int64 [query tiles * tokens of a tile], row of the step, or the zero row past the last token.
        token_places: int64 [tokens], each token's place in `tile_tokens`.
        tokens_per_tile: query tokens of a query tile.
        rows: rows of a batched product, tokens_per_tile * head group rounded up.
        group_size: items of every batched product.
        panels: the work.
    """

    tile_tokens: torch.Tensor
    token_places: torch.Tensor
    tokens_per_tile: int
    rows: int
    group_size: int
    panels: list[Panel]


def plan(metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int, window: int | None = None) -> AttentionPlan:
    """Splits one step into query tiles, items, groups and panels."""
    head_group = num_heads // cache.num_kv_heads
    tokens_per_tile = max(1, ROWS // head_group)
    # A window as large as the longest sequence is none: each row's window starts at its position minus `reach`.
    reach = int(metadata.seq_lens.max()) if window is None else window
    tiles = _query_tiles(metadata, tokens_per_tile, reach)
    rows = -(-tokens_per_tile * head_group // ROWS) * ROWS
    key_bytes = KV_TILE * cache.num_kv_heads * cache.head_dim * 4
    planner = _Planner(
        tiles=tiles,
        cache=cache,
        granule_table=_granule_table(metadata, cache),
        row_positions=np.repeat(tiles.positions, head_group, axis=1),
        reach=reach,
        rows=rows,
        group_size=max(2, min(MAX_GROUP, GROUP_BYTES // key_bytes)),
    )
    return AttentionPlan(
        tile_tokens=torch.from_numpy(tiles.tokens.ravel()),
        token_places=torch.from_numpy(tiles.token_places),
        tokens_per_tile=tokens_per_tile,
        rows=rows,
        group_size=planner.group_size,
        panels=planner.panels(),
    )


def _granule_table(metadata: AttentionMetaData, cache: PagedKVCache) -> Ints:
    """[S, granules]: the cache row of each granule of each sequence for head 0; the zero block's past the end."""
    per_block = cache.block_size // cache.granule
    per_tile = KV_TILE // cache.granule
    longest = int(metadata.seq_lens.max())
    granules = np.arange(-(-longest // KV_TILE) * per_tile)
    blocks, parts = np.divmod(granules, per_block)
    reachable = np.minimum(blocks, metadata.block_tables.shape[1] - 1)
    ids = metadata.block_tables[:, reachable]
    inside = granules * cache.granule < metadata.seq_lens[:, None]
    return np.asarray(np.where(inside, ids, cache.num_blocks) * (cache.num_kv_heads * per_block) + parts)


@dataclass(frozen=True)
class _QueryTiles:
    """Query tiles, those with the most KV tiles first.

    Attributes:
        sequences: int64 [Q], the sequence of each.
        tokens: int64 [Q, tokens of a tile], row of the step; the number of tokens for places past the last token.
        positions: int64 [Q, tokens of a tile], absolute positions; the last token's for places past it.
        first_kv_tiles: int64 [Q], the first that a row sees.
        num_kv_tiles: int64 [Q], from there on; never increasing.
        seq_lens: int64 [Q], length of the tile's sequence.
        token_places: int64 [tokens], each token's place in `tokens`.
    """

    sequences: Ints
    tokens: Ints
    positions: Ints
    first_kv_tiles: Ints
    num_kv_tiles: Ints
    seq_lens: Ints
    token_places: Ints


def _query_tiles(metadata: AttentionMetaData, tokens_per_tile: int, reach: int) -> _QueryTiles:
    starts = metadata.cu_seqlens_q[:-1]
    lengths = np.diff(metadata.cu_seqlens_q)
    per_sequence = -(-lengths // tokens_per_tile)
    sequences = np.repeat(np.arange(len(lengths)), per_sequence)
    first_tiles = np.cumsum(per_sequence) - per_sequence
    offsets = (np.arange(len(sequences)) - first_tiles[sequences])[:, None] * tokens_per_tile
    offsets = offsets + np.arange(tokens_per_tile)
    last = lengths[sequences][:, None] - 1
    real = offsets <= last
    positions = (metadata.seq_lens - lengths)[sequences][:, None] + np.minimum(offsets, last)
    first_kv_tiles = np.maximum(positions[:, 0] - reach + 1, 0) // KV_TILE
    num_kv_tiles = positions[:, -1] // KV_TILE + 1 - first_kv_tiles
    order = np.argsort(-num_kv_tiles, kind="stable")
    tokens = np.where(real, starts[sequences][:, None] + offsets, metadata.num_tokens)[order]
    places = np.empty(metadata.num_tokens + 1, np.int64)
    places[tokens.ravel()] = np.arange(tokens.size)
    return _QueryTiles(
        sequences=sequences[order],
        tokens=tokens,
        positions=positions[order],
        first_kv_tiles=first_kv_tiles[order],
        num_kv_tiles=num_kv_tiles[order],
        seq_lens=metadata.seq_lens[sequences][order],
        token_places=places[:-1],
    )


@dataclass(frozen=True)
class _Planner:
    """Makes panels and groups out of query tiles; `row_positions` is [Q, tokens of a tile * head group]."""

    tiles: _QueryTiles
    cache: PagedKVCache
    granule_table: Ints
    row_positions: Ints
    reach: int
    rows: int
    group_size: int

    def panels(self) -> list[Panel]:
        item_bytes = self.cache.num_kv_heads * self.rows * self.cache.head_dim * 4
        most_items = max(1, PANEL_BYTES // item_bytes)
        ends = np.cumsum(self.tiles.num_kv_tiles)
        panels = []
        start = 0
        while start < len(ends):
            done = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + most_items, side="right")))
            panels.append(self._panel(start, stop))
            start = stop
        return panels

    def _panel(self, start: int, stop: int) -> Panel:
        num_kv_tiles = self.tiles.num_kv_tiles[start:stop]
        counts = np.searchsorted(-num_kv_tiles, -np.arange(num_kv_tiles[0]), side="left")
        nth = np.repeat(np.arange(len(counts)), counts)
        item_tiles = np.arange(len(nth)) - np.repeat(np.cumsum(counts) - counts, counts)
        query_tiles = item_tiles + start
        groups = self._groups(query_tiles, self.tiles.first_kv_tiles[query_tiles] + nth)
        return Panel(start, stop, torch.from_numpy(item_tiles), counts.tolist(), groups)

    def _groups(self, query_tiles: Ints, kv_tiles: Ints) -> list[Group]:
        """Groups of items; item i is the pair of query_tiles[i] and kv_tiles[i]."""
        granule_rows = self._granule_rows(query_tiles, kv_tiles)
        visible = self._visible(query_tiles, kv_tiles)
        filled = np.minimum(self.tiles.seq_lens[query_tiles] - kv_tiles * KV_TILE, KV_TILE)
        groups = []
        for first in range(0, len(kv_tiles), self.group_size):
            part = slice(first, first + self.group_size)
            masked = bool((visible[part] != KV_TILE).any())
            groups.append(
                Group(
                    first=first,
                    count=len(kv_tiles[part]),
                    query_tiles=torch.from_numpy(query_tiles[part]),
                    granule_rows=torch.from_numpy(granule_rows[part].ravel()),
                    visible=torch.from_numpy(visible[part].ravel()) if masked else None,
                    unwritten=self._unwritten(filled[part]),
                )
            )
        return groups

    def _granule_rows(self, query_tiles: Ints, kv_tiles: Ints) -> Ints:
        """Cache rows of each item's granules: [items, Hkv, granules of a tile]."""
        per_tile = KV_TILE // self.cache.granule
        columns = kv_tiles[:, None] * per_tile + np.arange(per_tile)
        head_0 = self.granule_table[self.tiles.sequences[query_tiles][:, None], columns]
        heads = np.arange(self.cache.num_kv_heads) * (self.cache.block_size // self.cache.granule)
        return np.asarray(head_0[:, None, :] + heads[None, :, None])

    def _visible(self, query_tiles: Ints, kv_tiles: Ints) -> Ints:
        """Rows of `visibility_biases` for [items, rows]; rows that pad a product see everything."""
        visible = np.full((len(query_tiles), self.rows), KV_TILE, np.int64)
        ends = self.row_positions[query_tiles] - kv_tiles[:, None] * KV_TILE + 1
        begins = np.clip(ends - self.reach, 0, KV_TILE)
        visible[:, : ends.shape[1]] = begins * (KV_TILE + 1) + np.clip(ends, 0, KV_TILE)
        return visible

    def _unwritten(self, filled: Ints) -> torch.Tensor | None:
        """Gathered rows that lie in a granule but past the sequence's end; `filled` [count] keys are in each tile."""
        ends = -(-filled // self.cache.granule) * self.cache.granule
        if (filled == ends).all():
            return None
        slots = np.arange(KV_TILE)
        items, places = np.nonzero((slots >= filled[:, None]) & (slots < ends[:, None]))
        heads = np.arange(self.cache.num_kv_heads)
        rows = (items[:, None] * self.cache.num_kv_heads + heads) * KV_TILE + places[:, None]
        return torch.from_numpy(rows.ravel())


class Workspace:
    """Buffers that are kept from call to call, by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous, aligned float32 buffer; its contents are undefined."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = torch.zeros(size)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


class PagedAttention:
    """Computes attention by plans. Keeps its buffers, so one object serves one thread."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._groups: dict[tuple[object, ...], _GroupKernel] = {}

    def attend(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of q [T, Hq, D] by `plan`: [T, Hq, value width]; rows past the plan's tokens are zeros.

        See AttentionOps.apply for `sinks` and `softcap`.
        """
        tokens = len(plan.token_places)
        queries = tiled_queries(q, tokens, cache.num_kv_heads, plan, scale)
        row_sinks = None if sinks is None else _row_sinks(sinks, cache.num_kv_heads, plan)
        results = [self._panel(queries, cache, layer, plan, panel, row_sinks, softcap) for panel in plan.panels]
        tiled = results[0] if len(results) == 1 else torch.cat(results)
        rows, num_heads, _ = q.shape
        head_group, width = num_heads // cache.num_kv_heads, cache.value_dim
        used = tiled[:, :, : plan.tokens_per_tile * head_group]
        by_token = used.reshape(-1, cache.num_kv_heads, plan.tokens_per_tile, head_group, width).transpose(1, 2)
        out = q.new_zeros(rows, num_heads, width)
        out[:tokens] = by_token.reshape(-1, num_heads, width).index_select(0, plan.token_places)
        return out

    def _panel(
        self,
        queries: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        plan: AttentionPlan,
        panel: Panel,
        sinks: torch.Tensor | None,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of one panel: [query tiles of the panel, Hkv, rows, value width]."""
        heads, size = cache.num_kv_heads, plan.group_size
        items = len(panel.item_tiles)
        padded = -(-items // size) * size
        maxima = self._workspace.get("maxima", (padded, heads, plan.rows, 1))
        peaks = self._workspace.get("peaks", (padded, heads, plan.rows, 1))
        values = self._workspace.get("values", (padded, heads, plan.rows, cache.value_dim))
        kernel = self._kernel(cache, plan)
        keys_values = cache.granules(layer)
        for group in panel.groups:
            part = slice(group.first, group.first + size)
            kernel.run(group, queries, keys_values, softcap, maxima[part], peaks[part], values[part])
        highest = _highest(panel, maxima[:items])
        weights = self._exp_difference("weights", maxima[:items], highest.index_select(0, panel.item_tiles))
        total_values, total_weights = _totals(panel.tile_counts, weights.div_(peaks[:items]), values[:items])
        if sinks is not None:
            total_weights.add_(self._exp_difference("sinks", sinks.expand(highest.shape), highest))
        return total_values / total_weights

    def _exp_difference(self, buffer: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """exp(a - b), in the buffer of that name."""
        flat = self._workspace.get(buffer, (padded_length(a.numel()),))
        difference = flat[: a.numel()].view(a.shape)
        torch.sub(a, b, out=difference)
        difference.mul_(math.log2(math.e))
        exp2_(flat)
        return difference

    def _kernel(self, cache: PagedKVCache, plan: AttentionPlan) -> _GroupKernel:
        shape = (cache.num_kv_heads, cache.head_dim, cache.value_dim, cache.latent, cache.granule)
        key = (plan.group_size, plan.rows, cache.data.dtype, *shape)
        if key not in self._groups:
            self._groups[key] = _GroupKernel(plan.group_size, cache, plan.rows)
        return self._groups[key]


def tiled_queries(q: torch.Tensor, tokens: int, num_kv_heads: int, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Scaled float32 queries as [query tiles, Hkv, rows, D], zeros in the places past a sequence's rows."""
    _, num_heads, head_dim = q.shape
    head_group = num_heads // num_kv_heads
    wide = q.new_zeros(tokens + 1, num_heads, head_dim, dtype=torch.float32)
    wide[:tokens] = q[:tokens]
    wide.mul_(scale)
    gathered = wide.index_select(0, plan.tile_tokens)
    split = gathered.view(-1, plan.tokens_per_tile, num_kv_heads, head_group, head_dim)
    used = plan.tokens_per_tile * head_group
    rows = split.transpose(1, 2).reshape(-1, num_kv_heads, used, head_dim)
    if used == plan.rows:
        return rows
    padded = rows.new_zeros(rows.shape[0], num_kv_heads, plan.rows, head_dim)
    padded[:, :, :used] = rows
    return padded


class _GroupKernel:
    """Computes groups of items into m, p and o, with its own buffers; the products always run over whole groups."""

    def __init__(self, size: int, cache: PagedKVCache, rows: int) -> None:
        heads, dim = cache.num_kv_heads, cache.head_dim
        batch = size * heads
        self._q = torch.zeros(size, heads, rows, dim)
        self._k = Gathered(size, cache)
        self._v = None if cache.latent else Gathered(size, cache)
        self._scores = torch.zeros(size, heads, rows, KV_TILE)
        self._probabilities = torch.zeros(size, heads, rows, KV_TILE)
        self._bias = torch.zeros(size, 1, rows, KV_TILE)
        self._bias_rows = self._bias.view(size, -1)
        self._biases = visibility_biases()
        self._q_product = self._q.view(batch, rows, dim)
        self._k_product = self._k.wide.view(batch, KV_TILE, dim).transpose(1, 2)
        values = self._k if self._v is None else self._v
        self._v_product = values.wide.view(batch, KV_TILE, dim)[:, :, : cache.value_dim]
        self._values_shape = (batch, rows, cache.value_dim)
        self._scores_product = self._scores.view(batch, rows, KV_TILE)
        self._probabilities_product = self._probabilities.view(batch, rows, KV_TILE)

    def run(
        self,
        group: Group,
        queries: torch.Tensor,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        softcap: float,
        maxima: torch.Tensor,
        peaks: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Fills the group's slices; slices after `group.count` items are undefined and not used."""
        n = group.count
        torch.index_select(queries, 0, group.query_tiles, out=self._q[:n])
        self._k.gather(keys_values[0], group)
        if self._v is not None:
            self._v.gather(keys_values[1], group)
        torch.bmm(self._q_product, self._k_product, out=self._scores_product)
        scores = self._scores[:n]
        if softcap:
            scores.copy_(softcapped(scores, softcap))
        if group.visible is not None:
            torch.index_select(self._biases, 0, group.visible, out=self._bias_rows[:n].view(-1, KV_TILE))
            scores.add_(self._bias[:n])
        probabilities = self._probabilities[:n]
        torch.amax(scores, -1, keepdim=True, out=maxima[:n])
        torch.softmax(scores, -1, out=probabilities)
        torch.amax(probabilities, -1, keepdim=True, out=peaks[:n])
        torch.bmm(self._probabilities_product, self._v_product, out=values.view(self._values_shape))


@functools.cache
def visibility_biases() -> torch.Tensor:
    """[(KV_TILE + 1)^2, KV_TILE]: row b * (KV_TILE + 1) + e hides all but the keys [b, e) of a tile."""
    places = torch.arange(KV_TILE)
    borders = torch.arange(KV_TILE + 1)[:, None]
    before, past = places < borders, places >= borders
    return torch.where(before[:, None] | past[None], LOWEST, 0.0).view(-1, KV_TILE)


class Gathered:
    """Keys or values of a group, gathered from the cache: zero where not written, widened to float32."""

    def __init__(self, size: int, cache: PagedKVCache) -> None:
        shape = (size, cache.num_kv_heads, KV_TILE, cache.head_dim)
        self.wide = torch.zeros(shape)
        self._narrow = self.wide if cache.data.dtype == torch.float32 else torch.zeros(shape, dtype=cache.data.dtype)
        self._rows = float8.raw(self._narrow).view(-1, cache.head_dim)
        self._granules = float8.raw(self._narrow).view(-1, cache.granule * cache.head_dim)

    def gather(self, source: torch.Tensor, group: Group) -> None:
        """Fills the group's items; unwritten slots may hold anything, and 0 * NaN is NaN."""
        torch.index_select(source, 0, group.granule_rows, out=self._granules[: len(group.granule_rows)])
        if group.unwritten is not None:
            self._rows.index_fill_(0, group.unwritten, 0)
        if self._narrow is not self.wide:
            float8.widen(self._narrow[: group.count], self.wide[: group.count])


def _row_sinks(sinks: torch.Tensor, num_kv_heads: int, plan: AttentionPlan) -> torch.Tensor:
    """float32 [1, Hkv, rows, 1] from [Hq]; 0 for rows that pad a product."""
    by_group = sinks.float().view(num_kv_heads, 1, -1).expand(-1, plan.tokens_per_tile, -1).reshape(num_kv_heads, -1)
    rows = by_group.new_zeros(num_kv_heads, plan.rows)
    rows[:, : by_group.shape[1]] = by_group
    return rows.view(1, num_kv_heads, plan.rows, 1)


def _highest(panel: Panel, maxima: torch.Tensor) -> torch.Tensor:
    """The rows' overall maxima, [query tiles, Hkv, rows, 1], from those of their items."""
    first, *others = maxima.split_with_sizes(panel.tile_counts)
    highest = first.clone()
    for part in others:
        head = highest[: len(part)]
        torch.maximum(head, part, out=head)
    return highest


def _totals(tile_counts: list[int], weights: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of weighted values and of weights, of each query tile's items [.., Hkv, rows, D and 1] in their order."""
    values.mul_(weights)
    total_weights, *other_weights = weights.split_with_sizes(tile_counts)
    total_values, *other_values = values.split_with_sizes(tile_counts)
    for part_weights, part_values in zip(other_weights, other_values, strict=True):
        total_weights[: len(part_weights)].add_(part_weights)
        total_values[: len(part_values)].add_(part_values)
    return total_values, total_weights
