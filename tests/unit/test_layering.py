"""Imports follow the folders: who may import whom, which folders decide and touch no world, and no rings.

fissile <- common <- router, and kernels, common <- worker. Read from the syntax trees, so imports inside functions and
under TYPE_CHECKING count too. A rule is about a folder and all that is below it; a file that a rule does not hold for
stands beside it with the reason, and an exception that is no longer needed fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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
GRPC = frozenset({"grpc"})
PROTOBUF = frozenset({"fissile", "google"})
CLOCK = frozenset({"time"})
IO = frozenset({"asyncio", "os", "random", "selectors", "signal", "socket", "subprocess", "threading"})
# Code that decides does no I/O and reads no clock: `now` comes in, decisions go out.
WORLD = IO | CLOCK

EVENT_LOOP = "a task on the event loop"
SERVES = "a servicer of gRPC"
STATUS = "names of gRPC's status codes in errors"
CLI = "a command"


@dataclass(frozen=True)
class Rule:
    """What no file in a folder imports; `exceptions` by file: what it imports all the same, and why."""

    forbidden: frozenset[str]
    exceptions: Mapping[str, tuple[frozenset[str], str]]


def names(*modules: str) -> frozenset[str]:
    return frozenset(modules)


RULES = {
    "fissile": Rule(TORCH, {}),
    "fissile/seed.py": Rule(WORLD | GRPC, {}),
    "fissile/client/attempts.py": Rule(WORLD | GRPC, {}),
    "fissile/client/progress.py": Rule(WORLD | GRPC, {}),
    "common": Rule(TORCH, {}),
    "router": Rule(TORCH, {}),
    # The engine and the network side of a worker run without PyTorch: a simulated worker, and one whose ranks have it.
    "worker": Rule(
        TORCH,
        {
            "worker/model": (TORCH, "the model is PyTorch's"),
            "worker/weights": (TORCH, "weights are tensors"),
            "worker/ranks/rank_process.py": (TORCH, "imports it late, in the process of a rank"),
            "worker/ranks/collectives.py": (TORCH, "is imported by rank processes only"),
            "worker/config/architectures.py": (
                names("torch"),
                "types of the classes that it names, nothing at run time",
            ),
        },
    ),
    "router/scheduling": Rule(WORLD | GRPC, {}),
    "worker/engine": Rule(
        WORLD | GRPC | PROTOBUF, {"worker/engine/core.py": (CLOCK, "measures steps; its scheduler takes `now`")}
    ),
    "worker/session": Rule(
        WORLD | GRPC,
        {
            "worker/session/service.py": (WORLD | GRPC, SERVES),
            "worker/session/session_stream.py": (WORLD | GRPC, EVENT_LOOP),
            "worker/session/direct_call.py": (WORLD | GRPC, EVENT_LOOP),
            "worker/session/engine_loop.py": (WORLD, EVENT_LOOP),
            "worker/session/engine_thread.py": (WORLD, "the engine's thread"),
            "worker/session/intake.py": (GRPC, STATUS),
            "worker/session/request_trace.py": (GRPC, STATUS),
            "worker/session/session.py": (GRPC, STATUS),
        },
    ),
    "worker/config": Rule(
        WORLD | GRPC, {"worker/config/engine_config.py": (names("os"), "reads how much memory there is")}
    ),
    "worker/simulation": Rule(
        WORLD | GRPC, {"worker/simulation/runner.py": (CLOCK, "sleeps for as long as a step takes")}
    ),
    "router/api": Rule(
        WORLD | GRPC,
        {
            "router/api/inference.py": (WORLD | GRPC, SERVES),
            "router/api/answering.py": (IO | GRPC, EVENT_LOOP),
            "router/api/admin.py": (WORLD | GRPC, SERVES),
            "router/api/gathering.py": (IO, EVENT_LOOP),
            "router/api/auditing.py": (IO, EVENT_LOOP),
            "router/api/kv_auditing.py": (IO, EVENT_LOOP),
            "router/api/verdicts.py": (IO | GRPC, EVENT_LOOP),
            "router/api/rpc_scope.py": (WORLD | GRPC, SERVES),
            "router/api/shutdown.py": (IO, EVENT_LOOP),
        },
    ),
    "router/text": Rule(
        WORLD | GRPC,
        {
            "router/text/prompts.py": (IO, "runs tokenizers in threads"),
            "router/text/tokenizer_store.py": (WORLD | GRPC, "fetches tokenizers from workers"),
        },
    ),
    "router/requests": Rule(
        WORLD | GRPC,
        {
            "router/requests/request_router.py": (WORLD, EVENT_LOOP),
            "router/requests/running.py": (IO, EVENT_LOOP),
            "router/requests/stream.py": (IO | GRPC, EVENT_LOOP),
            "router/requests/write_pacer.py": (IO, EVENT_LOOP),
        },
    ),
    "router/workers": Rule(
        WORLD | GRPC,
        {
            "router/workers/discovery.py": (IO, EVENT_LOOP),
            "router/workers/expected_workers.py": (IO, EVENT_LOOP),
            "router/workers/orphans.py": (IO, EVENT_LOOP),
            "router/workers/session.py": (IO | GRPC, EVENT_LOOP),
            "router/workers/worker_pool.py": (WORLD, EVENT_LOOP),
            "router/workers/worker_record.py": (IO, EVENT_LOOP),
        },
    ),
    "router/runtime_config.py": Rule(WORLD | GRPC, {}),
    "router/model_registry.py": Rule(WORLD | GRPC, {}),
    "router/validation.py": Rule(WORLD | GRPC, {}),
    "common/block_hash.py": Rule(WORLD | GRPC, {}),
    "common/delay_gate.py": Rule(WORLD | GRPC, {}),
    "common/receipts.py": Rule(WORLD | GRPC, {}),
    "common/sampling_params.py": Rule(WORLD | GRPC, {}),
    "common/process": Rule(
        WORLD | GRPC,
        {
            "common/process/exec_child.py": (IO, "becomes another program"),
            "common/process/tasks.py": (WORLD, EVENT_LOOP),
        },
    ),
    "common/cli/bench": Rule(
        WORLD | GRPC,
        {
            "common/cli/bench/command.py": (WORLD, CLI),
            "common/cli/bench/plan.py": (IO, CLI),
            "common/cli/bench/target.py": (IO | GRPC, "calls a router"),
            "common/cli/bench/service.py": (WORLD | GRPC, "calls a router"),
            "common/cli/bench/offline.py": (CLOCK, "measures an engine"),
            "common/cli/bench/machine.py": (IO, "reads /proc"),
            "common/cli/bench/dataset.py": (IO, "draws by a seed"),
            "common/cli/bench/load.py": (IO, "draws by a seed"),
            "common/cli/bench/workload.py": (IO, "draws by a seed"),
        },
    ),
}

# Files that import others of ours inside functions, and why.
LATE_IMPORTS = {
    "common/cli/main.py": "an old Python gets one line before anything is imported that it cannot parse",
    "common/cli/client/generate.py": "tokenizers, which only --offline needs, may not be installed",
    "kernels/select.py": "Triton and AITER may not be installed, and take seconds",
    "worker/cli/worker.py": "its subcommand `warmup` takes its options from it",
    "worker/engine_factory.py": "PyTorch takes seconds: on the engine's thread, and not when simulated or with ranks",
    "worker/cli/bench.py": "PyTorch takes seconds: `fissile bench offline --help` does without",
    "worker/cli/warmup.py": "PyTorch takes seconds: `fissile worker warmup --help` does without",
    "worker/ranks/rank_process.py": "PyTorch takes seconds: the rank answers its engine before",
}
# Pairs of places where types alone make a ring, and why.
TYPING_RINGS = {
    ("worker/config", "worker/model"): "architectures.py names what a class of a model must take",
    ("worker/config", "worker/weights"): "architectures.py names what a class of a model must take",
}


@dataclass(frozen=True)
class Imports:
    """Modules that a file imports: when it is loaded, inside functions, and for types alone."""

    at_load: frozenset[str]
    late: frozenset[str]
    typing: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        return self.at_load | self.late | self.typing


def imports_of(source: str) -> Imports:
    """Dotted names; of `from a import b` both `a` and `a.b`, which may be a module."""
    found: dict[str, set[str]] = {"": set(), "late": set(), "typing": set()}

    def visit(parent: ast.AST, kind: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                found[kind].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found[kind].update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(node, kind or "late")
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                visit(node, "typing")
            else:
                visit(node, kind)

    visit(ast.parse(source), "")
    return Imports(frozenset(found[""]), frozenset(found["late"]), frozenset(found["typing"]))


def packages(modules: Iterable[str]) -> set[str]:
    """Top-level names."""
    return {module.partition(".")[0] for module in modules}


def is_in(path: str, place: str) -> bool:
    """True if a file is that place, or below it."""
    return path == place or path.startswith(place + "/")


def violations(path: str, source: str) -> list[str]:
    """What a file imports although it must not."""
    imported = packages(imports_of(source).all)
    package = path.partition("/")[0]
    forbidden = (imported & OURS) - MAY_IMPORT[package] - {package}
    for folder, rule in RULES.items():
        if is_in(path, folder):
            excepted = [some for place, (some, _) in rule.exceptions.items() if is_in(path, place)]
            forbidden |= (imported & rule.forbidden).difference(*excepted)
    return sorted(forbidden)


@cache
def sources() -> Mapping[str, str]:
    """Every file of ours by its path; the stubs are below `fissile`."""
    folders = {package: ROOT / ("protos/fissile" if package == "fissile" else package) for package in MAY_IMPORT}
    return {
        str(package / path.relative_to(folder)): path.read_text(encoding="utf-8")
        for package, folder in ((Path(name), folder) for name, folder in folders.items())
        for path in sorted(folder.rglob("*.py"))
    }


@cache
def graph() -> Mapping[str, Imports]:
    """Our files without the stubs, and of what they import the paths of our files."""
    return graph_of({path: source for path, source in sources().items() if not path.startswith("fissile/")})


def graph_of(files: Mapping[str, str]) -> Mapping[str, Imports]:
    """Files by path, and of what they import the paths among them."""
    by_module = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}

    def paths(modules: frozenset[str]) -> frozenset[str]:
        # `from package import module` loads the package too, but only the module is meant.
        return frozenset(
            by_module[each]
            for each in modules
            if each in by_module
            and not (
                by_module[each].endswith("__init__.py")
                and any(m.startswith(each + ".") and m in by_module for m in modules)
            )
        )

    found = {path: imports_of(source) for path, source in files.items()}
    return {path: Imports(paths(each.at_load), paths(each.late), paths(each.typing)) for path, each in found.items()}


def place_of(path: str) -> str:
    """The package of a file, as a reader sees it: the second folder (the third below common/cli), or a file there."""
    return "/".join(path.split("/")[: 3 if path.startswith("common/cli/") else 2])


def between_places(edges: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Edges between files as edges between places."""
    found: dict[str, set[str]] = {}
    for path, others in edges.items():
        found.setdefault(place_of(path), set()).update({place_of(each) for each in others} - {place_of(path)})
    return found


