"""Checks what a program can check of CONTRIBUTING.md's rules for prose: `python scripts/check_prose.py PATH...`.

- A docstring begins with a verb or a noun: not with a relative or question word, and not with a pronoun.
- A predicate's docstring begins with "True if"; that of another function returning bool says when it returns which.
- Help texts begin with a capital letter and end with a full stop.
- Log events are phrases: they begin with a small letter or a name, and end without a full stop.
- Errors say that something "is not a list", not that it "is no list".
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_FIRST_WORDS = frozenset(
    ["What", "Whether", "That", "Those", "Of", "How", "Who", "Which", "Where", "When", "It", "They"]
)
_FOLDERS = ("router", "worker", "common", "kernels", "protos/fissile/client", "deploy", "scripts", "examples")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PREDICATE = re.compile(r"_*(is|has|can|needs)_")
_IS_NO = re.compile(r"(?<!here )\b(is|are) no (?!longer\b)")
_LEVELS = frozenset(["debug", "info", "warning", "error", "critical", "exception"])


def problems(path: Path) -> Iterator[str]:
    """Lines `path:line: problem` for the prose of one source file."""
    for node in ast.walk(ast.parse(path.read_text())):
        for problem in _problems(node):
            yield f"{path}:{getattr(node, 'lineno', 1)}: {problem}"


def _problems(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
        yield from _of_docstring(node, text)
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield from _of_error(node.exc)
    if isinstance(node, ast.Call):
        yield from _of_help(node)
        yield from _of_log_event(node)


def _of_docstring(node: ast.AST, text: str) -> Iterator[str]:
    first = text.split(maxsplit=1)[0].rstrip(",:;.")
    if first in _FIRST_WORDS:
        yield f"docstring begins with {first!r}; begin with a verb or a noun"
    if not isinstance(node, _Function) or not _returns_bool(node) or text.startswith(("True if ", "See ")):
        return
    if _is_predicate(node):
        yield 'docstring of a predicate begins otherwise than with "True if"'
    elif not re.search(r"\b(True|False)\b", text):
        yield "docstring does not say when the function returns True or False"


def _returns_bool(node: _Function) -> bool:
    return isinstance(node.returns, ast.Name) and node.returns.id == "bool"


def _is_predicate(node: _Function) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return bool(_PREDICATE.match(node.name)) or bool(decorators & {"property", "cached_property"})


def _of_help(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        text = _constant(keyword.value) if keyword.arg in ("help", "short_help") else None
        if text and not (text[0].isupper() and text.endswith(".")):
            yield f"help {text[:40]!r}... is not a sentence: begin with a capital letter, end with a full stop"


def _of_log_event(call: ast.Call) -> Iterator[str]:
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in _LEVELS or "log" not in ast.unparse(function):
        return
    text = _constant(call.args[0]) if call.args else None
    if text and (text.endswith(".") or re.match(r"[A-Z][a-z]+ ", text)):
        yield f"log event {text!r} is not a phrase: begin with a small letter, end without a full stop"


def _of_error(raised: ast.expr) -> Iterator[str]:
    texts = [node.value for node in ast.walk(raised) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for text in texts:
        if found := _IS_NO.search(text):
            yield f"error {text[:40]!r}... has {found[0].strip()!r}: say that it is not one"


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def main() -> int:
    """Prints all problems of the files, and of those below the folders, of the command line; 1 if there are any."""
    named = [Path(name) for name in sys.argv[1:] or _FOLDERS]
    paths = sorted(path for each in named for path in ([each] if each.is_file() else each.rglob("*.py")))
    found = [line for path in paths for line in problems(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
