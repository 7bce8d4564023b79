"""Limits the memory that glibc keeps after bursts. A module of its own, because imports of the router start threads."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from common.limits import MIB

# From <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
# By default glibc gives threads up to eight arenas per core, each of which keeps the pages of its longest messages. And
# each freed block raises the size, up to 32 MiB, from which blocks are mapped and return to the system when freed.
_OPTIONS: Final = {_M_ARENA_MAX: 2, _M_MMAP_THRESHOLD: 4 * MIB, _M_TRIM_THRESHOLD: 8 * MIB}


def give_memory_back() -> bool:
    """Lets this process give memory of bursts and long messages back to the system; call it before threads start.

    Returns False, and does nothing, without glibc or if the environment has MALLOC_ variables, which take precedence.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        return all(library.mallopt(option, value) for option, value in _OPTIONS.items())
    except (AttributeError, OSError):
        return False
