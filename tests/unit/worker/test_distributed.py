"""Ranks whose kernels have their own way of adding up: when it ends, and what its errors are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed

from kernels.interface import Ranks
from kernels.torch_backend import TorchBackend
from worker.distributed import GroupCollectives, PeerLostError, join

SIZE = 2


class Sums:
    """RankSums that write down what is done; the device of the last rank is slow."""

    def __init__(self, rank: int, done: list[str]) -> None:
        self._rank = rank
        self._done = done
        self.fails: Exception | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails is not None:
            raise self.fails
        return x

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield
        if self.fails is not None:
            raise self.fails

    def synchronize(self) -> None:
        time.sleep(0.2 * self._rank)
        self._done.append("synchronized")

    def close(self) -> None:
        self._done.append("closed")


class Kernels(TorchBackend):
    """With sums of its own."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def join_ranks(self, ranks: Ranks) -> Sums:  # type: ignore[override]
        """See KernelBackend."""
        self.sums = Sums(ranks.rank, self._done)
        return self.sums


def on_ranks(work: Callable[[GroupCollectives], None]) -> None:
    """Does something on each rank, a thread; raises what one of them does."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # missing in the stubs
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(lambda rank: work(join(store, rank, SIZE, "127.0.0.1", 20.0)), range(SIZE)))


def test_no_rank_gives_up_its_memory_while_the_device_of_another_computes() -> None:
    done: list[str] = []

    def leave(collectives: GroupCollectives) -> None:
        assert collectives.use(Kernels(done))
        for _ in range(2):
            collectives.close()

    on_ranks(leave)
    assert done == ["synchronized"] * SIZE + ["closed"] * SIZE


def test_sums_that_fail_are_a_peer_that_is_lost() -> None:
    def fail(collectives: GroupCollectives) -> None:
        kernels = Kernels([])
        collectives.use(kernels)
        kernels.sums.fails = RuntimeError("connection reset")
        with pytest.raises(PeerLostError, match="sums over ranks failed: connection reset"):
            collectives.all_reduce(torch.ones(1))
        with pytest.raises(PeerLostError, match="sums over ranks failed: connection reset"), collectives.capturing():
            pass
        with pytest.raises(ValueError, match="of the step"), collectives.capturing():
            raise ValueError("of the step")
        kernels.sums.fails = torch.OutOfMemoryError("no memory")
        with pytest.raises(torch.OutOfMemoryError):
            collectives.all_reduce(torch.ones(1))

    on_ranks(fail)
