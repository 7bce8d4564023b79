"""Sockets that processes listen on, read from /proc as `ss -ltnp` does."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from pathlib import Path
from typing import Final

_LISTEN: Final = "0A"


def descendants(pid: int) -> list[int]:
    """Ids of a process and of all its descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Address and port of each TCP socket that one of the processes listens on."""
    owned = {inode for pid in pids for inode in _inodes(pid)}
    found = set()
    for pid in pids:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in owned:
                    address, _, port = fields[1].partition(":")
                    found.add((_address(address), int(port, 16)))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    for name in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(name))
        except FileNotFoundError:
            continue
        if match is not None:
            found.add(match[1])
    return found


def _address(text: str) -> str:
    """Groups of four bytes, each in the order of the machine."""
    data = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    address = ipaddress.ip_address(data)
    # An IPv6 socket that listens on an address of IPv4.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(address if mapped is None else mapped)
