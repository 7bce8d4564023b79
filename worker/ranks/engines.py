"""Meeting of ranks that no common engine knows: at the door of `--dist-init` they learn each other's addresses.

The first rank waits for all others, and answers them with the addresses of all. A rank that starts again meanwhile
replaces its earlier connection. The connections stay open while the ranks connect with each other: if one ends, its
rank or its machine is lost, and all engines start their ranks again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from common.limits import RANK_TCP_TIMEOUT_S
from worker.ranks.door import Door, Guest, knock_until_admitted
from worker.ranks.frames import FrameError, encode, messages
from worker.ranks.mesh import RankMesh, join_mesh

log = structlog.get_logger(__name__)

_ADMIT_S: Final = 0.2
_AGAIN_S: Final = 0.5
_Members = Sequence[tuple[str, int]]


def meet(host: str, port: int, rank: int, size: int, address: str, secret: str) -> RankMesh:
    """Joins the mesh of `size` ranks that meet at one address.

    Args:
        host: address of rank 0.
        port: port where rank 0 waits.
        rank: of this process.
        size: ranks in all.
        address: an address of this machine that the other ranks reach.
        secret: that all ranks prove to know.

    Raises:
        OSError: a rank has ended meanwhile, or an address cannot be listened on.
    """
    own = Door(address, 0, secret)
    with contextlib.ExitStack() as stack:
        stack.callback(own.close)
        place = (address, own.port)
        found = _gather(host, port, size, place, secret) if rank == 0 else _ask(host, port, rank, place, secret)
        members, held = found
        for sock in held:
            stack.enter_context(sock)
        # Once all ranks have joined, none watches the connections of the meeting any more.
        return join_mesh(own, members, rank, secret, lambda: _check_open(held))


def _gather(host: str, port: int, size: int, own: tuple[str, int], secret: str) -> tuple[_Members, list[socket.socket]]:
    """Waits for all other ranks, and tells them the addresses of all."""
    present: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
    others = range(1, size)
    with contextlib.closing(Door(host, port, secret)) as door:
        while len(present) < len(others):
            # Also ranks that are present: one whose machine restarted comes before its old connection ends.
            if (guest := door.admit(others, _ADMIT_S)) is not None and (place := _place_of(guest)) is not None:
                if guest.rank in present:
                    log.warning("rank of another engine connected again", rank=guest.rank, peer=guest.address)
                    present[guest.rank][0].close()
                present[guest.rank] = (guest.sock, place)
            for rank in [each for each, (sock, _) in present.items() if _has_ended(sock)]:
                # It knocks again.
                present.pop(rank)[0].close()
    members = [own, *(present[rank][1] for rank in others)]
    for rank in others:
        present[rank][0].sendall(encode(("members", members)))
    return members, [sock for sock, _ in present.values()]


def _place_of(guest: Guest) -> tuple[str, int] | None:
    guest.sock.settimeout(RANK_TCP_TIMEOUT_S)
    with contextlib.suppress(OSError, EOFError, FrameError):
        match next(messages(guest.sock, guest.reader)):
            case ("at", str(host), int(port)) if 0 < port < 1 << 16:
                return host, port
    guest.sock.close()
    return None


def _ask(host: str, port: int, rank: int, own: tuple[str, int], secret: str) -> tuple[_Members, list[socket.socket]]:
    """Tells rank 0 this rank's address, and waits for all addresses."""
    while True:
        sock, reader = knock_until_admitted(host, port, rank, secret)
        with contextlib.suppress(OSError, EOFError, FrameError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            sock.sendall(encode(("at", *own)))
            # Others may not have been started yet. Keepalive ends the wait if the machine of rank 0 is lost.
            sock.settimeout(None)
            match next(messages(sock, reader)):
                case ("members", tuple(members)):
                    stack.pop_all()
                    return members, [sock]
        time.sleep(_AGAIN_S)


def _has_ended(sock: socket.socket) -> bool:
    """True if the other side has closed its connection, since it never sends here."""
    readable, _, _ = select.select([sock], [], [], 0.0)
    return bool(readable)


def _check_open(socks: Iterable[socket.socket]) -> None:
    if any(map(_has_ended, socks)):
        raise ConnectionResetError("a rank of another engine has ended")
