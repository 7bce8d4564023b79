"""Memory for data that every step reads as a whole: KV caches and packed weights.

With pages of 4 KiB each block of a cache was a page of its own to look up, and the processor's read-ahead of weights
stopped at each page's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Bytes, on x86.
LARGE_PAGE = 2 << 20
# From <linux/mman.h>, since Linux 5.14.
_MADV_POPULATE_WRITE = 23
# Large pages that one call of the system's makes.
_PAGES_AT_ONCE = 32


def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` zeros, one or more, whose pages take memory when touched, in large pages if the system has them.

    `torch.zeros` writes them all, 1.4 s per GiB on this machine. The memory is private: mmap's default is shared
    memory, for which most systems give no large pages.

    Raises:
        OSError: there is not enough memory.
    """
    size = count * dtype.itemsize
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


def touch(memory: torch.Tensor, progress: Callable[[int, int], None]) -> None:
    """Takes the memory of all pages of `memory` now; contents stay.

    Otherwise the first step that writes to a page waits for it: 0.3 ms for a large page, and up to 2 ms in a virtual
    machine whose host has to find the memory too. If the system cannot do it, pages are taken as they are touched.

    Args:
        memory: contiguous, in main memory.
        progress: called with (bytes done, bytes in all).
    """
    size = memory.numel() * memory.element_size()
    if sys.platform != "linux" or not size:
        return
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.data_ptr() + size
    piece = _PAGES_AT_ONCE * LARGE_PAGE
    bounds = list(itertools.pairwise([*range(begin, end, piece), end]))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done, given in enumerate(pool.map(_populate, bounds), 1):
            if not given:
                return
            progress(min(size, done * piece), size)


def _populate(bounds: tuple[int, int]) -> bool:
    """Asks the system for the pages between two addresses; True if it has given them."""
    begin, end = bounds
    failed: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)
    return not failed
