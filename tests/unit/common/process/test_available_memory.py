"""Available memory of the machine and of the process's cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.cli.serve.command import default_kv_memory
from common.process import available_memory as module
from common.process.available_memory import available_memory


def test_available_memory() -> None:
    free = available_memory(0)
    assert 2**24 < free < 2**50
    assert available_memory(2**62) == 0


def test_mapped_files_do_not_count_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts mapped files as used, but the kernel frees them on demand."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert available_memory(0) == 2000
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 2500\nactive_file 700\ninactive_file 1200\nshmem 600\n")
    assert available_memory(0) == 3900
    assert available_memory(1500) == 2400


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used", "stat"),
    [
        ("0::/system.slice/fissile.service", "system.slice/fissile.service", "memory.max", "memory.current", ""),
        ("0::/system.slice/fissile.service", "system.slice", "memory.max", "memory.current", ""),
        ("4:memory:/jobs/7", "memory/jobs/7", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ("4:memory:/jobs/7", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ""),
        # In a container the path may be the host's; the visible root is the process's own group.
        ("0::/docker/abc", "", "memory.max", "memory.current", ""),
    ],
)
def test_own_cgroup_limit_bounds_available_memory(
    own: str, folder: str, limit: str, used: str, stat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only the root's limit was read, not systemd's MemoryMax or cgroup v1."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{own}\n")
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("5000\n")
    (group / used).write_text("3000\n")
    (group / "memory.stat").write_text(
        f"active_file 10\ninactive_file 20\n{stat}active_file 10\n{stat}inactive_file 20\n"
    )
    assert available_memory(0) == 2030


def test_workers_share_container_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `fissile serve` divided the machine's memory instead of the container's."""
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert default_kv_memory(workers=2, tp_size=2) == "64MiB"
