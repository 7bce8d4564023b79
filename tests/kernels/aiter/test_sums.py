"""AITER's sums over ranks, with a stand-in in its place: two processes that join as a worker's ranks do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.covering import SAMPLED
from tests.e2e.service import free_port
from tests.kernels import verify_aiter_sums
from tests.kernels.aiter.fake_aiter import lay
from worker.ranks.collectives import in_order


@pytest.mark.slow
@pytest.mark.parametrize("tag", [pytest.param("0.1.13", marks=SAMPLED), "0.1.20.post1"])
def test_sums_over_ranks(tag: str, tmp_path: Path) -> None:
    """What they check is in rank.py."""
    lay(tmp_path, tag)
    command = [sys.executable, "-m", "tests.kernels.aiter.rank", str(tmp_path)]
    port = str(free_port())
    ranks = [subprocess.Popen([*command, str(rank), port], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def test_sums_are_not_verified_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    size = torch.cuda.device_count() + 1
    assert verify_aiter_sums.main([str(size)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {size} ranks need as many GPUs; PyTorch sees {size - 1}")


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["", ""], 0),
        (["", "os.kill(os.getpid(), signal.SIGKILL)"], 9),
        (["os.kill(os.getpid(), signal.SIGSEGV)", "signal.pause()"], 11),
        (["signal.pause()", "sys.exit(2)"], 2),
    ],
)
def test_rank_with_failing_exit_is_not_verified(ends: list[str], code: int) -> None:
    """The other rank does not wait for the failed one."""
    ranks = [subprocess.Popen([sys.executable, "-c", f"import os, signal, sys; {end}"]) for end in ends]
    assert verify_aiter_sums.exit_code(ranks) == code
    waited_for = [rank.wait(60) for rank, end in zip(ranks, ends, strict=True) if end == "signal.pause()"]
    assert set(waited_for) <= {-signal.SIGKILL}


def test_ranks_in_order() -> None:
    assert in_order([[5, 0], [5, 1], [5, 2]])
    for places in ([[5, 0], [6, 1]], [[5, 1], [5, 0]], [[5, 0], [5, 0]], [[5, 2], [5, 3]]):
        assert not in_order(places)
