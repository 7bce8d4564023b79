"""Meshes of ranks: who gets in, what they exchange, and how they notice a lost rank."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.limits import RANK_TCP_TIMEOUT_S
from tests.e2e.service import free_port
from tests.meshes import local_meshes
from tests.unit.worker.ranks.test_door import stranger_bytes
from worker.ranks.door import Door, knock, knock_until_admitted
from worker.ranks.engines import meet
from worker.ranks.frames import encode
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


def test_second_process_replaces_a_rank_whose_machine_vanished() -> None:
    """Former fault: rank 0 kept a connection that had ended without a FIN, and refused the rank's next process."""
    port = free_port()
    with ThreadPoolExecutor(SIZE) as pool, contextlib.ExitStack() as stack, capture_logs() as lines:
        first = pool.submit(meet, HOST, port, 0, SIZE, HOST, SECRET)
        lost, _ = knock_until_admitted(HOST, port, 1, SECRET)
        stack.enter_context(lost).sendall(encode(("at", HOST, 1)))
        again = pool.submit(meet, HOST, port, 1, SIZE, HOST, SECRET)
        # Rank 0 closes the connection that the new one replaces.
        lost.settimeout(60)
        assert not lost.recv(1)
        others = (again, pool.submit(meet, HOST, port, 2, SIZE, HOST, SECRET))
        meshes = [each.result() for each in (first, *others)]
    assert [line["rank"] for line in lines if line["event"].endswith("connected again")] == [1]
    gathered = on_each(meshes, lambda mesh: torch.cat(mesh.all_gather(torch.tensor([mesh.rank]))).tolist())
    assert gathered == [[0, 1, 2]] * SIZE


def test_rank_knocks_again_until_the_door_counts_it() -> None:
    """Former fault: a welcomed rank whose READY came late counted itself as connected, and the door waited for ever."""

    def admitted() -> socket.socket:
        while (guest := door.admit({1}, 0.1)) is None:
            assert time.monotonic() < end, "the rank does not knock again"
        guest.sock.settimeout(60)
        return guest.sock

    end = time.monotonic() + 60
    door, own = Door(HOST, 0, SECRET), Door(HOST, 0, SECRET)
    members = [(HOST, door.port), (HOST, own.port)]
    with contextlib.closing(door), ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join_mesh, own, members, 1, SECRET, lambda: None)
        admitted().close()
        with admitted() as sock:
            assert sock.recv(1) == b"\x01"
            sock.sendall(b"\x01" + bytes(4))
            joined.result().close()


def test_no_rank_leaves_the_join_before_all_are_connected() -> None:
    """A rank whose connection ends after the door has counted it fails the join of the others."""
    door = Door(HOST, 0, SECRET)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join_mesh, door, [(HOST, door.port), (HOST, 1)], 0, SECRET, lambda: None)
        sock, _ = knock_until_admitted(HOST, door.port, 1, SECRET)
        with sock:
            sock.sendall(b"\x01")
            assert sock.recv(1) == b"\x01"
        with pytest.raises(OSError, match=r"rank 1 has closed its connection|Broken pipe|reset"):
            joined.result()


def test_mesh_notices_vanished_machines_but_not_slow_ranks() -> None:
    """TCP_USER_TIMEOUT would end the connection to a rank that reads later than that."""
    meshes = connected(2)
    for mesh in meshes:
        (sock,) = mesh._peers.values()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        mesh.close()


@pytest.mark.slow
def test_exchange_waits_for_a_rank_that_comes_late() -> None:
    """Former fault: after 8 s with bytes that the other rank did not read, both ranks lost the connection."""
    one, other = connected(2)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(one.all_gather, torch.ones(3_000_000))
        # Any duration must pass; shorter ones do not reproduce the fault.
        time.sleep(2 * RANK_TCP_TIMEOUT_S)
        assert torch.equal(other.all_gather(torch.zeros(3_000_000))[0], early.result()[0])
    one.close()
    other.close()


def test_join_ends_when_its_check_fails() -> None:
    def fail() -> None:
        raise ConnectionResetError("a rank of another engine has ended")

    door = Door(HOST, 0, SECRET)
    with pytest.raises(ConnectionResetError, match="of another engine"):
        join_mesh(door, [(HOST, door.port), (HOST, 1)], 0, SECRET, fail)
