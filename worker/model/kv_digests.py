"""Digests of the bytes of KV blocks, made on the device where the blocks are.

A digest is a sum over the block's 64-bit words, each mixed and multiplied by an odd number of its own: sums of integers
have no order, so that every device gives the same one, and a change of a single word always changes it. Those of all
ranks' shards are hashed together, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
import xxhash

from kernels.interface import KernelBackend, KVCache
from worker.model.sharding import Shard

# Waits for digests, by the names of the blocks.
KvDigests: TypeAlias = Callable[[], dict[bytes, int]]
# Of SplitMix64, as a signed number.
_MULTIPLIER: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SHIFT: Final = 29
_WORD: Final = 8


class KvDigester:
    """Digests blocks of one rank's KV cache.

    Args:
        kernels: know where a block is.
        shard: of this rank; rank 0 answers.
    """

    def __init__(self, kernels: KernelBackend, shard: Shard) -> None:
        self._kernels = kernels
        self._shard = shard
        self._odd = torch.ones(0, dtype=torch.int64, device=kernels.device)

    def begin(self, cache: KVCache, wanted: Mapping[int, bytes]) -> KvDigests | None:
        """Digests blocks as they are now, before anything that is launched later.

        Args:
            cache: the KV cache.
            wanted: names of blocks, by their ids.

        Returns:
            None where there is nothing to answer: on the other ranks, for no blocks, and where workers of one numerics
            class need not have the same bytes.
        """
        if not (wanted and self._kernels.batch_invariant):
            return None
        own = torch.stack([self._of_block(self._kernels.kv_cache.contents(cache, block)) for block in wanted])
        gathered = self._shard.collectives.all_gather(own)
        if self._shard.rank:
            return None
        names = list(wanted.values())
        return lambda: {
            name: xxhash.xxh3_64_intdigest(shards.tobytes())
            for name, shards in zip(names, gathered.cpu().view(-1, len(names)).T.contiguous().numpy(), strict=True)
        }

    def _of_block(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """int64 []."""
        raw = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % _WORD))
        mixed = padded.view(torch.int64) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
        return (mixed * self._odd_numbers(mixed.numel())).sum()

    def _odd_numbers(self, count: int) -> torch.Tensor:
        if len(self._odd) < count:
            self._odd = torch.arange(1, 2 * count, 2, device=self._odd.device)
        return self._odd[:count]
