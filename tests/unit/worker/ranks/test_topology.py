"""Placement of ranks on machines, and refused topologies."""

from __future__ import annotations

import pytest

from common.errors import InvalidFieldError
from worker.ranks.topology import Topology, threads_per_rank


def test_ranks_of_machines_follow_each_other() -> None:
    nodes = [Topology(6, 3, node, "tcp://10.0.0.1:4100") for node in range(3)]
    assert [rank for node in nodes for rank in node.local_ranks] == list(range(6))
    assert [len(node.local_ranks) for node in nodes] == [2, 2, 2]
    assert nodes[1].remote_ranks == {0, 1, 4, 5}
    assert nodes[0].meeting_point == ("10.0.0.1", 4100)
    assert Topology(2, 2, 0, "tcp://[fd00::1]:4100").meeting_point == ("fd00::1", 4100)
    assert Topology(2).remote_ranks == set()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((0,), "tp_size"),
        ((3, 2, 0, "tcp://a:1"), "tp_size"),
        ((2, 0), "nnodes"),
        ((2, 2, 2, "tcp://a:1"), "node_rank"),
        ((2, 2, 0), "dist_init"),
        ((2, 2, 0, "a:1"), "dist_init"),
        ((2, 2, 0, "tcp://a"), "dist_init"),
        ((2, 2, 0, "tcp://a:0"), "dist_init"),
        ((2, 2, 0, "tcp://a:70000"), "dist_init"),
        ((2, 1, 0, "tcp://a:1"), "dist_init"),
    ],
)
def test_invalid_topology_is_refused_by_field(given: tuple[int, int, int, str], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        Topology(*given)
    assert str(refused.value).startswith(f"{field} is ")


def test_engines_of_one_machine_each() -> None:
    engine = Topology(2, 1, 0, "tcp://10.0.0.1:4100", 2, 1)
    assert engine.has_ranks
    assert (engine.local_ranks, engine.remote_ranks) == (range(2), set())
    assert Topology(1, 1, 0, "tcp://10.0.0.1:4100", 2, 0).has_ranks
    assert not Topology().has_ranks
    for given, field in (((1, 1, 0, "", 2, 0), "dist_init"), ((1, 1, 0, "tcp://a:1", 2, 2), "dp_rank")):
        with pytest.raises(InvalidFieldError, match=f"^{field} is "):
            Topology(*given)
    with pytest.raises(InvalidFieldError, match=r"^dp_size is 2; valid: 1 when nnodes is more than 1"):
        Topology(2, 2, 0, "tcp://a:1", 2, 0)


def test_ranks_share_the_threads_of_their_machine() -> None:
    assert [threads_per_rank(8, ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
