"""`python -m tests.e2e.faulty_worker FOLDER worker ...`: a worker with a fault that begins when a file says so.

The file FOLDER/FAULT has the fault begin, and is gone when it has. What a worker says of itself stays that of a
healthy one: each fault comes after its start, as a broken module of memory or a core that grows old does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import main
from kernels.cpu.linear import CpuLinearOps
from worker.model.model_runner import ModelRunner


def flip_weight(runner: ModelRunner) -> None:
    """The lowest bit of one float32 of the final norm."""
    weight: torch.Tensor = runner.model._norm.weight  # type: ignore[attr-defined]
    weight.view(torch.int32)[7] ^= 1


def flip_kv(runner: ModelRunner) -> None:
    """One bit of the fraction of one float32 in each block that has been written."""
    kv: Any = runner._kv_cache
    blocks = kv.data[0, 0].view(torch.int32)
    for block in range(kv.num_blocks):
        if blocks[block].any():
            blocks[block].view(-1)[3] ^= 1 << 20


def spoil_products(runner: ModelRunner) -> None:
    """The last bit of one number of each row of a product is wrong."""
    apply = CpuLinearOps.apply

    def wrong(self: CpuLinearOps, x: torch.Tensor, packed: Any) -> torch.Tensor:
        out = apply(self, x, packed)
        out.view(torch.int32)[:, 5] ^= 1
        return out

    CpuLinearOps.apply = wrong  # type: ignore[method-assign]
    # All layers in one native call give the same bits; it has products of its own.
    runner.model._fused = None  # type: ignore[attr-defined]


def break_ties_otherwise(runner: ModelRunner) -> None:
    """Of equal logits at the border of top-k those of the higher ids are kept."""
    ops: Any = runner.kernels.sampling
    sample = ops.sample

    def wrong(logits: torch.Tensor, params: Any, **more: Any) -> torch.Tensor:
        for row, top_k in zip(logits.numpy(), params.top_k.tolist(), strict=True):
            if top_k:
                border = np.partition(row, -top_k)[-top_k]
                (equal,) = np.nonzero(row == border)
                room = top_k - int((row > border).sum())
                row[equal[: len(equal) - room]] = -np.inf
        tokens: torch.Tensor = sample(logits, params, **more)
        return tokens

    ops.sample = wrong


FAULTS: dict[str, Callable[[ModelRunner], None]] = {
    "weights": flip_weight,
    "kv": flip_kv,
    "products": spoil_products,
    "ties": break_ties_otherwise,
}


def watch(runner: ModelRunner, folder: Path) -> None:
    while True:
        for name, begin in FAULTS.items():
            if (folder / name).exists():
                with torch.inference_mode():
                    begin(runner)
                (folder / name).unlink()
        time.sleep(0.02)


def run() -> None:
    folder = Path(sys.argv.pop(1))
    make = ModelRunner.__init__

    def init(self: ModelRunner, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        threading.Thread(target=watch, args=(self, folder), daemon=True).start()

    ModelRunner.__init__ = init  # type: ignore[method-assign]
    main.main()


if __name__ == "__main__":
    run()
