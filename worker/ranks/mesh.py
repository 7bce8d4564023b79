"""Connections between the ranks of a group, on which they exchange tensors on CPUs.

Each two ranks have one connection, and each has proved to the other that it knows the secret before any other byte is
read (`worker.ranks.door`). The ports are open only until all ranks are connected. gloo would open a port for each
rank and read from whoever connects; PyTorch's wheels have no TLS for it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from common.limits import RANK_TCP_TIMEOUT_S
from worker.ranks.door import Door, allow_slow_reader, is_machine_lost, knock_until_admitted

Check = Callable[[], None]
# A byte that the knocking rank sends once it is admitted, and the door's rank sends back once it counts that rank as
# connected. Until the answer the frame reader of the knocking rank may hold no later byte, and it knocks again if the
# connection ends.
_READY = b"\x01"
_ADMIT_S = 0.2
_AGAIN_S = 0.5
_LOST_CHECK_MS = 1000


class RankMesh:
    """One rank's connections to all others of its group.

    Every rank calls the same operations in the same order, on one thread; the bytes have no frames.

    Args:
        rank: of this process.
        size: ranks in all.
        peers: connected socket of each other rank. Groups with a common rank may share sockets.

    A rank may come any time after the others; if its machine vanishes, operations fail within seconds.

    Raises:
        OSError: from every operation, when the connection to a rank is lost.
    """

    def __init__(self, rank: int, size: int, peers: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self._peers = dict(peers)
        for sock in self._peers.values():
            sock.setblocking(False)

    def part(self, members: Sequence[int]) -> RankMesh:
        """Mesh of some of the ranks, this one included, numbered in the order of `members`, on the same connections."""
        peers = {place: self._peers[rank] for place, rank in enumerate(members) if rank != self.rank}
        return RankMesh(members.index(self.rank), len(members), peers)

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, in rank order; they have one shape and dtype."""
        parts = [own if rank == self.rank else own.new_empty(own.shape) for rank in range(self.size)]
        sent = _bytes_of(own)
        self._exchange(
            dict.fromkeys(self._peers, sent), {rank: _bytes_of(parts[rank]) for rank in self._peers if sent.nbytes}
        )
        return parts

    def all_to_all(self, slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's slice of each rank; `slices` are this rank's, of one shape and dtype."""
        found = [each if rank == self.rank else each.new_empty(each.shape) for rank, each in enumerate(slices)]
        sent = {rank: _bytes_of(slices[rank]) for rank in self._peers}
        self._exchange(sent, {rank: _bytes_of(found[rank]) for rank in self._peers if sent[rank].nbytes})
        return found

    def wait_for_all(self) -> None:
        """Waits until all ranks have called this."""
        self.all_gather(torch.zeros(1))

    def close(self) -> None:
        """Ends the connections; operations of the other ranks fail."""
        for sock in self._peers.values():
            sock.close()

    def _exchange(self, sent: dict[int, memoryview], received: dict[int, memoryview]) -> None:
        """Sends and receives side by side: two ranks that only sent would both wait for room in their sockets."""
        sent = {rank: view for rank, view in sent.items() if view.nbytes}
        while sent or received:
            moved = False
            for rank, view in list(sent.items()):
                with contextlib.suppress(BlockingIOError):
                    count = self._peers[rank].send(view)
                    moved = True
                    _advance(sent, rank, view, count)
            for rank, view in list(received.items()):
                with contextlib.suppress(BlockingIOError):
                    count = self._peers[rank].recv_into(view)
                    if not count:
                        raise ConnectionResetError(f"rank {rank} has closed its connection")
                    moved = True
                    _advance(received, rank, view, count)
            if not moved:
                self._wait(sent, received)

    def _wait(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> None:
        poll = select.poll()
        for rank, sock in self._peers.items():
            events = (select.POLLOUT if rank in sent else 0) | (select.POLLIN if rank in received else 0)
            if events:
                poll.register(sock, events)
        while not poll.poll(_LOST_CHECK_MS):
            for rank, sock in self._peers.items():
                if sock.family != socket.AF_UNIX and is_machine_lost(sock):
                    raise TimeoutError(f"the machine of rank {rank} does not answer")


def _advance(views: dict[int, memoryview], rank: int, view: memoryview, count: int) -> None:
    if count == view.nbytes:
        del views[rank]
    else:
        views[rank] = view[count:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def join_mesh(door: Door, members: Sequence[tuple[str, int]], rank: int, secret: str, check: Check) -> RankMesh:
    """Connects this rank with all others, and closes its door once it is connected. Returns once all ranks are.

    Args:
        door: of this rank.
        members: host and port of each rank's door, in rank order.
        rank: of this process.
        secret: that all ranks prove to know.
        check: called while this rank waits; an error from it ends the wait.

    Raises:
        OSError: a rank has ended, or a connection broke.
    """
    peers: dict[int, socket.socket] = {}
    later = set(range(rank + 1, len(members)))
    with contextlib.ExitStack() as stack:
        stack.callback(door.close)
        for other, (host, port) in enumerate(members[:rank]):
            peers[other] = stack.enter_context(_knock_until_joined(host, port, rank, secret, check))
        while missing := later - peers.keys():
            check()
            guest = door.admit(missing, _ADMIT_S)
            if guest is not None:
                # Without READY the connection is closed, and that rank knocks again.
                with contextlib.suppress(OSError), contextlib.ExitStack() as kept:
                    sock = kept.enter_context(guest.sock)
                    sock.settimeout(RANK_TCP_TIMEOUT_S)
                    if sock.recv(1) == _READY:
                        sock.sendall(_READY)
                        peers[guest.rank] = sock
                        stack.push(kept.pop_all())
        door.close()
        mesh = RankMesh(rank, len(members), peers)
        # Fails on all ranks if one has ended, or its connection to one of them.
        mesh.wait_for_all()
        for sock in peers.values():
            # Ranks exchange more than a socket's buffer holds, and one may come minutes after another while they load.
            allow_slow_reader(sock)
        stack.pop_all()
    return mesh


def _knock_until_joined(host: str, port: int, rank: int, secret: str, check: Check) -> socket.socket:
    """Connects to the door of another rank until that rank counts this one as connected."""
    while True:
        sock, _ = knock_until_admitted(host, port, rank, secret, check)
        with contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            with contextlib.suppress(OSError):
                sock.sendall(_READY)
            # No limit: a rank that gave up might already be counted. A closed connection ends the wait.
            while not select.select([sock], [], [], _ADMIT_S)[0]:
                check()
            with contextlib.suppress(OSError):
                if sock.recv(1) == _READY:
                    stack.pop_all()
                    return sock
        time.sleep(_AGAIN_S)
