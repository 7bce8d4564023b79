"""Ranks whose kernels have their own way of adding up: when it ends, and what its errors are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.interface import Ranks
from kernels.torch_backend.backend import TorchBackend
from tests.meshes import local_meshes
from worker.model.layers.embedding import LMHead
from worker.model.sharding import Shard
from worker.ranks.collectives import GroupCollectives, PeerLostError

SIZE = 2


class Sums:
    """RankSums that record their calls; the device of the last rank is slow."""

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
    """A PyTorch back end with its own sums over ranks."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def join_ranks(self, ranks: Ranks) -> Sums:  # type: ignore[override]
        self.sums = Sums(ranks.rank, self._done)
        return self.sums


def on_ranks(work: Callable[[GroupCollectives], None], size: int = SIZE) -> None:
    """Runs `work` on each rank, a thread; raises the first error of a rank."""
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda mesh: work(GroupCollectives(mesh, "127.0.0.1")), local_meshes(size)))


def test_ranks_free_memory_after_all_devices_finish() -> None:
    done: list[str] = []

    def leave(collectives: GroupCollectives) -> None:
        assert collectives.use(Kernels(done))
        for _ in range(2):
            collectives.close()

    on_ranks(leave)
    assert done == ["synchronized"] * SIZE + ["closed"] * SIZE


def test_failed_sums_raise_peer_lost() -> None:
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


class Counted:
    """A mesh that counts the bytes that come to this rank from others."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def all_gather(self, own: torch.Tensor) -> Any:
        self.received += own.nbytes * (self.size - 1)
        return self._mesh.all_gather(own)

    def all_to_all(self, slices: list[torch.Tensor]) -> Any:
        self.received += sum(part.nbytes for part in slices) - slices[self.rank].nbytes
        return self._mesh.all_to_all(slices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numbers", [7, 70_001, 262_144])
def test_sums_add_in_rank_order_at_any_size(dtype: torch.dtype, numbers: int) -> None:
    """Each number is added from rank 0 on; of large tensors a rank gets two, not one from each other rank."""
    ranks = 4
    generator = torch.Generator().manual_seed(numbers)
    parts = [(torch.randn(numbers, generator=generator) * 10**rank).to(dtype) for rank in range(ranks)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part

    def add(collectives: GroupCollectives) -> None:
        counted: Any = Counted(collectives._mesh)
        collectives._mesh = counted
        own = parts[counted.rank].view(-1, 1)
        found = collectives.all_reduce(own)
        assert found.shape == own.shape
        assert torch.equal(found.view(-1), expected.to(dtype))
        most = 2 if own.nbytes >= 1 << 18 else ranks - 1
        assert counted.received <= most * own.nbytes + 64

    on_ranks(add, ranks)


@pytest.mark.parametrize("limit", [1, 5, 6, 11, 14, 20])
def test_greedy_ranks_send_their_best_and_no_logits(limit: int) -> None:
    """The tokens of one rank that has them all, also of ties, NaN and infinities, by two numbers a row and rank."""
    vocab, ranks, kernels = 14, 3, TorchBackend()
    weight = torch.randn(vocab, 4, generator=torch.Generator().manual_seed(1)).round()
    hidden = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)).round()
    hidden[3], hidden[4, 1], hidden[5] = torch.nan, torch.inf, 0.0
    expected = kernels.linear.argmax(hidden, kernels.linear.pack(weight, None, torch.float32), limit)

    def choose(collectives: GroupCollectives) -> None:
        counted: Any = Counted(collectives._mesh)
        collectives._mesh = counted
        share, first = -(-vocab // ranks), counted.rank * -(-vocab // ranks)
        own = torch.zeros(share, 4)
        own[: max(0, min(share, vocab - first))] = weight[first : first + share]
        config = SimpleNamespace(vocab_size=vocab)
        shard = Shard(counted.rank, ranks, collectives)
        build: Any = SimpleNamespace(kernels=kernels, shard=shard, config=config)
        head = LMHead(build, kernels.linear.pack(own, None, torch.float32))
        assert head.greedy(hidden, limit).tolist() == expected.tolist()
        assert counted.received == (ranks - 1) * len(hidden) * 2 * 4

    on_ranks(choose, ranks)
