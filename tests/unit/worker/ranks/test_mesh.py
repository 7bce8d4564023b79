"""Meshes of ranks: who gets in, what they exchange, and how they notice a lost rank."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.e2e.service import free_port
from tests.meshes import local_meshes
from tests.unit.worker.ranks.test_door import stranger_bytes
from worker.ranks.door import Door, knock
from worker.ranks.engines import meet
from worker.ranks.mesh import RankMesh, join_mesh

HOST, SECRET = "127.0.0.1", "a secret of the test"
SIZE = 3


def connected(size: int, rnd: random.Random | None = None) -> list[RankMesh]:
    """Meshes of ranks that are threads; with `rnd`, strangers send bytes to all doors meanwhile."""
    doors = [Door(HOST, 0, SECRET) for _ in range(size)]
    members = [(HOST, door.port) for door in doors]
    over = threading.Event()

    def disturb(frames: list[bytes]) -> None:
        for data in frames:
            if over.is_set():
                return
            for _, port in members:
                with contextlib.suppress(OSError), socket.create_connection((HOST, port), 20) as sock:
                    sock.sendall(data)

    with ThreadPoolExecutor(size + 2) as pool:
        if rnd is not None:
            # Before any rank knocks, so that each door has seen some.
            disturb([stranger_bytes(rnd) for _ in range(20)])
            strangers = [pool.submit(disturb, [stranger_bytes(rnd) for _ in range(300)]) for _ in range(2)]
        found = list(pool.map(lambda r: join_mesh(doors[r], members, r, SECRET, lambda: None), range(size)))
        over.set()
        if rnd is not None:
            for each in strangers:
                each.result()
    return found


def on_each(meshes: list[RankMesh], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(work, meshes))


def test_ranks_connect_past_strangers_and_close_their_ports() -> None:
    with capture_logs() as lines:
        meshes = connected(SIZE, random.Random(5))
    assert any(line["event"].startswith("connection refused") for line in lines)
    gathered = on_each(meshes, lambda mesh: mesh.all_gather(torch.tensor([mesh.rank])))
    assert [torch.cat(parts).tolist() for parts in gathered] == [[0, 1, 2]] * SIZE
    for mesh in meshes:
        mesh.close()


def test_closed_door_of_a_joined_rank_refuses_connections() -> None:
    doors = [Door(HOST, 0, SECRET) for _ in range(2)]
    members = [(HOST, door.port) for door in doors]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda r: join_mesh(doors[r], members, r, SECRET, lambda: None), range(2)))
    for host, port in members:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), 20)
    for mesh in made:
        mesh.close()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_exchange_equal_bytes_at_any_size(size: int) -> None:
    """Sizes far above a socket's buffer, at which two ranks that only send would wait for each other."""
    meshes, rnd = local_meshes(size), random.Random(size)
    for numbers in (0, 1, rnd.randrange(2, 5000), 3_000_000):
        generator = torch.Generator().manual_seed(numbers)
        given = torch.randn(size, size, max(1, numbers // size), generator=generator)[..., :numbers].to(torch.bfloat16)
        gathered = on_each(meshes, lambda mesh, given=given: mesh.all_gather(given[mesh.rank]))
        assert all(torch.equal(torch.stack(parts), given) for parts in gathered)
        exchanged = on_each(meshes, lambda mesh, given=given: mesh.all_to_all(list(given[mesh.rank])))
        assert all(torch.equal(torch.stack(parts), given[:, rank]) for rank, parts in enumerate(exchanged))


def test_part_of_a_mesh_numbers_its_members() -> None:
    meshes = local_meshes(4)
    parts = [mesh.part(range(mesh.rank % 2, 4, 2)) for mesh in meshes]
    assert [(part.rank, part.size) for part in parts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    gathered = on_each(parts, lambda part: torch.cat(part.all_gather(torch.tensor([part.rank]))).tolist())
    assert gathered == [[0, 1]] * 4


def test_lost_rank_ends_the_exchange_of_others() -> None:
    meshes = local_meshes(SIZE)
    meshes[2].close()
    for mesh in meshes[:2]:
        with pytest.raises(OSError, match=r"rank 2 has closed its connection|Broken pipe|reset"):
            mesh.all_gather(torch.zeros(4))


def test_engines_meet_past_a_rank_that_starts_again() -> None:
    """Rank 1 ends while the others are waited for; its next process is admitted."""
    port = free_port()

    def join(rank: int) -> RankMesh:
        return meet(HOST, port, rank, SIZE, HOST, SECRET)

    with ThreadPoolExecutor(SIZE) as pool:
        first = pool.submit(join, 0)
        while True:
            with contextlib.suppress(OSError, EOFError), socket.create_connection((HOST, port), 20) as sock:
                knock(sock, 1, SECRET)
                break
        others = [pool.submit(join, rank) for rank in (1, 2)]
        meshes = [each.result() for each in (first, *others)]
    gathered = on_each(meshes, lambda mesh: torch.cat(mesh.all_gather(torch.tensor([mesh.rank]))).tolist())
    assert gathered == [[0, 1, 2]] * SIZE


def test_join_ends_when_its_check_fails() -> None:
    def fail() -> None:
        raise ConnectionResetError("a rank of another engine has ended")

    door = Door(HOST, 0, SECRET)
    with pytest.raises(ConnectionResetError, match="of another engine"):
        join_mesh(door, [(HOST, door.port), (HOST, 1)], 0, SECRET, fail)
