"""Use of this machine's processors during a measurement, from /proc; unknown on systems other than Linux.

A foreign process beside a computation that uses all cores spoils more than its share of the time: threads that split
their work evenly wait for the one that was held up. So every run says how much of the machine others took.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.cli.bench.figures import NO_SHARES, CpuShares

PROC: Final = Path("/proc")
_LOOPBACK: Final = re.compile(r"(?:localhost|127(?:\.\d+){3}|\[::1\])(?::(?P<port>\d+))?")
_LISTEN: Final = "0A"
_FISSILE_SERVE: Final = re.compile(r"\0?[^\0]*(?:fissile|common[./]cli[./]main(?:\.py)?)\0serve(?:\0|$)")


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc/PID/stat describes it.

    Attributes:
        parent: process id of its parent.
        ticks: of all its threads in user and system mode, and of its children that have ended and been waited for.
    """

    parent: int
    ticks: int


def read_process(stat: str) -> Process:
    """Reads a line of /proc/PID/stat (proc_pid_stat(5), fields 4, 14 to 17); the name may hold spaces and brackets."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return Process(int(fields[1]), sum(map(int, fields[11:15])))


def read_machine(stat: str) -> tuple[int, int]:
    """Reads busy and stolen ticks of all cores from the first line of /proc/stat (proc_stat(5))."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return user + nice + system + irq + softirq, steal


def trees(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """Finds these processes and all their living descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    todo = [root for root in roots if root in processes]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Ticks of processor time since a fixed time in the past."""

    busy: int
    steal: int
    client: int
    service: int


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Reads the processor time of this machine by its user: client, service, others.

    Attributes:
        service: processes that, with their descendants, are the service; None: it runs here, it is not known where.
        local: whether the service is on this machine.
        proc: where /proc is.
    """

    service: tuple[int, ...] | None = ()
    local: bool = False
    proc: Path = PROC

    def read(self) -> CpuTime | None:
        """The time so far; None where the system has no /proc."""
        try:
            busy, steal = read_machine((self.proc / "stat").read_text())
        except OSError:
            return None
        processes = self._processes()
        service = trees(processes, self.service or ())
        client = trees(processes, [os.getpid()]) - service
        return CpuTime(busy, steal, _ticks(processes, client), _ticks(processes, service))

    def shares(self, before: CpuTime | None, after: CpuTime | None, seconds: float) -> CpuShares:
        """Shares of all cores between two readings that lie `seconds` apart."""
        if before is None or after is None or seconds <= 0:
            return NO_SHARES
        whole = seconds * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        client = (after.client - before.client) / whole
        service = (after.service - before.service) / whole
        # The counters are read one after the other, so that the difference can be a tick below zero.
        others = max(0.0, (after.busy - before.busy) / whole - client - service)
        return CpuShares(
            client=client,
            service=service if self.local and self.service is not None else None,
            foreign=None if self.service is None else others,
            steal=(after.steal - before.steal) / whole,
        )

    def _processes(self) -> dict[int, Process]:
        found: dict[int, Process] = {}
        for folder in self.proc.iterdir():
            if folder.name.isdigit():
                # It may end meanwhile.
                try:
                    found[int(folder.name)] = read_process((folder / "stat").read_text())
                except OSError:
                    continue
        return found


def _ticks(processes: Mapping[int, Process], pids: Iterable[int]) -> int:
    return sum(processes[pid].ticks for pid in pids)


def meter_for(address: str, service: tuple[int, ...] = (), proc: Path = PROC) -> CpuMeter:
    """Makes the meter for a service at `address` (HOST:PORT; without a port its processes are not found).

    On loopback its processes are those given, and the one that listens there; with all of `fissile serve`, when that
    has started it.
    """
    loopback = _LOOPBACK.fullmatch(address)
    if loopback is None:
        return CpuMeter(service, bool(service), proc)
    listener = listening_process(int(loopback["port"]), proc) if loopback["port"] else None
    found = () if listener is None else (_started_by(listener, proc),)
    return CpuMeter((*service, *found) or None, True, proc)


def listening_process(port: int, proc: Path = PROC) -> int | None:
    """Finds the process that listens on a local TCP port; None if there is none or it may not be inspected."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(proc / "net" / table, port)}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir() if wanted else ():
        if folder.name.isdigit() and any(link in wanted for link in _open_files(folder / "fd")):
            return int(folder.name)
    return None


def _listening_inodes(table: Path, port: int) -> list[str]:
    """Inodes of the sockets of a table (proc_pid_net(5): columns local address, state and inode) that listen on a
    port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _open_files(folder: Path) -> list[str]:
    links: list[str] = []
    try:
        for path in folder.iterdir():
            links.append(os.readlink(path))  # noqa: PERF401
    except OSError:
        # Another user's, or it has ended, or a file was closed meanwhile: what was seen counts.
        return links
    return links


def _started_by(pid: int, proc: Path) -> int:
    """Returns the `fissile serve` that started a router, else the router itself."""
    try:
        parent = read_process((proc / str(pid) / "stat").read_text()).parent
        command = (proc / str(parent) / "cmdline").read_text()
    except OSError:
        return pid
    return parent if _FISSILE_SERVE.search(command) else pid


def cpu_model(proc: Path = PROC) -> str:
    """Name of the processor; empty if the system does not say."""
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        return ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
