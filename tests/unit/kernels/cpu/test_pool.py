"""The pool of threads: every task runs once, for any caller, and the child of a fork has no helper."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from ctypes import CDLL

import numpy as np
import pytest

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def share(native: CDLL, tasks: int, function: Callable[[int], None]) -> None:
    native.fissile_share(ctypes.c_int64(tasks), TASK(lambda _, task: function(task)), None)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_task_is_done_once(threads: CDLL, count: int) -> None:
    threads.fissile_set_threads(count)
    assert threads.fissile_threads() == count
    done = np.zeros(200, np.int64)

    def task(i: int) -> None:
        done[i] += 1

    for tasks in (0, 1, 2, 7, 200, 3, 200):
        done[:] = 0
        share(threads, tasks, task)
        assert (done[:tasks] == 1).all()
        assert not done[tasks:].any()


def test_pool_uses_other_threads(threads: CDLL) -> None:
    threads.fissile_set_threads(2)
    both = threading.Barrier(2, timeout=60)
    seen: set[int] = set()

    def task(i: int) -> None:
        both.wait()
        seen.add(threading.get_ident())

    share(threads, 2, task)
    assert len(seen) == 2


def test_concurrent_and_nested_callers_do_not_deadlock(threads: CDLL) -> None:
    threads.fissile_set_threads(3)
    counts = np.zeros(4, np.int64)
    lock = threading.Lock()

    def count(caller: int) -> None:
        with lock:
            counts[caller] += 1

    def call(caller: int) -> None:
        for _ in range(50):
            share(threads, 5, lambda i: share(threads, 3, lambda j: count(caller)))

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts.tolist() == [50 * 5 * 3] * 4


# A process that has run nothing else: of what the threads of other libraries hold at a fork, their child never sees the
# end. PyTorch's own threads do not survive one either, so the child uses nothing of it that may work on them.
FORKING = """
import os
import signal
import torch
from kernels.cpu import library, linear

torch.set_num_threads(1)
native = library.load()
native.fissile_set_threads(3)
x = torch.randn(300, 64)
packed = linear.pack(native, torch.randn(200, 64), None, torch.float32)
expected = linear.linear(native, x, packed).numpy().tobytes()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if linear.linear(native, x, packed).numpy().tobytes() == expected else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_forked_child_can_compute(native: CDLL) -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=120, start_new_session=True)
