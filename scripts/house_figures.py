"""Counts what shows how readable the tree is: `python -m scripts.house_figures [--check]`.

Prints each figure with its goal. `--check`, which `make lint` runs, fails if a figure is above its limit in `LIMITS`.
Limits may only fall: whoever lowers a figure lowers its limit too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from scripts.check_imports import Imports, circles, graph_of, is_in, sources, upward
from scripts.check_prose import num_markers, prose_of

MAX_METHODS: Final = 25
MAX_CLASS_LINES: Final = 350
MIN_FILE_LINES: Final = 60
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# Nouns that end like participles.
_NOUNS: Final = frozenset(
    ["Embed", "Embedding", "Nothing", "Pooling", "Reading", "Ring", "Seed", "Setting", "Speed", "String"]
)
# Places whose classes may be named by what a layer or kernel does.
_PARTICIPLES_ALLOWED: Final = ("kernels", "worker/model")

# Figure -> its goal.
GOALS: Final = {
    "import circles": 0,
    "upward imports": 0,
    "lines of common": 16_000,
    "files of common with one user": 0,
    "class names twice": 0,
    "classes named by participles": 0,
    "large classes": 0,
    "short files": 60,
    "marker words per 1,000": 5,
}
# Figure -> the most that `make lint` allows, where that is not the goal.
LIMITS: Final = {
    "lines of common": 23_000,
}


def figures(files: Mapping[str, str]) -> dict[str, list[str] | float]:
    """Each figure of the source files by path: the found names, or a number."""
    graph = graph_of(files)
    ours = {path: source for path, source in files.items() if not path.startswith("fissile/")}
    programs = [path for path, source in ours.items() if '__name__ == "__main__"' in source]
    words = sum(len(text.split()) for source in ours.values() for text in prose_of(source))
    return {
        "import circles": [" ".join(group) for group in circles({path: each.all for path, each in graph.items()})],
        "upward imports": list(upward(graph)),
        "lines of common": sum(source.count("\n") for path, source in ours.items() if is_in(path, "common")),
        "files of common with one user": list(of_one_user(graph, programs)),
        "class names twice": list(names_twice(ours)),
        "classes named by participles": list(participles(ours)),
        "large classes": list(large_classes(ours)),
        "short files": list(short_files(ours)),
        "marker words per 1,000": round(1000 * num_markers(ours.values()) / max(1, words), 1),
    }


def of_one_user(graph: Mapping[str, Imports], programs: Collection[str]) -> Iterator[str]:
    """Files of common that only the router or only the worker needs, and neither the command line nor a program."""
    users: dict[str, set[str]] = {}
    for user in ("router", "worker", "common/cli"):
        ahead = [path for path in graph if is_in(path, user) or (user == "common/cli" and path in programs)]
        while ahead:
            path = ahead.pop()
            if user not in users.setdefault(path, set()):
                users[path].add(user)
                ahead.extend(graph[path].all)
    for path in sorted(graph):
        if is_in(path, "common") and not path.endswith("__init__.py"):
            found = users.get(path, set())
            if "common/cli" not in found and found != {"router", "worker"}:
                yield f"{path} ({', '.join(found) or 'no user'})"


def _classes(files: Mapping[str, str]) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, source in files.items():
        yield from ((path, node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def names_twice(files: Mapping[str, str]) -> Iterator[str]:
    """Class names that more than one class has."""
    found = [(node.name, path) for path, node in _classes(files)]
    counts = Counter(name for name, _ in found)
    for name in sorted(name for name, count in counts.items() if count > 1):
        yield f"{name} ({', '.join(path for each, path in found if each == name)})"


def participles(files: Mapping[str, str]) -> Iterator[str]:
    """Classes whose name ends with a participle, such as Landing, where a noun is asked for."""
    for path, node in _classes(files):
        last = re.findall(r"[A-Z][a-z]*|[a-z]+", node.name)[-1]
        is_allowed = last in _NOUNS or any(is_in(path, place) for place in _PARTICIPLES_ALLOWED)
        if last.endswith(("ing", "ed")) and not is_allowed:
            yield f"{path}: {node.name}"


def large_classes(files: Mapping[str, str]) -> Iterator[str]:
    """Classes with more than 25 methods, properties included, or more than 350 lines."""
    for path, node in _classes(files):
        methods = {each.name for each in node.body if isinstance(each, _Function) and not each.name.startswith("__")}
        lines = (node.end_lineno or 0) - node.lineno + 1
        if len(methods) > MAX_METHODS or lines > MAX_CLASS_LINES:
            yield f"{path}: {node.name} ({len(methods)} methods, {lines} lines)"


def short_files(files: Mapping[str, str]) -> Iterator[str]:
    """Source files with fewer than 60 lines, without those that make a folder a package or a program.

    Architectures do not count either: each has a file, however short.
    """
    for path, source in sorted(files.items()):
        is_own = path.endswith(("__init__.py", "__main__.py")) or is_in(path, "worker/model/models")
        if source.count("\n") < MIN_FILE_LINES and not is_own:
            yield path


def main() -> int:
    """Prints the figures, with names for those above their goals; with `--check` those above their limits, and 1."""
    is_check = sys.argv[1:] == ["--check"]
    failed = 0
    for name, found in figures(sources()).items():
        value = len(found) if isinstance(found, list) else found
        limit = LIMITS.get(name, GOALS[name])
        failed |= value > limit
        if value > limit or not is_check:
            print(f"{name}: {value} (goal {GOALS[name]}, limit {limit})")
            if isinstance(found, list) and value > (limit if is_check else GOALS[name]):
                print(*(f"  {each}" for each in found), sep="\n")
    return int(failed and is_check)


if __name__ == "__main__":
    sys.exit(main())
