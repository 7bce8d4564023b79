"""Compares AITER's sums over the GPUs of this machine with those in the order of ranks: what no machine of ours can.

    python -m tests.kernels.verify_aiter_sums [RANKS]

RANKS is 2 unless it is given; each is a process with a GPU. Prints the relative errors, eager and in a captured step,
and ends with 1 if one is too large, if ranks have different bits, or if the sums are not AITER's; with another number
than 0 if a rank fails or is killed. tests/kernels/aiter/test_sums.py runs the same
comparisons over a stand-in.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from kernels.aiter.backend import AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.interface import StepGraphs
from kernels.triton_backend.backend import TritonBackend
from tests.e2e.service import free_port
from tests.kernels.verify_aiter import LARGEST_ERROR, Comparison
from worker.model.sharding import Collectives
from worker.ranks.collectives import GroupCollectives
from worker.ranks.engines import meet

HOST = "127.0.0.1"
HIDDEN = 4096
# The last is larger than what AITER adds up itself.
ROWS = (1, 33, 2048, 16_384)


def join_rank(rank: int, size: int, port: int) -> GroupCollectives:
    """The collectives of one of `size` processes, which meet at `port`."""
    return GroupCollectives(meet(HOST, port, rank, size, HOST, ""), HOST)


def compared(
    collectives: Collectives, graphs: StepGraphs, rank: int, size: int, device: torch.device, rows: Iterable[int]
) -> Iterator[Comparison]:
    """Sums of bfloat16 [rows, HIDDEN], eager and captured. All ranks must take all."""
    for count in rows:
        parts = [_draw(count, each) for each in range(size)]
        expected = torch.stack(parts).float().sum(0)
        own = parts[rank].to(device)
        yield _comparison(f"sum of {count} rows", collectives, collectives.all_reduce(own.clone()), expected)
        given = torch.zeros_like(own)
        with collectives.capturing():
            replay = graphs.capture(partial(collectives.all_reduce, given))
        given.copy_(own)
        yield _comparison(f"captured sum of {count} rows", collectives, replay(), expected)


def _draw(rows: int, rank: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def _comparison(name: str, collectives: Collectives, found: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """The bits of all ranks must be the same: each samples by itself."""
    everyone = collectives.all_gather(found).view(len(found), -1, HIDDEN)
    if not torch.equal(everyone, everyone[:, :1].expand_as(everyone)):
        return Comparison(name, float("inf"), LARGEST_ERROR, "ranks have different bits")
    error = (found.cpu().float() - expected).norm() / expected.norm()
    return Comparison(name, float(error), LARGEST_ERROR)


def verify_rank(rank: int, size: int, port: int) -> int:
    """One rank's part; the first prints. Returns the exit code."""
    torch.cuda.set_device(rank)
    collectives = join_rank(rank, size, port)
    try:
        fallback = TritonBackend(batch_invariant=False)
        backend = AiterBackend(fallback, AiterLibrary.load(SINCE), fallback.settings)
    except (AiterUnavailableError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before = backend.numerics
    collectives.use(backend)
    if backend.numerics == before:
        print("error: the sums are not AITER's; the reason is above", file=sys.stderr)
        return 1
    passed = True
    for comparison in compared(collectives, fallback.graphs, rank, size, backend.device, ROWS):
        passed &= comparison.passed
        if rank == 0:
            print(comparison, flush=True)
    collectives.close()
    return 0 if passed else 1


def main(arguments: list[str]) -> int:
    """Starts the ranks, or is one. Returns the exit code."""
    if len(arguments) == 3:
        return verify_rank(*map(int, arguments))
    size, port = int(arguments[0]) if arguments else 2, free_port()
    if torch.cuda.device_count() < size:
        print(f"error: {size} ranks need as many GPUs; PyTorch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "tests.kernels.verify_aiter_sums"]
    ranks = [subprocess.Popen([*command, str(rank), str(size), str(port)]) for rank in range(size)]
    return exit_code(ranks)


def exit_code(ranks: list[subprocess.Popen[bytes]]) -> int:
    """0 if all end so. Else of one that does not, as a positive number; the others, which may wait for it, are killed.

    That of a rank that is killed is the signal's number.
    """
    try:
        while not any(codes := [rank.poll() for rank in ranks]) and None in codes:
            time.sleep(0.05)
        return max(abs(code or 0) for code in codes)
    finally:
        for rank in ranks:
            rank.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
