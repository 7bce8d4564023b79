"""The import check finds a wrong import for each of its rules; our files keep them all."""

from __future__ import annotations

import pytest

from scripts.check_imports import (
    BESIDE,
    LATE_IMPORTS,
    MAY_IMPORT,
    OURS,
    RULES,
    beside,
    circles,
    graph_of,
    problems,
    sources,
    upward,
    violations,
)


def found(path: str, *lines: str) -> list[str]:
    """Problems of our files with lines added at the start of one, or as a new one."""
    ours = sources()
    return list(problems({**ours, path: "\n".join([*lines, ours.get(path, "")])}))


def without(path: str, text: str) -> list[str]:
    """Problems of our files with a text removed from one."""
    ours = sources()
    assert text in ours[path]
    return list(problems({**ours, path: ours[path].replace(text, "pass")}))


def test_every_file_keeps_the_rules() -> None:
    assert list(problems(sources())) == []


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("common/config.py", "import torch", ["torch"]),
        ("common/config.py", "def f():\n    from worker.cli.worker import main", ["worker"]),
        ("common/config.py", "from tests import checkpoints", ["tests"]),
        ("router/app.py", "from worker import sequence\nimport common.config, json", ["worker"]),
        ("router/app.py", "if TYPE_CHECKING:\n    import torch.nn", ["torch"]),
        (
            "router/scheduling/anything.py",
            "import asyncio, grpc, torch, time, math",
            ["asyncio", "grpc", "time", "torch"],
        ),
        ("router/scheduling/deeper/anything.py", "from time import monotonic", ["time"]),
        ("router/requests/anything.py", "import asyncio", ["asyncio"]),
        ("worker/cli/worker.py", "from router.scheduling.admission import AdmissionQueue", ["router"]),
        ("worker/engine/anything.py", "import asyncio, grpc, torch, time, math", ["asyncio", "grpc", "time", "torch"]),
        ("worker/engine/core.py", "import asyncio, time", ["asyncio"]),
        ("worker/session/anything.py", "def f():\n    import torch", ["torch"]),
        ("worker/model/anything.py", "import torch, kernels.philox\nfrom common import limits", []),
        ("kernels/philox.py", "from common import limits\nimport torch", ["common"]),
        ("fissile/client.py", "import common", ["common"]),
    ],
)
def test_wrong_import_is_found(path: str, source: str, expected: list[str]) -> None:
    assert violations(path, source) == expected


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_forbidden_package_import_is_found(package: str) -> None:
    """Exactly the one wrong import is found: at the top, late, or for types."""
    for other in sorted(OURS - MAY_IMPORT[package] - {package}):
        for source in (
            f"import {other}.module",
            f"def f():\n    from {other} import module",
            f"if TYPE_CHECKING:\n    import {other}",
        ):
            assert violations(f"{package}/folder/anything.py", source) == [other]
    for other in MAY_IMPORT[package]:
        assert violations(f"{package}/folder/anything.py", f"import {other}.module") == []


@pytest.mark.parametrize("folder", RULES)
def test_each_layer_rule_finds_forbidden_import(folder: str) -> None:
    """Exactly the forbidden module is found, in a file of the folder and in those below it."""
    rule = RULES[folder]
    files = [folder] if folder.endswith(".py") else [f"{folder}/anything.py", f"{folder}/deeper/anything.py"]
    for path in files:
        for module in sorted(rule.forbidden):
            assert violations(path, f"def f():\n    import {module}.part") == [module]
            assert violations(path, "import json, math, dataclasses") == []


@pytest.mark.parametrize(
    ("folder", "place"), [(folder, place) for folder, rule in RULES.items() for place in rule.exceptions]
)
def test_layer_exception_permits_only_named_modules(folder: str, place: str) -> None:
    """A file of the excepted place may import that module and no other forbidden one."""
    rule = RULES[folder]
    path = place if place.endswith(".py") else f"{place}/anything.py"
    modules = sorted(rule.forbidden)
    expected = sorted(rule.forbidden - rule.exceptions[place][0])
    wrong = violations(path, f"import {', '.join(modules)}")
    assert [module for module in wrong if module in rule.forbidden] == expected


