"""One of two ranks whose sums are AITER's, of which a stand-in is in FOLDER (fake_aiter).

`python -m tests.kernels.aiter.rank FOLDER RANK PORT`. It joins the other one as a worker's rank does, and ends with 0
if sums were AITER's where they may be, and ours where a row's bits may not depend on the batch.
"""

from __future__ import annotations

import os
import sys

import torch
from structlog.testing import capture_logs

from kernels.aiter.backend import SUM_VARIABLES, AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary
from kernels.interface import Ranks
from kernels.torch_backend.backend import TorchBackend
from kernels.triton_backend.graphs import TritonGraphs
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels.verify_aiter_sums import compared, join_rank
from worker.model.sharding import Alone
from worker.ranks.collectives import GroupCollectives

SIZE, CPU = 2, torch.device("cpu")


def main() -> None:
    folder, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, folder)
    library = AiterLibrary.load(SINCE)
    collectives = join_rank(rank, SIZE, port)
    check_sums(collectives, rank, captured=3.0)
    for batch_invariant in (True, False):
        backend = AiterBackend(TorchBackend(), library, Settings(TARGETS["gfx942"], batch_invariant))
        before = backend.numerics
        collectives.use(backend)
        # The stand-in's sums are zeros during capture, as AITER's are until the captured step is replayed.
        check_sums(collectives, rank, captured=3.0 if batch_invariant else 0.0)
        assert (backend.numerics == before) == batch_invariant
        assert torch.distributed.is_initialized() != batch_invariant
        check_variables(backend, batch_invariant)
    comparisons = list(compared(collectives, TritonGraphs(CPU), rank, SIZE, CPU, rows=(1, 33)))
    assert [comparison for comparison in comparisons if not comparison.passed] == []
    assert len(comparisons) == 4
    for wrong in (Wrong(collectives, 2.0), Wrong(collectives, 1.0 + rank)):
        assert not any(each.passed for each in compared(wrong, TritonGraphs(CPU), rank, SIZE, CPU, rows=(1,)))
    check_refusals(library)
    collectives.close()
    collectives.close()
    assert not torch.distributed.is_initialized()
    check_sums(collectives, rank, captured=3.0)


def check_variables(backend: AiterBackend, batch_invariant: bool) -> None:
    """Environment variables that affect AITER's sums are part of the numerics class if AITER sums."""
    for name in SUM_VARIABLES:
        before = backend.numerics
        os.environ[name] = "1"
        assert (backend.numerics == before) == batch_invariant
        del os.environ[name]


def check_refusals(library: AiterLibrary) -> None:
    """Ranks that AITER does not add up over; the log says why, once."""
    backend = AiterBackend(TorchBackend(), library, Settings(TARGETS["gfx942"], batch_invariant=False))
    with capture_logs() as logs:
        for ranks in (Ranks(0, 3, dict, True), Ranks(0, 2, dict, False), Ranks(1, 2, dict, False)):
            assert backend.join_ranks(ranks) is None
    assert [(entry["operation"], entry["reason"]) for entry in logs] == [
        ("all_reduce", "AITER adds up over 2, 4, 6 or 8 ranks, not 3"),
        ("all_reduce", "AITER adds up over ranks of one machine, each on the GPU of its number"),
    ]


class Wrong(Alone):
    """Multiplies sums."""

    def __init__(self, collectives: GroupCollectives, factor: float) -> None:
        self._collectives = collectives
        self._factor = factor

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums like Collectives, times a factor."""
        return self._collectives.all_reduce(x) * self._factor

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._collectives.all_gather(x)


def check_sums(collectives: GroupCollectives, rank: int, captured: float) -> None:
    """What is added up and gathered, outside of a capture and within."""
    own = torch.full((3, 8), rank + 1.0, dtype=torch.bfloat16)
    assert collectives.all_reduce(own.T).eq(3.0).all()
    assert collectives.all_reduce(own[:0]).shape == (0, 8)
    with collectives.capturing():
        assert collectives.all_reduce(own).eq(captured).all()
    assert collectives.all_reduce(own).eq(3.0).all()
    assert collectives.all_gather(own)[0].tolist() == [1.0] * 8 + [2.0] * 8


if __name__ == "__main__":
    main()
