"""Memory that is read all over at each step: KV caches and packed weights.

With pages of 4 KiB each block of a cache was a page of its own to look up, and what a processor reads ahead of weights
ended with each of them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch

# Bytes, on x86.
LARGE_PAGE = 2 << 20


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` zeros, one or more, page by page as they are touched, in large pages where the system has such.

    `torch.zeros` writes them all, 1.4 s per GiB on this machine. The memory is private; mmap's own choice is shared
    memory, for which most systems give no large pages.

    Raises:
        OSError: there is not so much memory.
    """
    size = count * dtype.itemsize
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
