"""Processes that tests start or kill."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that has ended does not, though nobody may ever wait for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
