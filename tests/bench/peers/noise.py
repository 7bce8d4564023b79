"""CPU use of other processes during a measured row.

`common.cli.bench.machine` counts all children of the client as the client's. Here unmeasured peers wait as children
too: their CPU time counts as foreign, like any other process's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from common.cli.bench.figures import CpuShares
from common.cli.bench.machine import PROC, Process, read_machine, read_process, trees

# Rows with more of it do not count: threads that split their work evenly wait for the one that was held up.
FOREIGN_LIMIT: Final = 0.03
_LOOK_S: Final = 1.0
_CORES: Final = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Reading:
    """Ticks of the kernel's clock at one moment.

    Attributes:
        moment: monotonic seconds.
        busy: of all cores.
        steal: that the hypervisor gave to others.
        client: of this process, without its children.
        service: of what is measured.
    """

    moment: float
    busy: int
    steal: int
    client: int
    service: int


def read(service: Iterable[int]) -> Reading:
    """The ticks so far; `service` are the measured processes, with their descendants."""
    busy, steal = read_machine((PROC / "stat").read_text(encoding="ascii"))
    processes = _processes()
    members = trees(processes, service)
    own = os.times()
    client = round((own.user + own.system) * os.sysconf("SC_CLK_TCK"))
    return Reading(time.monotonic(), busy, steal, client, sum(processes[pid].ticks for pid in members))


def shares(before: Reading, after: Reading, cores: int = _CORES) -> CpuShares:
    """Of the time of all cores between two readings."""
    whole = max(after.moment - before.moment, 1e-9) * os.sysconf("SC_CLK_TCK") * cores
    client, service = (after.client - before.client) / whole, (after.service - before.service) / whole
    # The counters are read one after the other, so that the difference can be a tick below zero.
    foreign = max(0.0, (after.busy - before.busy) / whole - client - service)
    return CpuShares(client, service, foreign, (after.steal - before.steal) / whole)


def is_quiet(cpu: CpuShares) -> bool:
    """Whether a row counts that was measured meanwhile."""
    return max(cpu.foreign or 0.0, cpu.steal or 0.0) < FOREIGN_LIMIT


def wait_quiet(longest_s: float) -> bool:
    """Waits until others leave the machine alone. Returns False when `longest_s` have passed before that."""
    end = time.monotonic() + longest_s
    before = read([])
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        after = read([])
        if is_quiet(shares(before, after)):
            return True
        before = after
    return False


def _processes() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = read_process((entry / "stat").read_text(errors="replace"))
            except OSError:  # It has just ended.
                continue
    return found
