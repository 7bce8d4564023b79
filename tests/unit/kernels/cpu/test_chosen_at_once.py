"""Many threads of a process that take the CPU kernels at once: all get the same, and none sees another one's check."""

from __future__ import annotations

import subprocess
import sys
from ctypes import CDLL

import pytest

# Of a process that has loaded nothing, each child of a fork is a fresh one, without the time of another start. As soon
# as a thread has its back end it computes, while others may still choose: a set that changes below it gives other bits.
CHOOSING = """
import faulthandler
import os
import sys
import threading
import torch
from structlog.testing import capture_logs
from kernels.cpu import self_check
from kernels.cpu.backend import CpuBackend

THREADS, PROCESSES = 12, int(sys.argv[1])
torch.set_num_threads(1)
sys.setswitchinterval(1e-5)
weight = torch.arange(96 * 400).view(96, 400).sin()
x = torch.arange(7 * 400).view(7, 400).cos().bfloat16()
check, checked = self_check.fault, []
self_check.fault = lambda library, name: (checked.append(name), check(library, name))[1]


def products(backend):
    packed = backend.linear.pack(weight, None, torch.bfloat16)
    return [bytes(backend.linear.apply(x, packed).view(torch.uint8).numpy()) for _ in range(20)]


def choose():
    start, found, errors = threading.Barrier(THREADS), [], []

    def one():
        start.wait()
        try:
            backend = CpuBackend()
            found.append((backend, products(backend)))
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=one) for _ in range(THREADS)]
    with capture_logs() as logs:
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not errors, errors
    assert not logs, logs
    assert len(checked) == len(set(checked)), checked
    assert len({backend.description for backend, _ in found}) == 1
    alone = products(found[0][0])
    assert all(each == alone for _, each in found), "a product has other bits"


for _ in range(PROCESSES):
    if (child := os.fork()) == 0:
        faulthandler.dump_traceback_later(100, exit=True)
        try:
            choose()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise SystemExit(f"a process ended with {code}")
"""


@pytest.mark.parametrize("processes", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_concurrent_threads_choose_same_instruction_set(native: CDLL, processes: int) -> None:
    command = [sys.executable, "-c", CHOOSING, str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
