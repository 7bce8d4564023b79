"""Checks that imports follow the folders: `python scripts/check_imports.py`.

- Who may import whom: fissile <- common <- router, facade, and kernels, common <- worker; and the folders of these
  among each other.
- Folders that decide do no I/O and read no clock; folders that load with the router know no PyTorch.
- No ring of imports, neither of modules nor of packages. Within a package, imports follow an order of its folders.
- Imports inside functions have a reason.

Imports are read from the syntax trees, so those inside functions and under TYPE_CHECKING count too. A rule is about a
folder and all that is below it. A file that a rule does not hold for stands beside it with the reason, and an exception
that is no longer needed is a problem too. tests/unit/test_layering.py shows each rule what it has to find.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = frozenset(
    {"fissile", "common", "kernels", "router", "worker", "facade", "tests", "examples", "deploy", "scripts"}
)
# Package -> our packages that it may import besides itself.
MAY_IMPORT = {
    "fissile": frozenset[str](),
    "common": frozenset({"fissile"}),
    "kernels": frozenset[str](),
    "router": frozenset({"common", "fissile"}),
    "worker": frozenset({"common", "kernels", "fissile"}),
    "facade": frozenset({"common", "fissile"}),
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
    """Modules that no file in a folder imports; `exceptions` by file: what it imports all the same, and why."""

    forbidden: frozenset[str]
    exceptions: Mapping[str, tuple[frozenset[str], str]]


def names(*modules: str) -> frozenset[str]:
    """A set of names."""
    return frozenset(modules)


RULES = {
    "fissile": Rule(TORCH, {}),
    "fissile/seed.py": Rule(WORLD | GRPC, {}),
    "fissile/client/attempts.py": Rule(WORLD | GRPC, {}),
    "fissile/client/progress.py": Rule(WORLD | GRPC, {}),
    "common": Rule(
        TORCH, {"common/text/tokenizer_reading.py": (names("transformers"), "reads tokenizers, without PyTorch")}
    ),
    "router": Rule(TORCH, {}),
    "facade": Rule(TORCH, {}),
    # Translators are pure: bytes and events in, calls and bytes out.
    "facade/openai": Rule(WORLD | GRPC, {}),
    "facade/anthropic": Rule(WORLD | GRPC, {}),
    "facade/http": Rule(
        WORLD | GRPC,
        {
            "facade/http/errors.py": (GRPC, STATUS),
            "facade/http/exchange.py": (WORLD | GRPC, EVENT_LOOP),
            "facade/http/runner.py": (WORLD, EVENT_LOOP),
            "facade/http/sse.py": (IO, EVENT_LOOP),
            "facade/http/uploads.py": (IO | GRPC, EVENT_LOOP),
        },
    ),
    # The engine and the network side of a worker run without PyTorch: a simulated worker, and one whose ranks have it.
    "worker": Rule(
        TORCH,
        {
            "worker/model": (TORCH, "the model is PyTorch's"),
            "worker/weights": (TORCH, "weights are tensors"),
            "worker/ranks/rank_process.py": (TORCH, "imports it late, in the process of a rank"),
            "worker/ranks/collectives.py": (TORCH, "is imported by rank processes only"),
            "worker/ranks/mesh.py": (TORCH, "is imported by rank processes only"),
            "worker/config/transformers_config.py": (
                names("transformers"),
                "its config classes, which need no PyTorch (common/text/deferred_torch.py)",
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
            "worker/session/sequence_span.py": (GRPC, STATUS),
            "worker/session/session.py": (GRPC, STATUS),
        },
    ),
    "worker/doors": Rule(
        WORLD | GRPC,
        {
            "worker/doors/block_follower.py": (IO | GRPC, EVENT_LOOP),
            "worker/doors/door_adapter.py": (WORLD | GRPC, SERVES),
            "worker/doors/door_call.py": (IO | GRPC, EVENT_LOOP),
            "worker/doors/openengine_responses.py": (GRPC, STATUS),
            "worker/doors/openengine_service.py": (WORLD | GRPC, SERVES),
            "worker/doors/served_doors.py": (GRPC, SERVES),
            "worker/doors/vllm_engine.py": (WORLD | GRPC, SERVES),
            "worker/doors/vllm_inference.py": (GRPC, SERVES),
            "worker/doors/vllm_inference_messages.py": (GRPC, STATUS),
        },
    ),
    "worker/config": Rule(
        WORLD | GRPC, {"worker/config/engine_config.py": (names("os"), "finds the user's cache folder")}
    ),
    "worker/simulation": Rule(
        WORLD | GRPC, {"worker/simulation/runner.py": (CLOCK, "sleeps for as long as a step takes")}
    ),
    "router/api": Rule(
        WORLD | GRPC,
        {
            "router/api/answer_writer.py": (IO | GRPC, EVENT_LOOP),
            "router/api/admin.py": (WORLD | GRPC, SERVES),
            "router/api/external_scaler.py": (WORLD | GRPC, SERVES),
            "router/api/open_inference_stream.py": (IO | GRPC, EVENT_LOOP),
            "router/api/prompt_batch.py": (IO, EVENT_LOOP),
            "router/api/rpc_scope.py": (WORLD | GRPC, SERVES),
            "router/api/shutdown.py": (IO, EVENT_LOOP),
        },
    ),
    "router/audit": Rule(
        WORLD | GRPC,
        {
            "router/audit/answer_auditor.py": (IO, EVENT_LOOP),
            "router/audit/kv_auditor.py": (IO, EVENT_LOOP),
            "router/audit/verdicts.py": (IO | GRPC, EVENT_LOOP),
        },
    ),
    "router/answers": Rule(
        WORLD | GRPC, {"router/answers/channels/probe.py": (CLOCK, "bounds the time of a template's probes")}
    ),
    "router/prompts": Rule(
        WORLD | GRPC,
        {
            "router/prompts/prompts.py": (IO, "runs tokenizers in threads"),
            "router/prompts/tokenizer_store.py": (WORLD | GRPC, "fetches tokenizers from workers"),
        },
    ),
    "router/requests": Rule(
        WORLD | GRPC,
        {
            "router/requests/request_router.py": (WORLD, EVENT_LOOP),
            "router/requests/running.py": (IO, EVENT_LOOP),
            "router/requests/stream.py": (IO | GRPC, EVENT_LOOP),
        },
    ),
    "router/workers": Rule(
        WORLD | GRPC,
        {
            "router/workers/discovery.py": (IO, EVENT_LOOP),
            "router/workers/expected_workers.py": (IO, EVENT_LOOP),
            "router/workers/orphans.py": (IO, EVENT_LOOP),
            "router/workers/session.py": (IO | GRPC, EVENT_LOOP),
            "router/workers/worker_intake.py": (IO, EVENT_LOOP),
            "router/workers/worker_pool.py": (WORLD, EVENT_LOOP),
            "router/workers/worker_record.py": (IO, EVENT_LOOP),
        },
    ),
    "router/runtime_config.py": Rule(WORLD | GRPC, {}),
    "router/model_registry.py": Rule(WORLD | GRPC, {}),
    "router/validation.py": Rule(WORLD | GRPC, {}),
    "common/wire/block_hash.py": Rule(WORLD | GRPC, {}),
    "common/delay_gate.py": Rule(WORLD | GRPC, {}),
    "common/params/sampling_params.py": Rule(WORLD | GRPC, {}),
    "common/process": Rule(
        WORLD | GRPC,
        {
            "common/process/available_memory.py": (IO, "reads how much memory there is"),
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
            "common/cli/bench/machine.py": (IO, "reads /proc"),
            "common/cli/bench/dataset.py": (IO, "draws by a seed"),
            "common/cli/bench/load.py": (IO, "draws by a seed"),
            "common/cli/bench/workload.py": (IO, "draws by a seed"),
        },
    ),
}

# Place -> places of its own package that it may import; docs/explanation/architecture.md has the same table.
BESIDE = {
    "router/api": names(
        "answers",
        "model_registry.py",
        "prompts",
        "requests",
        "runtime_config.py",
        "scheduling",
        "telemetry",
        "validation.py",
        "workers",
    ),
    "router/cli": names(),
    "router/audit": names("answers", "api", "model_registry.py", "prompts", "requests", "scheduling", "workers"),
    "router/requests": names("answers", "model_registry.py", "scheduling", "workers"),
    "router/workers": names("answers", "model_registry.py", "prompts", "scheduling"),
    "router/telemetry": names("scheduling", "workers"),
    "router/prompts": names("answers", "model_registry.py", "scheduling", "validation.py"),
    "router/scheduling": names(),
    "router/answers": names(),
    "router/validation.py": names("answers"),
    "router/model_registry.py": names("answers"),
    "worker/doors": names("config", "engine", "llm_engine.py", "session"),
    "worker/session": names("config", "engine", "garbage.py"),
    "worker/engine": names(),
    "worker/ranks": names("config", "engine", "garbage.py", "kv_pool.py", "model", "progress.py"),
    "worker/model": names(
        "config", "engine", "grammars.py", "kv_pool.py", "model_download.py", "progress.py", "weights"
    ),
    "worker/weights": names("config"),
    "worker/kv_tiers": names(),
    "worker/config": names(),
    "worker/simulation": names("config", "engine", "kv_pool.py"),
    "worker/kv_pool.py": names("config"),
    "worker/model_download.py": names("blob_download.py", "hub_client.py"),
    "worker/blob_download.py": names(),
    "worker/hub_client.py": names(),
    "facade/http": names(),
    "facade/openai": names("http"),
    "facade/anthropic": names("http"),
}

# Folders and files of each package, the highest first: one imports only what is below it, for types too.
ORDER = {
    "common": (
        "cli/main.py",
        "cli/serve",
        "cli/bench",
        "cli/client",
        "cli/config.py",
        "cli/version.py",
        "cli/group.py",
        "cli/core",
        "rpc",
        "telemetry",
        "process",
        "text",
        "wire",
        "config.py",
        "params",
        "constraints",
        "hub.py",
        "delay_gate.py",
        "files.py",
        "errors.py",
        "json_text.py",
        "version.py",
        "limits.py",
    ),
    "router": (
        "__main__.py",
        "cli",
        "app.py",
        "options.py",
        "security.py",
        "audit",
        "api",
        "runtime_config.py",
        "telemetry",
        "requests",
        "workers",
        "prompts",
        "memory.py",
        "validation.py",
        "model_registry.py",
        "answers",
        "scheduling",
    ),
    "worker": (
        "__main__.py",
        "cli",
        "server.py",
        "step_dumps.py",
        "doors",
        "llm_engine.py",
        "session",
        "engine_factory.py",
        "ranks",
        "model",
        "weights",
        "kv_tiers",
        "simulation",
        "kv_pool.py",
        "config",
        "engine",
        "grammars.py",
        "model_download.py",
        "blob_download.py",
        "hub_client.py",
        "progress.py",
        "garbage.py",
    ),
    "facade": ("__main__.py", "server.py", "app.py", "options.py", "fleet_metrics.py", "anthropic", "openai", "http"),
    "kernels": (
        "select.py",
        "aiter",
        "triton_backend",
        "cpu",
        "torch_backend",
        "logprobs.py",
        "sampling.py",
        "decoder_layers.py",
        "quantized_weight.py",
        "interface.py",
        "grouped_weight.py",
        "penalties.py",
        "philox.py",
        "no_token.py",
        "upload.py",
        "float8.py",
        "large_pages.py",
    ),
}

# Files that import others of ours inside functions, and why.
LATE_IMPORTS = {
    "common/cli/main.py": "an old Python gets one line before anything is imported that it cannot parse",
    "common/cli/client/generate.py": "tokenizers, which only --offline needs, may not be installed",
    "common/cli/client/chat.py": "prompt_toolkit takes a tenth of a second: `fissile --help` and pipes do without",
    "kernels/select.py": "Triton and AITER may not be installed, and take seconds",
    "worker/doors/served_doors.py": "the stubs of a protocol may not be installed",
    "worker/engine_factory.py": "PyTorch takes seconds: on the engine's thread, and not when simulated or with ranks",
    "worker/cli/bench.py": "PyTorch takes seconds: `fissile bench offline --help` does without",
    "worker/cli/replay_step.py": "PyTorch takes seconds: `fissile replay-step --help` does without",
    "worker/cli/warmup.py": "PyTorch takes seconds: `fissile worker warmup --help` does without",
    "worker/ranks/rank_process.py": "PyTorch takes seconds: the rank answers its engine before",
}


@dataclass(frozen=True)
class Imports:
    """Modules that a file imports: when it is loaded, inside functions, and for types alone."""

    at_load: frozenset[str]
    late: frozenset[str]
    typing: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Modules of all three kinds."""
        return self.at_load | self.late | self.typing


