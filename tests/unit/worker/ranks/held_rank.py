"""A rank whose tokens come when a test says, as they do from a device: `python -m tests.unit.worker.ranks.held_rank
...`.

It is `worker.ranks.rank_process` but for that. In the folder HELD_STEPS a file `hold` begins it, `launched-N` says that
step N has been launched, and `come-N` lets its tokens come; with the content `lost` they never will.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.torch_backend.sampling import TorchSamplingOps
from worker.ranks import rank_process

FOLDER = Path(os.environ["HELD_STEPS"])
_numbers = itertools.count()


def fetch(self: TorchSamplingOps, ids: torch.Tensor) -> Callable[[], list[int]]:
    """Replaces TorchSamplingOps.fetch."""
    if not (FOLDER / "hold").exists():
        return ids.tolist
    number = next(_numbers)
    (FOLDER / f"launched-{number}").touch()

    def wait() -> list[int]:
        while not (come := FOLDER / f"come-{number}").exists():
            time.sleep(0.005)
        if come.read_text() == "lost":
            raise RuntimeError("the device is lost")
        found: list[int] = ids.tolist()
        return found

    return wait


if __name__ == "__main__":
    TorchSamplingOps.fetch = fetch  # type: ignore[method-assign]
    rank_process.main()
