"""Runs a draft model over rows of sequences, over KV of its own under the block ids of its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.config import Config
from kernels.interface import AttentionMetaData, KernelBackend, KVCache, KVSpec
from kernels.upload import to_device
from worker.model.block_tables import BlockTables
from worker.model.forward_context import Context, KVCacheTensor, forward_context

Ints = npt.NDArray[np.int64]
# Token ids and positions int64 [T], states [T, H] -> states [T, H].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DraftRows:
    """Rows of S sequences, each a run of positions.

    Attributes:
        starts: int64 [S], the first position of each.
        counts: int64 [S], rows of each, at least one.
        tables: the sequences' block tables, which cover the rows.
        token_ids: int64 [T], of all rows.
    """

    starts: Ints
    counts: Ints
    tables: list[list[int]]
    token_ids: Ints

    @property
    def last(self) -> Ints:
        """int64 [S]: the last row of each sequence."""
        return np.cumsum(self.counts) - 1


class DraftRunner:
    """The KV and the steps of a draft model.

    Args:
        config: of the engine.
        kernels: that the model was made with.
        kv_names: names of the model's layers in the forward context.
        kv_spec: of one layer.
        num_heads: Hq of this rank.

    Attributes:
        kv_spec: as above.
        num_layers: of the model, each with KV of its own.
    """

    def __init__(
        self, config: Config, kernels: KernelBackend, kv_names: tuple[str, ...], kv_spec: KVSpec, num_heads: int
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._kv_names = kv_names
        self._num_heads = num_heads
        self._tables = BlockTables()
        self.kv_spec = kv_spec
        self.num_layers = len(kv_names)

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """KV of the model's layers as they find it in the forward context."""
        return {name: KVCacheTensor(layer, cache) for layer, name in enumerate(self._kv_names)}

    @torch.inference_mode()
    def run(
        self, forward: Forward, rows: DraftRows, states: torch.Tensor, kv_cache_data: Mapping[str, KVCacheTensor]
    ) -> torch.Tensor:
        """Result of `forward`, [T, W], over the rows and states of them; their keys and values are stored."""
        cache = kv_cache_data[self._kv_names[0]].cache
        metadata, positions = self._metadata(rows)
        metadata.plan = self._kernels.attention.plan(metadata, cache, self._num_heads)
        multiple, total = self._kernels.row_multiple, len(positions)
        padded = -(-total // multiple) * multiple
        given = np.zeros((2, padded), np.int64)
        given[0, :total], given[1, :total] = rows.token_ids, positions
        token_ids, there = to_device(given, self._kernels.device)
        if padded > total:
            states = torch.nn.functional.pad(states, (0, 0, 0, padded - total))
        context = Context(there, 0, len(rows.counts), padded, is_draft=True)
        with forward_context(metadata, self._config, context, kv_cache_data):
            return forward(token_ids, there, states)[:total]

    def _metadata(self, rows: DraftRows) -> tuple[AttentionMetaData, Ints]:
        """Without its plan; and the positions of the rows."""
        size = self._config.kv_cache_block_size
        ends, positions, sequences = np.cumsum(rows.counts), rows.starts, np.arange(len(rows.counts))
        if ends[-1] > len(ends):
            sequences = np.repeat(sequences, rows.counts)
            positions = np.arange(ends[-1]) + np.repeat(rows.starts - (ends - rows.counts), rows.counts)
        lengths = rows.starts + rows.counts
        tables = self._tables.of_step(rows.tables, -(-lengths // size))
        blocks, offsets = np.divmod(positions, size)
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), ends)),
            seq_lens=lengths,
            block_tables=tables,
            slot_mapping=tables[sequences, blocks] * size + offsets,
        )
        return metadata, positions