@cache
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
    """Modules that a file imports although it must not."""
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


def graph_of(files: Mapping[str, str]) -> Mapping[str, Imports]:
    """Files by path, without the stubs, and of what they import the paths among them."""
    files = {path: source for path, source in files.items() if not path.startswith("fissile/")}
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


def problems(files: Mapping[str, str]) -> Iterator[str]:
    """Lines `path: problem` for what sources, by path, import."""
    for path, source in files.items():
        for module in violations(path, source):
            yield f"{path}: must not import {module}"
    ordered = [f"{package}/{place}" for package, places in ORDER.items() for place in places]
    for place in [*RULES, *BESIDE, *ordered]:
        if not any(is_in(path, place) for path in files):
            yield f"{place}: has a rule, and is not there"
    for place in _unneeded_exceptions(files):
        yield f"{place}: is excepted from a rule, and no longer needs to be"
    graph = graph_of(files)
    yield from beside(graph)
    yield from upward(graph)
    for path in _loading_torch(files, graph):
        yield f"{path}: loads PyTorch, and is loaded with the router or the deciding side of a worker"
    late = {path for path, each in graph.items() if each.late}
    for path in sorted(late - set(LATE_IMPORTS)):
        yield f"{path}: imports ours inside a function, without a reason in LATE_IMPORTS"
    for path in sorted(set(LATE_IMPORTS) - late):
        yield f"{path}: stands in LATE_IMPORTS, and imports nothing of ours inside a function"
    yield from _rings(graph)


