"""Sharding of a model: this rank's part, and how ranks combine their results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.interface import KernelBackend
from worker.config.shares import check_kv_share, check_share


class Collectives(Protocol):
    """Operations of a tensor-parallel group. Every rank calls the same ones in the same order."""

    def use(self, kernels: KernelBackend) -> bool:
        """Leaves sums to a back end that adds across ranks itself (`KernelBackend.join_ranks`). True if it does."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, on every rank; may reuse `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` [..., N], concatenated along the last dimension in rank order."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager around the capture of steps."""
        ...

    def close(self) -> None:
        """Undoes `use`."""
        ...


class Alone:
    """Collectives of a group of one."""

    def use(self, kernels: KernelBackend) -> bool:
        """Does nothing, always False."""
        return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager that does nothing."""
        return nullcontext()

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class DataParallel:
    """The engines in lockstep with this one, which share the experts of a mixture.

    Attributes:
        rank: of this engine, of `size`.
        size: engines.
        collectives: of the ranks with the same index in their engines.
        experts: of all ranks of all engines, engine by engine.
    """

    rank: int
    size: int
    collectives: Collectives
    experts: Collectives


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        rank: of `size`.
        size: ranks that share the model.
        collectives: of those ranks.
        expert_parallel: whether ranks hold whole experts of a mixture, instead of a part of each.
        data: other engines that hold experts too; None when this one is alone.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=Alone)
    expert_parallel: bool = False
    data: DataParallel | None = None

    def part(self, count: int, what: str) -> slice:
        """This rank's equal share of `count` things in a row.

        Raises:
            ModelError: they cannot be shared out evenly; `what` names them.
        """
        check_share(count, what, self.size)
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def expert_part(self, num_experts: int) -> slice:
        """This rank's experts with expert parallelism; shares differ by at most one, and may be empty."""
        rank, size = self.rank, self.size
        if self.data is not None:
            rank, size = self.data.rank * size + rank, self.data.size * size
        return slice(rank * num_experts // size, (rank + 1) * num_experts // size)

    def kv_part(self, num_kv_heads: int) -> slice:
        """This rank's key/value heads: an equal share, or, where ranks outnumber heads, one that others hold too.

        Raises:
            ModelError: neither of the two numbers is a multiple of the other.
        """
        check_kv_share(num_kv_heads, self.size)
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads, "num_key_value_heads")
        head = self.rank // (self.size // num_kv_heads)
        return slice(head, head + 1)


def times(part: slice, width: int) -> slice:
    """The rows of a part whose things have `width` rows each."""
    return slice(part.start * width, part.stop * width)


def length(part: slice) -> int:
    """Number of things in a part."""
    return int(part.stop - part.start)
