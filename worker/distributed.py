"""What ranks compute together, on torch.distributed: gloo between CPUs, NCCL (RCCL on ROCm) between GPUs.

A sum has one order, that of the ranks, whatever the size of the tensor and the number of ranks: gloo's own all_reduce
cuts a tensor into chunks by its size and starts each at another rank, so that a row's bits depend on the batch
(design-details section 1: 3 patterns with 3 ranks, 5 with 8). So every rank gathers all parts and adds them itself.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch
import torch.distributed

# Which library carries tensors of a device; torch names RCCL "nccl" too. What is needed of them has no stubs.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_dist: Any = torch.distributed


def open_store(host: str) -> tuple[Any, int]:
    """A store where ranks find each other, which this rank holds, and the port that it got."""
    store = _dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, int(store.port)


def reach_store(host: str, port: int) -> Any:
    """The store that another rank holds."""
    return _dist.TCPStore(host, port, is_master=False, wait_for_workers=False)


def join(store: Any, rank: int, size: int, address: str, timeout_s: float, device: str = "cpu") -> GroupCollectives:
    """The collectives of `size` ranks; returns when all have joined.

    Args:
        store: the one that all of them use.
        rank: of this process.
        size: ranks in all.
        address: an address of this machine that the other ranks reach; gloo listens there.
        timeout_s: after which an operation that a rank does not take part in fails.
        device: type of the tensors, a key of BACKENDS.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if BACKENDS[device] == "gloo":
        options = _dist.ProcessGroupGloo._Options()
        # Without an address gloo takes the one of the host's name, which other machines may not reach.
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=socket.gethostbyname(address))]
        options._timeout = timeout
        return GroupCollectives(_dist.ProcessGroupGloo(store, rank, size, options))
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return GroupCollectives(_dist.ProcessGroupNCCL(store, rank, size, options))


class GroupCollectives:
    """Collectives of a process group; every rank gets the same bits."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, added in float32 from rank 0 on and rounded once."""
        first, *others = self._parts(x)
        total = first.to(torch.float32)
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` [..., N], side by side along the last dimension in the order of ranks."""
        return torch.cat(self._parts(x), dim=-1)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.allgather([parts], [own]).wait()
        return parts
