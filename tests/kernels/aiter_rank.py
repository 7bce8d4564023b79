"""One of two ranks whose sums are AITER's, of which a stand-in is in FOLDER (fake_aiter).

`python -m tests.kernels.aiter_rank FOLDER RANK PORT`. It joins the other one as a worker's rank does, and ends with 0
if sums were AITER's where they may be, and ours where a row's bits may not depend on the batch.
"""

from __future__ import annotations

import sys

import torch

from kernels.aiter_backend import SINCE, AiterBackend
from kernels.aiter_library import AiterLibrary
from kernels.torch_backend import TorchBackend
from kernels.triton_backend.target import TARGETS, Settings
from worker.distributed import GroupCollectives, join, open_store, reach_store

HOST, SIZE, TIMEOUT_S = "127.0.0.1", 2, 60.0


def main() -> None:
    """Runs the rank."""
    folder, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, folder)
    library = AiterLibrary.load(SINCE)
    store = open_store(HOST, port)[0] if rank == 0 else reach_store(HOST, port)
    collectives = join(store, rank, SIZE, HOST, TIMEOUT_S)
    check_sums(collectives, rank, captured=3.0)
    for batch_invariant in (True, False):
        backend = AiterBackend(TorchBackend(), library, Settings(TARGETS["gfx942"], batch_invariant))
        before = backend.numerics
        collectives.use(backend)
        # The stand-in's captured sums are zeros, as AITER's are until a step is replayed.
        check_sums(collectives, rank, captured=3.0 if batch_invariant else 0.0)
        assert (backend.numerics == before) == batch_invariant
        assert torch.distributed.is_initialized() != batch_invariant
    collectives.close()
    collectives.close()
    assert not torch.distributed.is_initialized()
    check_sums(collectives, rank, captured=3.0)


def check_sums(collectives: GroupCollectives, rank: int, captured: float) -> None:
    own = torch.full((3, 8), rank + 1.0, dtype=torch.bfloat16)
    assert collectives.all_reduce(own.T).eq(3.0).all()
    assert collectives.all_reduce(own[:0]).shape == (0, 8)
    with collectives.capturing():
        assert collectives.all_reduce(own).eq(captured).all()
    assert collectives.all_reduce(own).eq(3.0).all()
    assert collectives.all_gather(own)[0].tolist() == [1.0] * 8 + [2.0] * 8


if __name__ == "__main__":
    main()
