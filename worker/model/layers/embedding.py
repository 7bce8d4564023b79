"""Token embeddings and the output head, which may share one matrix; both split by vocabulary over the ranks."""

from __future__ import annotations

import torch

from kernels.grouped_weight import GroupedWeight, padded_rows
from kernels.interface import AnyWeight, PackedLinear
from kernels.no_token import NO_TOKEN
from worker.model.layers.build import Build
from worker.model.layers.product import product_weight, stay_quantized
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.stored_tensors import MatrixPart


class Embedding:
    """This rank's rows of `{name}.weight` [V, H]. The split may be uneven: the last rank may have fewer.

    Args:
        build: shared by the layers.
        name: of the tensor, without `.weight`.
        for_head: True if the output head multiplies by the matrix. Then the weight packed for products is the only
            copy, unless it is quantized, and rows are read out of it.

    Attributes:
        hidden_size: H.
        packed: the weight packed for products; None unless `for_head`.
    """

    def __init__(self, build: Build, name: str, for_head: bool) -> None:
        share, rows = _share(build)
        self._first = build.shard.rank * share
        self._collectives = build.shard.collectives
        self._whole = build.shard.size == 1
        self._linear = build.kernels.linear
        self._num_rows = share
        self.hidden_size = build.config.hidden_size
        self.packed: PackedLinear = head_weight(build, name) if for_head else None
        kept = not for_head or not self._linear.has_rows(self.packed)
        self._weight = self._kept_rows(build, name, rows, share) if kept else None

    @staticmethod
    def _kept_rows(build: Build, name: str, rows: slice, share: int) -> torch.Tensor:
        return build.kept.keep(f"{name}.weight", lambda: _read(build, name, rows, share).to(build.kernels.device))

    @property
    def matrix(self) -> torch.Tensor | PackedLinear:
        """This rank's rows, [V, H] or packed."""
        return self.packed if self._weight is None else self._weight

    def _rows(self, local: torch.Tensor) -> torch.Tensor:
        """int64 [T], indices among this rank's rows -> [T, H]"""
        if self._weight is None:
            return self._linear.rows(self.packed, local)
        return self._weight.index_select(0, local)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]"""
        if self._whole:
            return self._rows(token_ids)
        local = token_ids - self._first
        mine = (local >= 0) & (local < self._num_rows)
        rows = self._rows(local.clamp(0, self._num_rows - 1))
        return self._collectives.all_reduce(rows * mine.unsqueeze(1).to(rows.dtype))


def head_weight(build: Build, name: str) -> PackedLinear:
    """This rank's rows of `{name}.weight` [V, H], packed for products."""
    share, rows = _share(build)

    def pack() -> PackedLinear:
        weight = _codes(build, name, rows, share)
        weight = _read(build, name, rows, share) if weight is None else weight
        return build.kernels.linear.pack(weight, None, build.dtype, build.packed_format)

    return build.kept.keep(name, pack)


def _codes(build: Build, name: str, rows: slice, share: int) -> AnyWeight | None:
    """This rank's rows as `_read`, in the checkpoint's codes; None if they are stored or multiplied otherwise."""
    product = [MatrixPart(f"{name}.weight", rows)]
    is_grouped = isinstance(build.weights.quantized(f"{name}.weight"), GroupedTensor)
    if not is_grouped or not stay_quantized(build, [product]):
        return None
    weight = product_weight(build, product, True)
    return padded_rows(weight, share) if isinstance(weight, GroupedWeight) else weight


def _share(build: Build) -> tuple[int, slice]:
    """Number of rows of the largest rank, and this rank's rows."""
    size, vocab = build.shard.size, build.config.vocab_size
    share = -(-vocab // size)
    first = build.shard.rank * share
    return share, slice(min(first, vocab), min(first + share, vocab))


def _read(build: Build, name: str, rows: slice, share: int) -> torch.Tensor:
    """This rank's rows, in equal shapes on every rank so that logits can be gathered; rows past the vocabulary are
    zero."""
    weight = torch.empty(share, build.config.hidden_size, dtype=build.dtype)
    count = rows.stop - rows.start
    weight[count:] = 0.0
    build.weights.copy_to(weight[:count], f"{name}.weight", rows=rows)
    return weight


class LMHead:
    """Logits of the vocabulary in float32, with `head_weight` of the input embedding or of a separate matrix.

    Attributes:
        packed: the weight.
    """

    def __init__(self, build: Build, packed: PackedLinear) -> None:
        self._linear = build.kernels.linear
        self._collectives = build.shard.collectives
        self._whole = build.shard.size == 1
        self._vocab_size = build.config.vocab_size
        self._first = build.shard.rank * _share(build)[0]
        self.packed = packed

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, V], on every rank"""
        logits = self._collectives.all_gather(self._linear.apply(hidden, self.packed))
        return logits[:, : self._vocab_size].float()

    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [T]: the lowest id below `limit` of each row's largest logit, on every rank; see linear_argmax.

        Ranks exchange their best logit and its id, both exact in float32; no logits are gathered.
        """
        if self._whole:
            return self._linear.argmax(hidden, self.packed, limit)
        best = self._own_best(hidden, min(limit, self._vocab_size))
        gathered = self._collectives.all_gather(best)
        every = gathered.view(len(hidden), gathered.shape[1] // 2, 2)
        # `max` returns the first of equals, and the lowest rank has the lowest ids.
        values, ranks = every[..., 0].max(dim=1)
        ids = every[..., 1].gather(1, ranks.unsqueeze(1)).squeeze(1).long()
        return torch.where(values.isfinite(), ids, NO_TOKEN)

    def _own_best(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """float32 [T, 2]: the largest of this rank's logits below `limit` and its id; NaN counts as the lowest."""
        logits = self._linear.apply(hidden, self.packed)[:, : max(0, limit - self._first)].float()
        # A rank without an id below the limit gets a number too.
        lowest = logits.new_full((len(logits), 1), -torch.inf)
        logits = torch.cat((logits.nan_to_num(-torch.inf, torch.inf, -torch.inf), lowest), dim=1)
        values, places = logits.max(dim=1)
        return torch.stack((values, (places + self._first).float()), dim=1)
