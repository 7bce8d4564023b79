"""The number of glibc's arenas, in a separate process because it cannot be reset."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Threads that hold memory at the same time get separate arenas up to the limit; malloc_info lists the arenas.
PROGRAM = """
import ctypes, os, sys, threading
from router.memory import give_memory_back
print(give_memory_back())
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def hold():
    together.wait()
    libc.malloc(ctypes.c_size_t(5000))
    together.wait()
threads = [threading.Thread(target=hold) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(os.dup(1), b"w"))
sys.stdout.flush()
libc.malloc_info(0, out)
libc.fclose(out)
"""


def arenas(**environment: str) -> tuple[str, int]:
    """The result of `give_memory_back`, and the number of arenas of eight threads."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=ROOT, env={**own, **environment}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()[0], done.stdout.count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no arenas")
def test_threads_share_two_arenas() -> None:
    """Regression: each arena kept pages of large messages, so a router's memory grew."""
    assert arenas() == ("True", 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no arenas")
def test_malloc_environment_overrides_arena_limit() -> None:
    assert arenas(MALLOC_ARENA_MAX="4") == ("False", 4)
