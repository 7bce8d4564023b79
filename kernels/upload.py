"""Copies of host arrays for the device that computes a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered by the caller's stream; from pinned memory, so that the host does not wait.

    On a CPU the array itself, if it is contiguous.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
