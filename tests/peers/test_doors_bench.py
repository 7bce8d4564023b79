"""`python -m tests.bench.doors` with the real smg: rows have figures, and no stream of Fissile changes or is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import REPOSITORY
from tests.peers.environment import SMG_PACKAGES, peer_environment

pytestmark = pytest.mark.long


def test_table_has_no_failure_without_fault_and_no_changed_stream(tmp_path: Path) -> None:
    peer_environment("smg", SMG_PACKAGES)
    only = ["--only", "worker", "router", "facade", "smg", "--streams", "2", "--seconds", "0.2"]
    command = [sys.executable, "-m", "tests.bench.doors", *only, "--json", str(tmp_path / "result.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "protos")])}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    costs, faults = [row for row in rows if "streams" in row], [row for row in rows if "fault" in row]
    assert len({row["door"] for row in costs}) == 4
    assert {row["value"] for row in costs if row["metric"] == "failed"} == {0}
    assert all(row["value"] > 0 for row in costs if row["metric"] in ("tokens_per_s", "ttft_p50", "worker_cpu"))
    assert {row["value"] for row in faults if row["metric"] == "changed"} == {0}
    lost = [
        (row["door"], row["fault"])
        for row in faults
        if row["metric"] == "failed" and row["value"] and row["fault"].startswith("kill") and "Fissile" in row["door"]
    ]
    # An HTTP client whose own process is killed is the only one that is cut off.
    assert {fault for _, fault in lost} == {"kill -9 of a facade"}
    assert "| kill -9 of a router | smg 1.13.0, HTTP |" in done.stdout
