"""The result of a run: a file for tests/bench/results, and its tables."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from common.cli.bench.machine import cpu_model
from tests.bench.doors.stacks import Entry
from tests.bench.plots.charts import KINDS
from tests.bench.plots.results import Result
from tests.bench.plots.tables import TABLES
from tests.e2e.service import REPOSITORY

# Of the kinds of processors, as results name them.
_INSTRUCTION_SETS: Final = {"amx": "amx", "zen5": "avx512bf16", "zen4": "avx512bf16", "avx2": "avx2"}
_WORKLOAD: Final = "Simulated workers. Prompts of 100 tokens of text, answers of 128 tokens, a closed loop."
_ABOUT: Final = (
    "All doors are open at the same workers, and take turns. CPU is that of the door's processes, sidecars and routers "
    "behind it included, from /proc; the client's is left out. The client is the same code for all doors of a protocol."
)


def result_of(entries: Sequence[Entry], command: str) -> dict[str, Any]:
    """The content of a result's file."""
    kind = _kind(Path("/proc/cpuinfo").read_text())
    shares = [entry["value"] for entry in entries if entry["metric"] == "others"]
    most = f" Other processes took up to {max(shares)} % of the cores." if shares else ""
    is_busy = any(not entry.get("counts", True) for entry in entries)
    return {
        "bench": "doors",
        "machine": {
            "kind": kind,
            "processor": f"{cpu_model()} ({KINDS[kind]})",
            "instruction_set": _INSTRUCTION_SETS[kind],
            "cores": os.cpu_count(),
        },
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "workload": _WORKLOAD,
        "about": _ABOUT + most + (" **The machine was busy: the figures are provisional.**" if is_busy else ""),
        "rows": list(entries),
    }


def markdown_of(result: dict[str, Any]) -> str:
    """The tables of docs/reference/doors-compared.md that the result has rows for."""
    run = Result.of("", json.loads(json.dumps(result), parse_float=Decimal))
    metrics = {row.metric for row in run.rows}
    names = {"doors-cost": "tokens_per_s", "doors-faults": "survived"}
    return "\n\n".join(TABLES[name]([run]) for name, metric in names.items() if metric in metrics)


def text_of(result: dict[str, Any]) -> str:
    """The file: one row a line."""
    head = {name: value for name, value in result.items() if name != "rows"}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def _kind(cpuinfo: str) -> str:
    """Kind of the processor, as the performance page names it."""
    if "amx_bf16" in cpuinfo:
        return "amx"
    if "avx512_bf16" in cpuinfo:
        return "zen5" if "avx512_vp2intersect" in cpuinfo else "zen4"
    return "avx2"


def _commit() -> str | None:
    """The checkout's commit; None outside one."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None
