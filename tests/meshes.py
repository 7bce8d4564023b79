"""Meshes of ranks that are threads of one process."""

from __future__ import annotations

import socket
from itertools import combinations

from worker.ranks.mesh import RankMesh


def local_meshes(size: int) -> list[RankMesh]:
    """The mesh of each rank, in rank order."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in combinations(range(size), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    return [RankMesh(rank, size, own) for rank, own in enumerate(peers)]
