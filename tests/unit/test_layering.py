"""Imports go down the layers only (design.md, Layout): fissile <- common <- router, and kernels, common <- worker.

Read from the syntax trees, so imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"fissile", "common", "kernels", "router", "worker", "tests", "examples", "deploy", "scripts"})

# Package -> our packages that it may import besides itself.
MAY_IMPORT = {
    "fissile": frozenset[str](),
    "common": frozenset({"fissile"}),
    "kernels": frozenset[str](),
    "router": frozenset({"common", "fissile"}),
    "worker": frozenset({"common", "kernels", "fissile"}),
}
TORCH = frozenset({"torch", "transformers", "safetensors"})
# Packages that install and run without PyTorch.
WITHOUT_TORCH = frozenset({"fissile", "common", "router"})
# The engine's deciding code, which runs without PyTorch too.
PURE_WORKER_MODULES = frozenset(
    {
        "sequence",
        "batch",
        "scheduler",
        "sequence_queue",
        "block_manager",
        "stop_rules",
        "outbox",
        "inbox",
        "served",
        "session_state",
        "engine_core",
        "engine_turns",
        "fleet_lanes",
        "simulated",
        "cost_model",
        "presets",
        "model_config",
        "batch_delta",
        "frames",
        "topology",
        "rank_group",
        "rank_engine",
        "node",
        "quantization",
    }
)
# Code that decides does no I/O and reads no clock: `now` comes in, decisions go out.
DECIDING_MODULES = (
    "common/bench/figures",
    "common/bench/records",
    "common/bench/report",
    "common/bench/statistics",
    "common/delay_gate",
    "common/block_hash",
    "common/seed",
    "common/sampling_params",
    "common/cli/restart_policy",
    "router/queue",
    "router/lane",
    "router/placement",
    "router/dispatcher",
    "router/assembly",
    "router/link",
    "router/model_registry",
    "router/targets",
    "router/validation",
    "worker/sequence",
    "worker/batch",
    "worker/scheduler",
    "worker/sequence_queue",
    "worker/block_manager",
    "worker/stop_rules",
    "worker/outbox",
    "worker/inbox",
    "worker/session_state",
    "worker/engine_turns",
    "worker/fleet_lanes",
    "worker/quantization",
)
WORLD = frozenset({"asyncio", "os", "random", "selectors", "socket", "subprocess", "threading", "time"})


def imported_packages(source: str) -> set[str]:
    """Top-level names of the packages that a module imports; relative imports stay inside the package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def violations(package: str, module: str, source: str) -> list[str]:
    """What a module of a package imports although it must not."""
    imported = imported_packages(source)
    forbidden = (imported & OURS) - MAY_IMPORT[package] - {package}
    if package in WITHOUT_TORCH or (package == "worker" and module in PURE_WORKER_MODULES):
        forbidden |= imported & TORCH
    return sorted(forbidden)


def modules_of(package: str) -> Iterator[Path]:
    folder = ROOT / ("protos/fissile" if package == "fissile" else package)
    return folder.rglob("*.py")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_down_only(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in modules_of(package)
        if (names := violations(package, path.stem, path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("package", "module", "source", "expected"),
    [
        ("common", "config", "import torch", ["torch"]),
        ("common", "config", "def f():\n    from worker.app import main", ["worker"]),
        ("router", "app", "from worker import sequence\nimport common.config, json", ["worker"]),
        ("router", "app", "if TYPE_CHECKING:\n    import torch.nn", ["torch"]),
        ("worker", "app", "from router.queue import Queue", ["router"]),
        ("worker", "scheduler", "import torch", ["torch"]),
        ("worker", "loader", "import torch, kernels.philox\nfrom common import limits", []),
        ("kernels", "philox", "from common import limits\nimport torch", ["common"]),
        ("fissile", "client", "import common", ["common"]),
        ("common", "config", "from tests import checkpoints", ["tests"]),
    ],
)
def test_a_wrong_import_is_found(package: str, module: str, source: str, expected: list[str]) -> None:
    assert violations(package, module, source) == expected


@pytest.mark.parametrize("module", DECIDING_MODULES)
def test_deciding_code_touches_no_world(module: str) -> None:
    source = (ROOT / f"{module}.py").read_text(encoding="utf-8")
    assert imported_packages(source) & WORLD == set()
