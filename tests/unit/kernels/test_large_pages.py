"""Memory in large pages: it is zero, it is the caller's own, and the system was asked for such pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kernels import large_pages
from kernels.cpu import linear
from kernels.cpu.library import CACHE_LINE

MIB = 1 << 20


def mapping_at(address: int) -> dict[str, list[str]]:
    """What the kernel says of the mapping with this address, by name: numbers are KiB."""
    facts: dict[str, list[str]] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside:
            facts[first.removesuffix(":")] = rest
    return facts


def resident_at(address: int) -> int:
    """Bytes in memory of the mapping with this address."""
    return int(mapping_at(address)["Rss"][0]) << 10


def test_zeros_are_zero_and_can_be_written() -> None:
    memory = large_pages.zeros(3 * MIB + 5, torch.bfloat16)
    assert memory.shape == (3 * MIB + 5,)
    assert memory.dtype == torch.bfloat16
    assert memory.eq(0).all()
    memory[-1] = 7
    assert memory[-1] == 7
    assert large_pages.zeros(16, torch.bfloat16).eq(0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_touched_memory_is_resident_and_keeps_content() -> None:
    count = 75 * MIB
    memory, told = large_pages.zeros(count, torch.bfloat16), list[tuple[int, int]]()
    memory[12345] = 3
    before = resident_at(memory.data_ptr() + count)
    large_pages.touch(memory, lambda done, total: told.append((done, total)))
    assert before < 64 * MIB
    assert resident_at(memory.data_ptr() + count) >= 2 * count
    assert memory[12345] == 3
    assert memory.sum() == 3
    assert told == [(64 * MIB, 2 * count), (128 * MIB, 2 * count), (2 * count, 2 * count)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_unsupported_populate_leaves_pages_lazy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large_pages, "_MADV_POPULATE_WRITE", 9999)
    memory, told = large_pages.zeros(75 * MIB, torch.bfloat16), list[int]()
    large_pages.touch(memory, lambda done, _total: told.append(done))
    assert told == []
    assert memory[-1] == 0


def test_empty_memory_is_not_touched() -> None:
    large_pages.touch(torch.empty(0), lambda _done, _total: pytest.fail("something was touched"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what a mapping is")
@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB + 64])
def test_large_packed_weights_use_large_pages(size: int) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists():
        pytest.skip("this system has no large pages")
    memory, small = linear.aligned(size), linear.aligned(MIB)
    assert memory.shape == (size,)
    assert small.shape == (MIB,)
    assert memory.data_ptr() % CACHE_LINE == 0
    assert small.data_ptr() % CACHE_LINE == 0
    assert "hg" in mapping_at(memory.data_ptr() + size // 2)["VmFlags"]