def _unneeded_exceptions(files: Mapping[str, str]) -> Iterator[str]:
    """Places that a rule excepts and that do not import what they may."""
    for folder, rule in RULES.items():
        for place, (excepted, _) in rule.exceptions.items():
            sources = [source for path, source in files.items() if is_in(path, folder) and is_in(path, place)]
            if not any(packages(imports_of(source).all) & excepted for source in sources):
                yield place


def beside(graph: Mapping[str, Imports]) -> Iterator[str]:
    """Problems of places that import others of their own package."""
    for path, imports in graph.items():
        place = place_of(path)
        for other in sorted({place_of(each) for each in imports.at_load | imports.late} - {place}):
            top, _, name = other.partition("/")
            if place in BESIDE and is_in(place, top) and name not in BESIDE[place]:
                yield f"{path}: must not import {other}"


def upward(graph: Mapping[str, Imports]) -> Iterator[str]:
    """Problems of files that import a place above their own in ORDER, and of places that are not in ORDER."""
    rank = {f"{package}/{place}": i for package, places in ORDER.items() for i, place in enumerate(places)}
    missing = {place_of(path) for path in graph if not path.endswith("__init__.py")} - set(rank)
    yield from (f"{place}: is not in ORDER" for place in sorted(missing))
    for path, imports in graph.items():
        place = place_of(path)
        for other in sorted({place_of(each) for each in imports.all}):
            if place.partition("/")[0] == other.partition("/")[0] and rank.get(other, 0) < rank.get(place, 0):
                yield f"{path}: imports {other}, which is above it in ORDER"


