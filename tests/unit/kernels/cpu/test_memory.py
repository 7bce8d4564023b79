"""The kernels in a process whose memory is at its end: an error or a slower answer, and the next call works."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("native")

# Limits the address space to its current size and `more` bytes, while `call` runs.
LIMITED = """
import resource
import torch
from kernels.cpu import library, linear

torch.set_num_threads(1)
native = library.load()

def limited(call, more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
"""

NO_SCRATCH = """
x = torch.randn(100_000, 512)
packed = linear.pack(native, torch.randn(16, 512), None, torch.float32)
try:
    limited(lambda: linear.linear(native, x, packed), 100 << 20)
except MemoryError as error:
    print(error)
torch.testing.assert_close(linear.linear(native, x, packed)[-1:], linear.linear(native, x[-1:], packed), rtol=0, atol=0)
"""

NO_THREADS = """
native.fissile_set_threads(1)
x = torch.randn(64, 512)
packed = linear.pack(native, torch.randn(1600, 512), None, torch.float32)
expected = linear.linear(native, x, packed)
native.fissile_set_threads(8)
with open("/proc/self/status") as status:
    print(next(line.strip() for line in status if line.startswith("Threads")))
assert torch.equal(limited(lambda: linear.linear(native, x, packed), 1 << 20), expected)
with open("/proc/self/status") as status:
    print(next(line.strip() for line in status if line.startswith("Threads")))
assert torch.equal(linear.linear(native, x, packed), expected)
"""


def run(program: str) -> list[str]:
    child = subprocess.run(
        [sys.executable, "-c", LIMITED + program], check=False, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.slow
def test_missing_memory_for_rows_is_an_error() -> None:
    assert run(NO_SCRATCH) == ["the CPU kernels have no memory left"]


@pytest.mark.slow
def test_kernels_run_without_unavailable_threads() -> None:
    before, after = run(NO_THREADS)
    assert before == after
