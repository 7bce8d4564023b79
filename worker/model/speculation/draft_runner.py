"""Runs a draft model on rows of sequences. Its own KV lies under the target's block ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.config import Config
from kernels.interface import AttentionMetaData, KernelBackend, KVCache, KVSpec
from kernels.upload import slots_at, to_device
from worker.model.block_tables import BlockTables
from worker.model.forward_context import Context, KVCacheTensor, forward_context
from worker.model.step_metadata import step_metadata

Ints = npt.NDArray[np.int64]
# (token ids int64 [T], positions int64 [T], states [T, H]) -> states [T, H].
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DraftRows:
    """Rows of S sequences at consecutive positions.

    Attributes:
        starts: int64 [S], first position of each sequence.
        counts: int64 [S], rows of each sequence, at least one.
        tables: the sequences' block tables, long enough for the rows.
        token_ids: int64 [T], tokens of all rows, on the host or on the device.
        num_rejected: int64 [S] on the device, by how much the real positions are lower; None if they are exact.
    """

    starts: Ints
    counts: Ints
    tables: list[list[int]]
    token_ids: Ints | torch.Tensor
    num_rejected: torch.Tensor | None = None

    @property
    def last(self) -> Ints:
        """int64 [S]: each sequence's last row."""
        return np.cumsum(self.counts) - 1


