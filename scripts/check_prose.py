"""Checks what a program can check of CONTRIBUTING.md's rules for docstrings: `python scripts/check_prose.py FOLDER...`.

A docstring begins with a verb or a noun: not with a relative or question word, and not with a pronoun.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_FIRST_WORDS = frozenset(
    ["What", "Whether", "That", "Those", "Of", "How", "Who", "Which", "Where", "When", "It", "They"]
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def problems(path: Path) -> Iterator[str]:
    """Lines `path:line: problem` for the docstrings of one source file."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        first = text.split(maxsplit=1)[0].rstrip(",:;.") if text else ""
        if first in _FIRST_WORDS:
            line = getattr(node, "lineno", 1)
            yield f"{path}:{line}: docstring begins with {first!r}; begin with a verb or a noun"


def main() -> int:
    """Prints all problems below the folders of the command line; 1 if there are any."""
    folders = sys.argv[1:] or ["router", "worker", "common", "kernels"]
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [line for path in paths for line in problems(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
