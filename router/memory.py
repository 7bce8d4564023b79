"""The C library's memory: what a process that has been through a burst gives back to the system."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from common.limits import MIB

# From <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# By glibc's defaults threads have up to eight arenas per core, each of which keeps pages of the longest messages that
# have passed through it; and a block that has been freed raises the size, to 32 MiB, from which on blocks are mapped
# by themselves and go back to the system at once.
_OPTIONS: Final = {_M_ARENA_MAX: 2, _M_MMAP_THRESHOLD: 4 * MIB, _M_TRIM_THRESHOLD: 8 * MIB}


def give_memory_back() -> bool:
    """Lets this process give memory of bursts and long messages back to the system; call it before threads start.

    Returns False, and does nothing, without glibc and where the environment has MALLOC_ variables: they go before.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        return all(library.mallopt(option, value) for option, value in _OPTIONS.items())
    except (AttributeError, OSError):
        return False
