"""Signatures of the AITER functions that we call, in AITER's supported versions.

signatures.json beside this file holds them. AITER declares its compiled functions as stubs behind a decorator that
hides their parameters at run time. So parameters are read from the syntax trees of its sources, here and in the check
of an installed version (library.py); nothing of AITER is imported for it.

    python -m kernels.aiter.signatures FULL.json           keeps our calls, out of a file of all functions
    python -m kernels.aiter.signatures [FOLDER] 0.1.21     adds a version; FOLDER, or else $AITER_SRC, holds `aiter/`

Both rewrite the file for the current calls of our modules, which are read from their syntax trees.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_suffix(".json")
# Our modules that may call AITER.
CALLERS: Final = tuple(sorted(Path(__file__).parent.glob("*.py")))
# The method whose first argument names a function as `module:function`.
CALL: Final = "call"

# Parameters of a function as in its `def`, without annotations -> the versions that declare it so.
Variants = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Signatures:
    """Signatures of AITER's functions in several versions.

    Attributes:
        tags: the versions, the oldest first.
        functions: by `module:function`.
    """

    tags: tuple[str, ...]
    functions: Mapping[str, Variants]

    @classmethod
    def load(cls, path: Path = FILE) -> Signatures:
        """Reads a file that `save` wrote."""
        content = json.loads(path.read_text("utf-8"))
        functions = {
            name: {parameters: tuple(tags) for parameters, tags in variants.items()}
            for name, variants in content["functions"].items()
        }
        return cls(tuple(content["tags"]), functions)

    def save(self, path: Path = FILE) -> None:
        """Writes the file."""
        path.write_text(json.dumps({"tags": self.tags, "functions": self.functions}, indent=1) + "\n", "utf-8")

    def tags_of(self, function: str) -> frozenset[str]:
        """Versions of AITER that have a function."""
        return frozenset(tag for tags in self.functions.get(function, {}).values() for tag in tags)

    def parameters(self, function: str, tag: str) -> str | None:
        """Parameters of a function in one version; None if it lacks the function."""
        variants = self.functions.get(function, {})
        return next((parameters for parameters, tags in variants.items() if tag in tags), None)


@dataclass(frozen=True)
class LibraryCall:
    """A call of one of AITER's functions in our source.

    Attributes:
        function: `module:function`.
        positional: number of positional arguments.
        keywords: names of the other arguments.
        line: in our source.
    """

    function: str
    positional: int
    keywords: tuple[str, ...]
    line: int

    def problem(self, parameters: str) -> str | None:
        """Reason why the call does not fit these parameters; None if it fits."""
        try:
            signature(parameters).bind(*range(self.positional), **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"line {self.line}: {self.function}({parameters}): {error}"
        return None


def calls(source: str) -> list[LibraryCall]:
    """All calls of AITER's functions in a module of ours.

    Raises:
        ValueError: one cannot be read: the function's name is no literal, or arguments are spread with stars.
    """
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [_call(node) for node in nodes if isinstance(node.func, ast.Attribute) and node.func.attr == CALL]


def own_calls() -> list[LibraryCall]:
    """All calls of AITER's functions in our sources; see `calls`."""
    return [call for path in CALLERS for call in calls(path.read_text("utf-8"))]


def _call(node: ast.Call) -> LibraryCall:
    name, *positional = node.args or [ast.Constant(None)]
    keywords = [keyword.arg for keyword in node.keywords]
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str) or ":" not in name.value:
        raise ValueError(f"line {node.lineno}: the function's name is not a literal `module:function`")
    if None in keywords or any(isinstance(argument, ast.Starred) for argument in positional):
        raise ValueError(f"line {node.lineno}: arguments of {name.value} are spread with stars")
    return LibraryCall(name.value, len(positional), tuple(str(keyword) for keyword in keywords), node.lineno)


def signature(parameters: str) -> inspect.Signature:
    """Parameters as the signature of a Python function, to bind arguments to; defaults are texts."""
    function = ast.parse(f"def function({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return inspect.Signature(list(_parameters(function.args)))


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        only = index < len(arguments.posonlyargs)
        yield _parameter(argument, kinds.POSITIONAL_ONLY if only else kinds.POSITIONAL_OR_KEYWORD, default)
    if arguments.vararg is not None:
        yield _parameter(arguments.vararg, kinds.VAR_POSITIONAL, None)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, kinds.KEYWORD_ONLY, default)
    if arguments.kwarg is not None:
        yield _parameter(arguments.kwarg, kinds.VAR_KEYWORD, None)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    text = inspect.Parameter.empty if default is None else ast.unparse(default)
    return inspect.Parameter(argument.arg, kind, default=text)


def declared(source: Path, functions: Iterable[str]) -> dict[str, str]:
    """Parameters of the named functions in a source tree; later definitions of a name win, as in Python.

    Args:
        source: the folder that holds `aiter/`.
        functions: `module:function`.
    """
    wanted: dict[str, set[str]] = {}
    for function in functions:
        module, name = function.split(":")
        wanted.setdefault(module, set()).add(name)
    return {
        f"{module}:{node.name}": _text(node.args)
        for module, names in wanted.items()
        for node in _definitions(source, module)
        if node.name in names
    }


def _definitions(source: Path, module: str) -> Iterator[ast.FunctionDef]:
    path = source.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if file.is_file():
        tree = ast.parse(file.read_text("utf-8"))
        yield from (node for node in tree.body if isinstance(node, ast.FunctionDef))


def _text(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def normal(parameters: str) -> str:
    """Parameters as text in the form that `declared` returns."""
    function = ast.parse(f"def function({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return _text(function.args)


def from_full(content: Mapping[str, list[dict[str, Any]]], functions: Iterable[str]) -> Signatures:
    """Selects the named functions from a file of all: name -> [{"params": ..., "tags": ["v0.1.13", ...]}, ...]."""
    tags = {tag for variants in content.values() for variant in variants for tag in variant["tags"]}
    chosen = {
        name: {normal(each["params"]): tuple(tag.removeprefix("v") for tag in each["tags"]) for each in content[name]}
        for name in sorted(set(functions))
    }
    return Signatures(tuple(sorted((tag.removeprefix("v") for tag in tags), key=release)), chosen)


def with_version(known: Signatures, tag: str, found: Mapping[str, str], functions: Iterable[str]) -> Signatures:
    """Signatures of the named functions in `known`, with those of one more version added."""
    chosen: dict[str, Variants] = {}
    for name in sorted(set(functions)):
        others = {text: tuple(t for t in tags if t != tag) for text, tags in known.functions.get(name, {}).items()}
        if name in found:
            others[found[name]] = tuple(sorted((*others.get(found[name], ()), tag), key=release))
        chosen[name] = {text: tags for text, tags in others.items() if tags}
    return Signatures(tuple(sorted({*known.tags, tag}, key=release)), chosen)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: `0.1.20.post1+rocm7` is (0, 1, 20); () for a malformed version."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def main(arguments: list[str]) -> int:
    """Rewrites the file. Returns the exit code."""
    *folder, last = arguments or [""]
    source = Path(*folder) if folder else Path(os.environ.get("AITER_SRC", ""))
    functions = [call.function for call in own_calls()]
    if not folder and Path(last).is_file():
        from_full(json.loads(Path(last).read_text("utf-8")), functions).save()
    elif (source / "aiter").is_dir() and release(last):
        with_version(Signatures.load(), last, declared(source, functions), functions).save()
    else:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