class DraftRunner:
    """Runs a draft model's forward passes with its KV.

    Args:
        config: config of the engine.
        kernels: kernels that the model was made with.
        kv_names: names of the model's layers in the forward context.
        kv_spec: KV format of one layer.
        num_heads: Hq of this rank.

    Attributes:
        kv_spec: as above.
        num_layers: number of layers, each with its own KV.
    """

    def __init__(
        self, config: Config, kernels: KernelBackend, kv_names: tuple[str, ...], kv_spec: KVSpec, num_heads: int
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._kv_names = kv_names
        self._num_heads = num_heads
        self._size = config.kv_cache_block_size
        # Block tables of whole steps, and of the drafts after them.
        self._tables, self._chain_tables = BlockTables(), BlockTables()
        self.kv_spec = kv_spec
        self.num_layers = len(kv_names)

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """The model's KV by layer name, for the forward context."""
        return {name: KVCacheTensor(layer, cache) for layer, name in enumerate(self._kv_names)}

    @torch.inference_mode()
    def run(
        self,
        forward: Forward,
        rows: DraftRows,
        states: torch.Tensor,
        kv_cache_data: Mapping[str, KVCacheTensor],
        wanted: Ints | None = None,
    ) -> torch.Tensor:
        """Computes rows, stores their KV, and returns the result of `forward`, [T, W].

        Args:
            forward: the model's forward function.
            rows: the rows.
            states: [T, H], their states.
            kv_cache_data: result of `kv_cache_data`.
            wanted: int64, ascending, rows whose results are needed: none or the last ones of each sequence; None for
                all.
        """
        metadata, positions, sequences = step_metadata(rows.starts, rows.counts, rows.tables, self._tables, self._size)
        metadata.wanted_rows, metadata.num_rejected = wanted, rows.num_rejected
        token_ids, there = self._inputs(rows, positions, sequences)
        return self._forward(forward, metadata, token_ids, there, states, kv_cache_data)

    def _inputs(self, rows: DraftRows, positions: Ints, sequences: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded token ids and positions on the device; `sequences` has the sequence of each row."""
        total, device = len(positions), self._kernels.device
        given = np.zeros((2, self._padded(total)), np.int64)
        given[1, :total] = positions
        if isinstance(rows.token_ids, np.ndarray):
            given[0, :total] = rows.token_ids
            token_ids, there = to_device(given, device)
            return token_ids, there
        given[0, :total] = sequences
        of_rows, there = to_device(given, device)
        if rows.num_rejected is not None:
            there[:total] -= rows.num_rejected.index_select(0, of_rows[:total])
        return torch.nn.functional.pad(rows.token_ids, (0, len(there) - total)), there

    def chain(
        self, ends: Ints, counts: Ints, tables: list[list[int]], num_rejected: torch.Tensor | None = None
    ) -> ChainRows:
        """Positions and slots of the rows that drafting computes one after the other, made at once.

        Args:
            ends: int64 [D], position of each sequence's first such row.
            counts: int64 [D], number of these rows of each sequence, in descending order.
            tables: the sequences' block tables, long enough for the rows.
            num_rejected: see DraftRows.
        """
        covering = self._chain_tables.of_step(tables, -(-(ends + counts) // self._size))
        return ChainRows.of(ends, counts, covering, self._size, self._kernels, num_rejected)

    @torch.inference_mode()
    def go_on(
        self,
        forward: Forward,
        rows: ChainRows,
        place: int,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        kv_cache_data: Mapping[str, KVCacheTensor],
    ) -> torch.Tensor:
        """Computes one row of each of the first C sequences of a chain: returns [C, W].

        Args:
            forward: the model's forward function.
            rows: the chain's rows.
            place: index of the row in the chain.
            token_ids: int64 [C], its tokens.
            states: [C, H], its states.
            kv_cache_data: result of `kv_cache_data`.
        """
        padding = self._padded(len(token_ids)) - len(token_ids)
        if padding:
            token_ids = torch.nn.functional.pad(token_ids, (0, padding))
        metadata, positions = rows.at(place, len(token_ids))
        return self._forward(forward, metadata, token_ids, positions, states, kv_cache_data)

    def _padded(self, rows: int) -> int:
        multiple = self._kernels.row_multiple
        return -(-rows // multiple) * multiple

    def _forward(
        self,
        forward: Forward,
        metadata: AttentionMetaData,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        kv_cache_data: Mapping[str, KVCacheTensor],
    ) -> torch.Tensor:
        """Runs `forward`; `token_ids` and `positions` are padded already, `states` are not."""
        total, padded = len(states), len(token_ids)
        cache = kv_cache_data[self._kv_names[0]].cache
        metadata.plan = self._kernels.attention.plan(metadata, cache, self._num_heads)
        if padded > total:
            states = torch.nn.functional.pad(states, (0, 0, 0, padded - total))
        context = Context(positions, 0, len(metadata.seq_lens), padded, is_draft=True)
        with forward_context(metadata, self._config, context, kv_cache_data):
            return forward(token_ids, positions, states)[:total]


@dataclass(frozen=True)
class ChainRows:
    """Rows of D sequences that drafting computes one after the other; sequences with more rows come first.

    Attributes:
        counts: number of sequences with a row at each place of the chain.
        lengths: int64 [K, D], tokens that each row attends to, itself included.
        slots: int64 [K, D], KV slots of the rows.
        tables: block tables of the sequences.
        borders: int64 [D + 1], 0, 1, 2 and so on: one row a sequence.
        positions: int64 [K, P] on the device, exact; 0 for padding.
        num_rejected: see DraftRows.
    """

    counts: list[int]
    lengths: Ints
    slots: Ints
    tables: Ints
    borders: Ints
    positions: torch.Tensor
    num_rejected: torch.Tensor | None

    @classmethod
    def of(
        cls,
        ends: Ints,
        counts: Ints,
        tables: Ints,
        size: int,
        kernels: KernelBackend,
        num_rejected: torch.Tensor | None,
    ) -> ChainRows:
        """Rows at the `counts` positions from `ends` on; `size` is the number of tokens of a block."""
        places, sequences = np.arange(counts[0])[:, None], np.arange(len(ends))
        is_there = places < counts
        positions = np.where(is_there, ends + places, 0)
        padding = -len(ends) % kernels.row_multiple
        padded = np.pad(positions, ((0, 0), (0, padding))) if padding else positions
        there = to_device(padded, kernels.device)
        if num_rejected is not None:
            # Places without a row hold 0, which must not become negative.
            moved = (there[:, : len(ends)] - num_rejected).clamp(min=0)
            there = torch.cat((moved, there[:, len(ends) :]), dim=1)
        return cls(
            np.count_nonzero(is_there, axis=1).tolist(),
            positions + 1,
            slots_at(positions, sequences, tables, size),
            tables,
            np.arange(len(ends) + 1),
            there,
            num_rejected,
        )

    def at(self, place: int, padded: int) -> tuple[AttentionMetaData, torch.Tensor]:
        """Attention metadata without a plan, and `padded` positions, of the rows at a place of the chain."""
        count = self.counts[place]
        metadata = AttentionMetaData(
            self.borders[: count + 1],
            self.lengths[place, :count],
            self.tables[:count],
            self.slots[place, :count],
            num_rejected=None if self.num_rejected is None else self.num_rejected[:count],
        )
        return metadata, self.positions[place, :padded]
