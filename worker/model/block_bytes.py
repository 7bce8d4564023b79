"""Bytes of KV blocks: reads them for KV tiers, and writes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kernels import float8
from kernels.interface import KernelBackend, KVCache
from worker.engine.batch import ScheduledBatch

# Waits for names, names of the blocks before, and bytes.
BlocksDown = Callable[[], list[tuple[bytes, bytes, bytes]]]


class BlockBytes:
    """Reads and writes whole blocks of KV caches that share block ids.

    Args:
        kernels: locate a block.
    """

    def __init__(self, kernels: KernelBackend) -> None:
        self._kernels = kernels

    def move(self, caches: Sequence[KVCache], batch: ScheduledBatch) -> BlocksDown | None:
        """Begins to read the blocks that a step has to read, then writes those that it has to write."""
        blocks_down = self.read(caches, batch.blocks_down)
        self.write(caches, batch.blocks_up)
        return blocks_down

    def read(self, caches: Sequence[KVCache], blocks: Mapping[int, tuple[bytes, bytes]]) -> BlocksDown | None:
        """Begins to read blocks as they are now, before anything that is launched later; None without blocks.

        Args:
            caches: of the model, then of its draft model.
            blocks: name and name of the block before, by block id.
        """
        if not blocks:
            return None
        copies = [(key, self._copy(caches, block_id)) for block_id, key in blocks.items()]
        return lambda: [(*key, copy.cpu().numpy().tobytes()) for key, copy in copies]

    def write(self, caches: Sequence[KVCache], blocks: Iterable[tuple[int, bytes]]) -> None:
        """Writes the bytes that `read` gave, in order.

        Raises:
            ValueError: a block has another size.
        """
        for block_id, data in blocks:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = self._parts(caches, block_id)
            pieces = torch.split(source, [part.numel() * part.element_size() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.view(part.dtype).view(part.shape))

    def _copy(self, caches: Sequence[KVCache], block_id: int) -> torch.Tensor:
        """A block's bytes, uint8 [bytes], on the device."""
        parts = self._parts(caches, block_id)
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def _parts(self, caches: Sequence[KVCache], block_id: int) -> list[torch.Tensor]:
        contents = self._kernels.kv_cache.contents
        return [float8.raw(part) for cache in caches for part in contents(cache, block_id)]
