"""`python -m tests.e2e.faulty_worker FOLDER worker ...`: a worker with a fault that begins when a file says so.

A file FOLDER/weights flips the lowest bit of one weight, FOLDER/kv one bit in each block of the KV cache that is in
use. The file is gone when it is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.cli import main
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


FAULTS: dict[str, Callable[[ModelRunner], None]] = {"weights": flip_weight, "kv": flip_kv}


def watch(runner: ModelRunner, folder: Path) -> None:
    while True:
        for name, flip in FAULTS.items():
            if (folder / name).exists():
                with torch.inference_mode():
                    flip(runner)
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
