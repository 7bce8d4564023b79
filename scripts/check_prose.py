"""Checks what a program can check of CONTRIBUTING.md's rules for prose: `python scripts/check_prose.py PATH...`.

- A docstring begins with a verb or a noun: not with a relative or question word, and not with a pronoun.
- A predicate's docstring begins with "True if"; that of another function returning bool says when it returns which.
- Help texts begin with a capital letter and end with a full stop.
- Log events are phrases: they begin with a small letter or a name, and end without a full stop.
- Errors say that something "is not a list", not that it "is no list".
- A private function or a property has a docstring of more than three words, or none.

- The first sentence of a docstring has at most 25 words.

Without a PATH, words and phrases that mark unclear sentences (`MARKERS`) are counted over all files. The count may only
fall: whoever lowers it lowers `MOST_MARKERS` too.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

# Words and phrases of sentences that often have to be read twice.
MARKERS: Final = re.compile(
    r"\b(what (it|has|waits)|nobody|nothing|somebody|where there|so many|so much|stands|those of|has come|goes on"
    r"|brings|brought|likewise|as of|is for|for itself)\b",
    re.IGNORECASE,
)
MOST_MARKERS: Final = 448
_MAX_FIRST_WORDS: Final = 25
_FIRST_WORDS = frozenset(
    ["What", "Whether", "That", "Those", "Of", "How", "Who", "Which", "Where", "When", "It", "They"]
)
_FOLDERS = ("router", "worker", "common", "kernels", "facade", "protos/fissile/client", "deploy", "scripts", "examples")
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
    if (count := len(re.split(r"\n\n|(?<=[.:;])\s", text, maxsplit=1)[0].split())) > _MAX_FIRST_WORDS:
        yield f"first sentence of the docstring has {count} words; at most {_MAX_FIRST_WORDS}"
    if isinstance(node, _Function) and len(text.split()) <= 3 and _needs_no_docstring(node, text):
        yield f"docstring {text!r} of {node.name} says no more than the name; delete it, or say more"
    if not isinstance(node, _Function) or not _returns_bool(node) or text.startswith(("True if ", "See ")):
        return
    if _is_predicate(node):
        yield 'docstring of a predicate begins otherwise than with "True if"'
    elif not re.search(r"\b(True|False)\b", text):
        yield "docstring does not say when the function returns True or False"


def _needs_no_docstring(node: _Function, text: str) -> bool:
    """True if a docstring of a few words can be deleted: of a private function or a property, without a shape."""
    is_private = node.name.startswith("_") and not node.name.endswith("__")
    return (is_private or _is_property(node)) and len(node.body) > 1 and not re.search(r"[\[(]", text)


def _is_property(node: _Function) -> bool:
    return bool({ast.unparse(mark) for mark in node.decorator_list} & {"property", "cached_property"})


def _returns_bool(node: _Function) -> bool:
    return isinstance(node.returns, ast.Name) and node.returns.id == "bool"


def _is_predicate(node: _Function) -> bool:
    return bool(_PREDICATE.match(node.name)) or _is_property(node)


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


def prose_of(source: str) -> Iterator[str]:
    """Docstrings and comments of a source file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|fmt:|!)", token.string):
            yield token.string.lstrip("# ")


def num_markers(sources: Iterable[str]) -> int:
    """Number of marker words in the docstrings and comments of source files."""
    return sum(len(MARKERS.findall(text)) for source in sources for text in prose_of(source))


def paths_below(names: Iterable[str]) -> list[Path]:
    """The named files, and the source files below the named folders, without generated ones."""
    found = [path for name in map(Path, names) for path in ([name] if name.is_file() else name.rglob("*.py"))]
    return sorted(path for path in found if "_pb2" not in path.name)


def main() -> int:
    """Prints all problems of the files, and of those below the folders, of the command line; 1 if there are any."""
    paths = paths_below(sys.argv[1:] or _FOLDERS)
    found = [line for path in paths for line in problems(path)]
    if not sys.argv[1:] and (count := num_markers(path.read_text() for path in paths)) > MOST_MARKERS:
        found.append(f"{count} marker words in docstrings and comments; at most {MOST_MARKERS} (MOST_MARKERS)")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
