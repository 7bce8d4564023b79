"""Token embeddings and the output head, which may share one matrix; both split by vocabulary over the ranks."""

from __future__ import annotations

import torch

from kernels.interface import PackedLinear
from kernels.sampling import greedy
from worker.layers.build import Build


class Embedding:
    """This rank's rows of `{name}.weight` [V, H], whose split need not be even: the last rank may have fewer."""

    def __init__(self, build: Build, name: str) -> None:
        shard = build.shard
        share = -(-build.config.vocab_size // shard.size)
        self._first = shard.rank * share
        rows = slice(min(self._first, build.config.vocab_size), min(self._first + share, build.config.vocab_size))
        self._collectives = shard.collectives
        self._whole = shard.size == 1
        # Equal shapes on every rank, so that logits can be gathered; the rows past the vocabulary are zero.
        weight = torch.empty(share, build.config.hidden_size, dtype=build.dtype)
        weight[rows.stop - rows.start :] = 0.0
        build.weights.copy_to(weight[: rows.stop - rows.start], f"{name}.weight", rows=rows)
        self._kernels = build.kernels
        self._num_rows = share
        self._weight: torch.Tensor | None = weight
        self._packed: PackedLinear = None

    def pack(self, dtype: torch.dtype) -> PackedLinear:
        """The weight as a product wants it, which is from now on the only copy: rows are read out of it."""
        if self._weight is not None:
            self._packed = self._kernels.pack_linear(self._weight, None, dtype)
            self._weight = None
        return self._packed

    def _rows(self, local: torch.Tensor) -> torch.Tensor:
        """int64 [T], places in this rank's rows -> [T, H]"""
        if self._weight is None:
            return self._kernels.packed_rows(self._packed, local)
        return self._weight.index_select(0, local)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]"""
        if self._whole:
            return self._rows(token_ids)
        local = token_ids - self._first
        mine = (local >= 0) & (local < self._num_rows)
        rows = self._rows(local.clamp(0, self._num_rows - 1))
        return self._collectives.all_reduce(rows * mine.unsqueeze(1).to(rows.dtype))


class LMHead:
    """Logits of the vocabulary in float32; `embedding` is the input embedding or the head's own matrix."""

    def __init__(self, build: Build, embedding: Embedding) -> None:
        self._kernels = build.kernels
        self._collectives = build.shard.collectives
        self._whole = build.shard.size == 1
        self._vocab_size = build.config.vocab_size
        self._packed = embedding.pack(build.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, V], on every rank"""
        logits = self._collectives.all_gather(self._kernels.linear(hidden, self._packed))
        return logits[:, : self._vocab_size].float()

    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [T]: the lowest id below `limit` of each row's largest logit, on every rank."""
        if self._whole:
            return self._kernels.linear_argmax(hidden, self._packed, limit)
        return torch.from_numpy(greedy(self(hidden)[:, :limit].numpy()))