def ring(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """A ring of edges, or nothing."""
    done: set[str] = set()
    way: list[str] = []

    def walk(node: str) -> Iterator[list[str]]:
        if node in way:
            yield [*way[way.index(node) :], node]
        elif node not in done:
            way.append(node)
            for each in sorted(edges.get(node, ())):
                yield from walk(each)
            way.pop()
            done.add(node)

    return next((found for node in sorted(edges) for found in walk(node)), [])


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_file_keeps_the_rules(package: str) -> None:
    found = {
        path: wrong
        for path, source in sources().items()
        if is_in(path, package) and (wrong := violations(path, source))
    }
    assert found == {}


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
def test_a_wrong_import_is_found(path: str, source: str, expected: list[str]) -> None:
    assert violations(path, source) == expected


def others_of(package: str) -> frozenset[str]:
    """Packages of ours that a package must not import."""
    return OURS - MAY_IMPORT[package] - {package}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_package_that_must_not_be_imported_is_found(package: str) -> None:
    """One import put the wrong way, at the top, late or for types, is found and nothing else."""
    for other in sorted(others_of(package)):
        for source in (
            f"import {other}.module",
            f"def f():\n    from {other} import module",
            f"if TYPE_CHECKING:\n    import {other}",
        ):
            assert violations(f"{package}/folder/anything.py", source) == [other]
    for other in MAY_IMPORT[package]:
        assert violations(f"{package}/folder/anything.py", f"import {other}.module") == []


@pytest.mark.parametrize("folder", RULES)
def test_each_rule_finds_what_it_forbids(folder: str) -> None:
    """Each forbidden module in a file of the folder, and in those below it, is found and nothing else."""
    rule = RULES[folder]
    files = [folder] if folder.endswith(".py") else [f"{folder}/anything.py", f"{folder}/deeper/anything.py"]
    for path in files:
        for module in sorted(rule.forbidden):
            assert violations(path, f"def f():\n    import {module}.part") == [module]
            assert violations(path, "import json, math, dataclasses") == []


@pytest.mark.parametrize(
    ("folder", "place"), [(folder, place) for folder, rule in RULES.items() for place in rule.exceptions]
)
def test_an_exception_excepts_only_what_it_says(folder: str, place: str) -> None:
    """A file of its place may import that, and nothing else that the rule forbids."""
    rule = RULES[folder]
    path = place if place.endswith(".py") else f"{place}/anything.py"
    modules = sorted(rule.forbidden)
    expected = sorted(rule.forbidden - rule.exceptions[place][0])
    found = violations(path, f"import {', '.join(modules)}")
    assert [module for module in found if module in rule.forbidden] == expected


@pytest.mark.parametrize("folder", RULES)
def test_exceptions_are_needed(folder: str) -> None:
    """Places exist, and a file that no longer imports what it may leaves the list."""
    paths = [path for path in sources() if is_in(path, folder)]
    assert paths
    for place, (excepted, _) in RULES[folder].exceptions.items():
        used = {name for path in paths if is_in(path, place) for name in packages(imports_of(sources()[path]).all)}
        assert used & excepted, place


def test_without_pytorch_nothing_loads_it() -> None:
    """Nothing that loads with the router or the deciding side of a worker imports PyTorch, not even through others."""
    begin = [path for path in graph() if path.startswith(("router/", "common/", "worker/engine/", "worker/session/"))]
    reached, ahead = set(begin), list(begin)
    while ahead:
        new = graph()[ahead.pop()].at_load - reached
        reached |= new
        ahead.extend(new)
    loading = [path for path in sorted(reached) if packages(imports_of(sources()[path]).at_load) & TORCH]
    assert loading == []


def test_modules_load_without_rings() -> None:
    assert ring({path: each.at_load for path, each in graph().items()}) == []


def test_a_ring_of_files_is_found() -> None:
    """Two files that import each other make a ring when loaded; one that imports late makes one of packages only."""
    files = {
        "router/a/one.py": "from router.b import two",
        "router/b/two.py": "def f():\n    from router.a.one import thing",
    }
    found = graph_of(files)
    assert ring({path: each.at_load for path, each in found.items()}) == []
    assert ring(between_places({path: each.at_load | each.late for path, each in found.items()})) == [
        "router/a",
        "router/b",
        "router/a",
    ]
    found = graph_of({**files, "router/b/two.py": "from router.a.one import thing"})
    assert ring({path: each.at_load for path, each in found.items()}) == [
        "router/a/one.py",
        "router/b/two.py",
        "router/a/one.py",
    ]


def test_packages_have_no_rings() -> None:
    """Late imports count: a ring is none the better for being closed at run time."""
    assert ring(between_places({path: each.at_load | each.late for path, each in graph().items()})) == []


def test_rings_of_types_are_those_listed() -> None:
    edges = between_places({path: each.all for path, each in graph().items()})
    kept = {place: {other for other in others if (place, other) not in TYPING_RINGS} for place, others in edges.items()}
    assert ring(kept) == []
    assert [pair for pair in TYPING_RINGS if pair[1] not in edges[pair[0]]] == []


def test_a_ring_is_found() -> None:
    assert ring({"a": ["b"], "b": ["c", "d"], "d": ["b"]}) == ["b", "d", "b"]
    assert ring({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_late_imports_have_a_reason() -> None:
    assert {path for path, each in graph().items() if each.late} == set(LATE_IMPORTS)
