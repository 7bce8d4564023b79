"""Collective operations of ranks: over their own connections between CPUs, by NCCL (RCCL on ROCm) between GPUs.

A sum has one order, that of the ranks, whatever the size of the tensor and the number of ranks. An all_reduce that
cuts a tensor into chunks by its size and starts each at another rank, as gloo's does, lets a row's bits depend on the
batch (docs/explanation/determinism.md: 3 patterns with 3 ranks, 5 with 8). So every rank gathers all parts and adds
them itself. Of large tensors it adds the parts of its own slice and then gathers the slices: each number is added in
the same order. Kernels that may look at the batch and have a faster way add up themselves (`KernelBackend.join_ranks`).
"""

from __future__ import annotations

import datetime
import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from kernels.interface import KernelBackend, Ranks, RankSums
from worker.ranks.door import listen
from worker.ranks.mesh import RankMesh

# The parts used here have no stubs.
_dist: Any = torch.distributed
# Timeout of operations between GPUs and of their store; the engine ends ranks that hang long before.
_TIMEOUT = datetime.timedelta(hours=1)
# Bytes from which more than two ranks add slices: less crosses then, but in two turns.
_SLICED_FROM = 1 << 18


def open_store(host: str, port: int = 0) -> tuple[Any, int]:
    """Opens a store on `host` in which ranks find each other. Returns the store and its port.

    Without `master_listen_fd` torch would listen on all interfaces, whatever `host` is.
    """
    listener = listen(host, port)
    port = int(listener.getsockname()[1])
    store = _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )
    return store, port


def reach_store(host: str, port: int) -> Any:
    """Connects to the store of another rank.

    Raises:
        RuntimeError: it cannot be reached.
    """
    return _dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)


def address_towards(host: str) -> str:
    """Address of this machine on the route to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing; only looks up the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


class PeerLostError(Exception):
    """A rank of the group is gone, or the network between them broke."""


class GroupCollectives:
    """Collectives of ranks; every rank gets the same bits.

    Args:
        mesh: connections of the group, for tensors on CPUs.
        host: address of rank 0, for the store of its GPUs, which no group of CPUs opens.

    Raises:
        PeerLostError: from every operation.
    """

    def __init__(self, mesh: RankMesh, host: str) -> None:
        self._mesh = mesh
        self._host = host
        self._sums: RankSums | None = None

    @cached_property
    def _gpus(self) -> Any:
        # torch names RCCL "NCCL" too.
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return _dist.ProcessGroupNCCL(self._open_store(), self._mesh.rank, self._mesh.size, options)

    def _open_store(self) -> Any:
        """A store for what GPUs tell each other; all ranks open it at once."""
        store, port = (None, 0) if self._mesh.rank else open_store(self._host)
        port = int(self.all_gather(torch.tensor([port]))[0])
        return reach_store(self._host, port) if store is None else store

    def use(self, kernels: KernelBackend) -> bool:
        """Lets a back end add across ranks if it can; True if it does. Every rank has the same back end."""
        rank, size = self._mesh.rank, self._mesh.size
        # A CPU has no number, and every rank may be on it.
        number = rank if kernels.device.index is None else kernels.device.index
        places = self.all_gather(torch.tensor([_machine(), number])).view(size, 2)
        self._sums = kernels.join_ranks(Ranks(rank, size, self._open_store, in_order(places.tolist())))
        return self._sums is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' `x`: by the kernels, or in float32 from rank 0 on and rounded once."""
        if self._sums is not None:
            with _with_peers("sums over ranks failed"):
                return self._sums.all_reduce(x)
        size = self._mesh.size
        if size > 2 and x.nbytes >= _SLICED_FROM:
            slices = _in_order_of_ranks(self._slices(x, size)).to(x.dtype)
            return self.all_gather(slices)[: x.numel()].view(x.shape)
        return _in_order_of_ranks(self._parts(x)).to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` [..., N], concatenated along the last dimension in rank order."""
        return torch.cat(self._parts(x), dim=-1)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager during the capture of steps; errors of the steps pass unchanged."""
        with ExitStack() as stack:
            if self._sums is not None:
                with _with_peers("sums over ranks failed"):
                    stack.enter_context(self._sums.capturing())
            yield
            with _with_peers("sums over ranks failed"):
                stack.close()

    def close(self) -> None:
        """Ends the kernels' operations between ranks, once all ranks have called it and their devices have finished.

        A rank's device reads the memory of the others, so none may give it up while another one still computes.
        """
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.synchronize()
            self.all_gather(torch.zeros(1))
            sums.close()

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        own = x.contiguous()
        with _with_peers("a rank that it computes with is gone"):
            if own.device.type == "cpu":
                return self._mesh.all_gather(own)
            parts = [torch.empty_like(own) for _ in range(self._mesh.size)]
            self._gpus.allgather([parts], [own]).wait()
            return parts

    def _slices(self, x: torch.Tensor, size: int) -> list[torch.Tensor]:
        """This rank's slice of each rank's `x`, all of one length."""
        own = x.reshape(-1)
        own = torch.nn.functional.pad(own, (0, -own.numel() % size))
        with _with_peers("a rank that it computes with is gone"):
            if own.device.type == "cpu":
                return self._mesh.all_to_all(own.chunk(size))
            slices = torch.empty_like(own)
            self._gpus.alltoall_base(slices.view(torch.uint8), own.view(torch.uint8), [], []).wait()
            return list(slices.chunk(size))


def _in_order_of_ranks(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum in float32, from rank 0 on."""
    total = parts[0].to(torch.float32, copy=True)
    for other in parts[1:]:
        total.add_(other)
    return total


@contextmanager
def _with_peers(failed: str) -> Iterator[None]:
    """Reports a failure in the block as the loss of another rank, its most likely cause, except a lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        raise PeerLostError(f"{failed}: {error}") from error


def in_order(places: list[list[int]]) -> bool:
    """True if all ranks run on one host and rank i uses device i; `places` has host and device of each rank."""
    return all(place == [places[0][0], rank] for rank, place in enumerate(places))


def _machine() -> int:
    """Number of the running machine, equal in all of its processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text("ascii") if boot.exists() else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
