"""Checks that files, classes and functions stay small enough to be read: `python scripts/check_sizes.py`.

- A file has at most 500 lines of code: without comments, docstrings and blank lines.
- A class has at most 25 methods, properties and special methods apart. A function has at most 60 lines of code.

Generated stubs do not count. Classes are those of the service, not of tests; kernels are not functions of Python.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MOST_LINES: Final = 500
_MOST_METHODS: Final = 25
_MOST_FUNCTION_LINES: Final = 60
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE: Final = frozenset(
    [tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER]
)


def problems(path: Path, source: str) -> Iterator[str]:
    """Lines `path:line: problem` for what is too large in one source file."""
    tree = ast.parse(source)
    code = _code_lines(source, tree)
    count = len(code)
    if count > _MOST_LINES:
        yield f"{path}:1: {count} lines of code; cut it along its subjects, into files of at most {_MOST_LINES}"
    if path.parts[0] == "tests":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if (number := _num_methods(node)) > _MOST_METHODS:
                yield f"{path}:{node.lineno}: class {node.name} has {number} methods; at most {_MOST_METHODS}"
        elif isinstance(node, _Function) and not _is_kernel(node):
            number = len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
            if number > _MOST_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {number} lines of code; at most {_MOST_FUNCTION_LINES}"


def _code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines with code."""
    documented = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - documented


def _num_methods(node: ast.ClassDef) -> int:
    methods = [each for each in node.body if isinstance(each, _Function) and not each.name.startswith("__")]
    return sum(not any("property" in mark or ".setter" in mark for mark in _marks(each)) for each in methods)


def _is_kernel(node: _Function) -> bool:
    """True if Triton compiles a function: it has no other to call for a part of it."""
    return any("jit" in mark for mark in _marks(node))


def _marks(node: _Function) -> list[str]:
    return [ast.unparse(mark) for mark in node.decorator_list]


def main() -> int:
    """Prints what is too large of the files that git knows; 1 if there is any."""
    known = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    paths = [Path(name) for name in known if "_pb2" not in name and Path(name).is_file()]
    found = [line for path in paths for line in problems(path, path.read_text())]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
