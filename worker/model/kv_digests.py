"""Digests of the bytes of KV blocks, computed on the blocks' device.

A digest is a sum over the block's 64-bit words, each mixed and multiplied by its own odd number. Integer sums have no
order, so every device gives the same digest, and changing a single word always changes it. The digests of all ranks'
shards are hashed together, in rank order.

Digests only observe. A rank that fails to make them still takes part in the exchange, because the others wait for it,
and reports the failure there. That step has no digests, and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeAlias

import structlog
import torch
import xxhash

from kernels.interface import KernelBackend, KVCache
from worker.model.sharding import Shard

# Waits for names of blocks with their digests. A name may occur several times: once per cache salt.
KvDigests: TypeAlias = Callable[[], tuple[tuple[bytes, int], ...]]
# A constant of SplitMix64, as a signed number.
_MULTIPLIER: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SHIFT: Final = 29
_WORD: Final = 8
# Marks after a rank's digests in the exchange.
_MADE, _FAILED = 1, 0

_log = structlog.get_logger(__name__)


class KvDigester:
    """Digests blocks of one rank's KV cache.

    Args:
        kernels: locate a block.
        shard: of this rank; rank 0 answers.
    """

    def __init__(self, kernels: KernelBackend, shard: Shard) -> None:
        self._kernels = kernels
        self._shard = shard
        self._odd = torch.ones(0, dtype=torch.int64, device=kernels.device)
        self._has_warned = False

    def begin(self, cache: KVCache, wanted: Mapping[int, bytes]) -> KvDigests | None:
        """Digests blocks as they are now, before anything that is launched later.

        Args:
            cache: the KV cache.
            wanted: names of blocks, by block id.

        Returns:
            None if there is nothing to answer: on other ranks, for no blocks, and if workers of one numerics class may
                have different bytes. The callable returns nothing if a rank has failed.
        """
        if not (wanted and self._kernels.batch_invariant):
            return None
        gathered = self._shard.collectives.all_gather(self._own_part(cache, wanted))
        if self._shard.rank:
            return None
        return partial(self._named, list(wanted.values()), gathered)

    def _own_part(self, cache: KVCache, wanted: Iterable[int]) -> torch.Tensor:
        """int64 [blocks + 1]: this rank's digests and _MADE; all zeros after a failure."""
        try:
            digests = [self._of_block(self._kernels.kv_cache.contents(cache, block)) for block in wanted]
            return torch.stack([*digests, torch.full_like(digests[0], _MADE)])
        except Exception as error:
            self._warn(error)
        return torch.full((len(list(wanted)) + 1,), _FAILED, dtype=torch.int64, device=self._kernels.device)

    def _named(self, names: list[bytes], gathered: torch.Tensor) -> tuple[tuple[bytes, int], ...]:
        """The digests of whole blocks; waits for the device."""
        shards = gathered.cpu().view(-1, len(names) + 1).numpy()
        if not (shards[:, -1] == _MADE).all():
            return ()
        return tuple((name, xxhash.xxh3_64_intdigest(shards[:, i].tobytes())) for i, name in enumerate(names))

    def _warn(self, error: Exception) -> None:
        """Logs a failure once, because the next steps may fail likewise."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("KV blocks are not digested", rank=self._shard.rank, why=f"{type(error).__name__}: {error}")

    def _of_block(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Digest of one block, int64 [], from its parts."""
        raw = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % _WORD))
        mixed = padded.view(torch.int64) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
        return (mixed * self._odd_numbers(mixed.numel())).sum()

    def _odd_numbers(self, count: int) -> torch.Tensor:
        if len(self._odd) < count:
            self._odd = torch.arange(1, 2 * count, 2, device=self._odd.device)
        return self._odd[:count]
