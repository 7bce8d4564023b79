"""Copies of what the host knows of a step, for the device that computes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device, which the stream of the caller orders; from pinned memory, so that nobody waits.

    On a CPU the array itself, if its numbers lie side by side.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
