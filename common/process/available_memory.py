"""Main memory that is available to this process: of the machine, or of its container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# Limit and use, in version 2 of cgroups and in version 1.
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_memory(mapped_bytes: int = 0) -> int:
    """Bytes of main memory that this process and its children can still take, the container's limit regarded.

    Args:
        mapped_bytes: of files that this process maps and reads in every step. The system counts their pages as free.
    """
    left = (_left_in(cgroup, *names) for cgroup in _cgroups() for names in _MEMORY_FILES)
    return max(0, min([_left_on_the_machine(), *(free for free in left if free is not None)]) - mapped_bytes)


def _left_on_the_machine() -> int:
    """Bytes that can be used without swapping; all there are where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        lines = []
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), whole)


def _cgroups() -> list[Path]:
    """Folders of the groups that may limit this process: its own and those above it, up to the root that it sees.

    In a container the path of the own group may be the host's, of which only the root is there.
    """
    try:
        lines = _OWN_CGROUPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    folders: dict[Path, None] = {_CGROUP: None}
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers in ("", "memory"):
            root = _CGROUP / controllers
            own = root / path.lstrip("/")
            folders.update(dict.fromkeys([own, *(parent for parent in own.parents if parent.is_relative_to(root))]))
    return list(folders)


def _left_in(cgroup: Path, limit_name: str, used_name: str) -> int | None:
    """Bytes until a group's limit; None where it has none."""
    limit, used = _read_number(cgroup / limit_name), _read_number(cgroup / used_name)
    return None if limit is None or used is None else limit - used + _file_pages(cgroup)


def _file_pages(cgroup: Path) -> int:
    """Bytes of files in memory that count as used by the group whose process touched them first."""
    try:
        lines = (cgroup / "memory.stat").read_text("ascii").splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines if line.count(" ") == 1)
    # Version 1 counts a group's children only under these names.
    prefix = "total_" if "total_active_file" in stat else ""
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file; None where there is no such file or no limit (`max`)."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
