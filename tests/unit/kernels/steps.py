"""Steps made by hand for attention: sequences with scattered blocks, and a plain reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface import AttentionMetaData
from kernels.torch_backend.attention import PagedKVCache


@dataclass(frozen=True)
class Rows:
    """Rows [start, end) of a sequence whose blocks are `blocks`."""

    start: int
    end: int
    blocks: list[int]

    @property
    def count(self) -> int:
        return self.end - self.start


def metadata(rows: list[Rows], block_size: int) -> AttentionMetaData:
    """One step over `rows`, without a plan."""
    longest = max(len(r.blocks) for r in rows)
    tables = np.array([r.blocks + [0] * (longest - len(r.blocks)) for r in rows], np.int64)
    slots = [r.blocks[p // block_size] * block_size + p % block_size for r in rows for p in range(r.start, r.end)]
    return AttentionMetaData(
        cu_seqlens_q=np.cumsum([0, *(r.count for r in rows)]),
        seq_lens=np.array([r.end for r in rows], np.int64),
        block_tables=tables,
        slot_mapping=np.array(slots, np.int64),
    )


def scattered_blocks(lengths: list[int], block_size: int, num_blocks: int, seed: int) -> list[list[int]]:
    """Blocks for sequences of these lengths, in random places of the pool."""
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]


def stored(cache: PagedKVCache, layer: int, blocks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, length, D] of a sequence, read from the cache one position at a time."""
    slots = [(blocks[p // cache.block_size], p % cache.block_size) for p in range(length)]
    keys, values = (torch.stack([cache.data[layer, side, b, :, o] for b, o in slots], dim=1) for side in (0, 1))
    return keys, values


def reference_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [rows, Hq, D] at positions from `start`, in float64: [rows, Hq, D]; see AttentionOps.apply.

    Scores become softcap * tanh(score / softcap), if it is not 0.
    """
    group = q.shape[1] // keys.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("thd,hkd->htk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(start, start + len(q))
    scores.masked_fill_(torch.arange(k.shape[1]) > positions[:, None], -torch.inf)
    if window is not None:
        scores.masked_fill_(torch.arange(k.shape[1]) <= positions[:, None] - window, -torch.inf)
    if sinks is not None:
        own = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, own), -1)
    return torch.einsum("htk,hkd->thd", scores.softmax(-1)[..., : k.shape[1]], v)


def reference_selection(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, topk: int) -> list[int]:
    """Positions that a token selects by index queries q [Hi, Di] and weights [Hi] among keys [tokens, Di], ascending;
    see LatentAttentionOps.select_tokens."""
    products = torch.einsum("hd,kd->hk", q.double(), keys.double())
    scores = (weights.double()[:, None] * products.relu()).sum(0).tolist()
    return sorted(sorted(range(len(keys)), key=lambda k: (-scores[k], k))[:topk])
