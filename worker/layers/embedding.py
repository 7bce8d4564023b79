"""Token embeddings and the output head, which may share one matrix; both split by vocabulary over the ranks."""

from __future__ import annotations

import torch

from worker.layers.build import Build


class Embedding:
    """This rank's rows of `{name}.weight` [V, H], whose split need not be even: the last rank may have fewer.

    Attributes:
        name: of the tensor, without `.weight`.
        weight: [rows of each rank, H] in the model dtype.
    """

    def __init__(self, build: Build, name: str) -> None:
        self.name = name
        shard = build.shard
        share = -(-build.config.vocab_size // shard.size)
        self._first = shard.rank * share
        rows = slice(min(self._first, build.config.vocab_size), min(self._first + share, build.config.vocab_size))
        self._collectives = shard.collectives
        self._whole = shard.size == 1
        self.weight = build.kept.keep(f"{name}.weight", lambda: _read(build, f"{name}.weight", rows, share))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]"""
        if self._whole:
            return self.weight.index_select(0, token_ids)
        local = token_ids - self._first
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight.index_select(0, local.clamp(0, self.weight.shape[0] - 1))
        return self._collectives.all_reduce(rows * mine.unsqueeze(1).to(rows.dtype))


def _read(build: Build, name: str, rows: slice, share: int) -> torch.Tensor:
    """Equal shapes on every rank, so that logits can be gathered; the rows past the vocabulary are zero."""
    weight = torch.empty(share, build.config.hidden_size, dtype=build.dtype)
    count = rows.stop - rows.start
    weight[count:] = 0.0
    build.weights.copy_to(weight[:count], name, rows=rows)
    return weight


class LMHead:
    """Logits of the vocabulary in float32; `embedding` is the input embedding or the head's own matrix."""

    def __init__(self, build: Build, embedding: Embedding) -> None:
        self._kernels = build.kernels
        self._collectives = build.shard.collectives
        self._vocab_size = build.config.vocab_size
        self._packed = build.kept.keep(
            f"{embedding.name} as head", lambda: build.kernels.pack_linear(embedding.weight, None, build.dtype)
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, V], on every rank"""
        logits = self._collectives.all_gather(self._kernels.linear(hidden, self._packed))
        return logits[:, : self._vocab_size].float()