def test_layer_rule_of_missing_place_is_found() -> None:
    ours = {path: source for path, source in sources().items() if path != "router/validation.py"}
    assert "router/validation.py: has a rule, and is not there" in list(problems(ours))


def test_unneeded_layer_exception_is_found() -> None:
    assert without("worker/config/engine_config.py", "import os") == [
        "worker/config/engine_config.py: is excepted from a rule, and no longer needs to be"
    ]


@pytest.mark.parametrize("place", BESIDE)
def test_each_forbidden_sibling_import_is_found(place: str) -> None:
    """An import of a place outside the table is found, at the top or late; one inside the table is accepted."""
    path = place if place.endswith(".py") else f"{place}/anything.py"
    package = place.partition("/")[0]
    for other in sorted({"/".join(each.split("/")[:2]) for each in sources() if each.startswith(f"{package}/")}):
        if "__" in other:
            continue
        target = other if other.endswith(".py") else f"{other}/other.py"
        module = target.removesuffix(".py").replace("/", ".")
        expected = [] if other == place or other.partition("/")[2] in BESIDE[place] else [other]
        for line in (f"import {module}", f"def f():\n    import {module}"):
            wrong = list(beside(graph_of({target: "", path: line})))
            assert wrong == [f"{path}: must not import {each}" for each in expected]


def test_pytorch_import_reachable_from_router_is_found() -> None:
    """A file that may import PyTorch but is loaded from the router."""
    assert (
        "worker/config/architectures.py: loads PyTorch, and is loaded with the router or the deciding side of a worker"
        in (found("worker/config/architectures.py", "import torch"))
    )


def test_unexplained_late_import_is_found() -> None:
    late = "def f():\n    from router.scheduling import audit"
    assert found("router/scheduling/lanes.py", late) == [
        "router/scheduling/lanes.py: imports ours inside a function, without a reason in LATE_IMPORTS"
    ]
    assert [path for path in LATE_IMPORTS if path not in sources()] == []


def test_unneeded_late_import_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LATE_IMPORTS, "router/validation.py", "none")
    assert list(problems(sources())) == [
        "router/validation.py: stands in LATE_IMPORTS, and imports nothing of ours inside a function"
    ]


def test_import_circle_of_modules_is_found() -> None:
    lines = found("common/limits.py", "import common.errors")
    assert any(": a ring of modules: common/errors.py, common/limits.py" in line for line in lines)


@pytest.mark.parametrize("guard", ["def f():", "if TYPE_CHECKING:"])
def test_import_circle_of_packages_includes_late_imports_and_types(guard: str) -> None:
    lines = found("common/telemetry/names.py", f"{guard}\n    import common.rpc.server")
    assert any(": a ring of packages: common/rpc, common/telemetry" in line for line in lines)
    assert any(": a ring of modules: " in line for line in lines)


def test_modules_of_imported_packages_are_the_edges_of_the_graph() -> None:
    """`from package import module` counts as an import of the module."""
    files = {
        "router/a/one.py": "from router.b import two",
        "router/b/two.py": "def f():\n    from router.a.one import thing",
    }
    graph = graph_of(files)
    assert graph["router/a/one.py"].at_load == {"router/b/two.py"}
    assert graph["router/b/two.py"].late == {"router/a/one.py"}


def test_circles_are_the_groups_that_reach_each_other() -> None:
    assert circles({"a": ["b"], "b": ["c", "d"], "d": ["b"], "e": ["e2"], "e2": ["e"]}) == [["b", "d"], ["e", "e2"]]
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


@pytest.mark.parametrize("line", ["import worker.ranks.door", "if TYPE_CHECKING:\n    import worker.ranks.door"])
def test_upward_import_is_found(line: str) -> None:
    graph = graph_of({"worker/config/shares.py": line, "worker/ranks/door.py": "import worker.config.shares"})
    assert list(upward(graph)) == ["worker/config/shares.py: imports worker/ranks, which is above it in ORDER"]


def test_folder_without_order_is_found() -> None:
    assert found("worker/more/anything.py") == ["worker/more: is not in ORDER"]