def _loading_torch(files: Mapping[str, str], graph: Mapping[str, Imports]) -> Iterator[str]:
    """Files that load PyTorch and are loaded, maybe by others, with the router or the deciding side of a worker."""
    begin = [path for path in graph if path.startswith(("router/", "common/", "worker/engine/", "worker/session/"))]
    reached, ahead = set(begin), list(begin)
    while ahead:
        new = graph[ahead.pop()].at_load - reached
        reached |= new
        ahead.extend(new)
    for path in sorted(reached):
        if packages(imports_of(files[path]).at_load) & TORCH:
            yield path


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, sorted."""
    reach = {node: _reached(edges, node) for node in edges}
    groups = {tuple(sorted(other for other in found if node in reach.get(other, ()))) for node, found in reach.items()}
    return sorted(list(group) for group in groups if group)


def _reached(edges: Mapping[str, Iterable[str]], start: str) -> set[str]:
    """Nodes that one or more edges lead to from `start`."""
    reached, ahead = set[str](), list(edges[start])
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead.extend(edges.get(node, ()))
    return reached


def _rings(graph: Mapping[str, Imports]) -> Iterator[str]:
    """Rings of modules and of packages; late imports count, and so do those for types."""
    imports = {path: each.all for path, each in graph.items()}
    kinds: dict[str, Mapping[str, Iterable[str]]] = {"modules": imports, "packages": between_places(imports)}
    for what, edges in kinds.items():
        for group in circles(edges):
            yield f"{group[0]}: a ring of {what}: {', '.join(group)}"


def main() -> int:
    """Prints what is imported the wrong way; 1 if there is any."""
    found = list(problems(sources()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
