"""Ranks of a worker, and where they run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from common.params.checks import require

_ADDRESS = re.compile(r"tcp://(\[[^\]]+\]|[^:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Topology:
    """Tensor-parallel ranks on one or several machines: equally many on each, numbered machine by machine.

    Attributes:
        tp_size: ranks that share the model.
        nnodes: machines.
        node_rank: of this machine; the engine is on machine 0.
        dist_init: `tcp://HOST:PORT`, where machine 0 waits for the ranks of the others, or engine 0 for those of the
            other engines; empty without others.
        dp_size: engines in lockstep, each a worker of its own.
        dp_rank: of this engine.
        dist_secret: that ranks of other machines and engines prove at `dist_init`; empty admits any rank.

    Raises:
        InvalidFieldError: they do not fit together.
    """

    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init: str = ""
    dp_size: int = 1
    dp_rank: int = 0
    dist_secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        require(self.tp_size >= 1, "tp_size", self.tp_size, "at least 1")
        require(self.nnodes >= 1, "nnodes", self.nnodes, "at least 1")
        require(self.tp_size % self.nnodes == 0, "tp_size", self.tp_size, f"a multiple of nnodes {self.nnodes}")
        require(0 <= self.node_rank < self.nnodes, "node_rank", self.node_rank, f"0 to {self.nnodes - 1}")
        require(self.dp_size >= 1, "dp_size", self.dp_size, "at least 1")
        require(0 <= self.dp_rank < self.dp_size, "dp_rank", self.dp_rank, f"0 to {self.dp_size - 1}")
        require(self.nnodes == 1 or self.dp_size == 1, "dp_size", self.dp_size, "1 when nnodes is more than 1")
        valid = "tcp://HOST:PORT, where machine 0 or engine 0 is reached"
        if self.nnodes > 1 or self.dp_size > 1:
            match = _ADDRESS.fullmatch(self.dist_init)
            require(match is not None and 0 < int(match[2]) < 1 << 16, "dist_init", self.dist_init, valid)
        else:
            require(not self.dist_init, "dist_init", self.dist_init, "nothing with one machine and one engine")

    @property
    def has_ranks(self) -> bool:
        """True if the model runs in separate processes."""
        return self.tp_size > 1 or self.dp_size > 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each machine."""
        return self.tp_size // self.nnodes

    @property
    def local_ranks(self) -> range:
        """Ranks on this machine."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)

    @property
    def remote_ranks(self) -> set[int]:
        """Ranks on other machines."""
        return set(range(self.tp_size)) - set(self.local_ranks)

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Host and port of `dist_init`; loopback and 0 on one machine."""
        match = _ADDRESS.fullmatch(self.dist_init)
        return ("127.0.0.1", 0) if match is None else (match[1].strip("[]"), int(match[2]))


def threads_per_rank(threads: int | None, ranks: int) -> int:
    """A rank's share of the threads of a machine, so that together they use each core once.

    None takes all cores or, as PyTorch does, as many as OMP_NUM_THREADS says.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    default = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0))
    return max(1, (threads or default) // ranks)
