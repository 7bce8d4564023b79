"""Every option in a page, help text or error exists, and the command beside it takes it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.commands import KNOWN, LEAVES, names_of

ROOT = Path(__file__).parents[2]
_PRODUCT = ("common", "router", "worker", "kernels")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]+(?:-[a-z0-9]+)*(?![\w*])")
# A command in a code block or in backticks, up to the end of its line or span, or to a pipe or `#`.
_COMMAND = re.compile(r"\bfissile ((?:[a-z]+ ?)+)([^`\n|#]*)")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Options of other programs, by program.
FOREIGN = {
    "pip": {"--extra-index-url", "--index-url", "--constraint"},
    "docker": {"--build-arg", "--name", "--network", "--time", "--format", "--gpus", "--ulimit"},
    "kubectl": {"--replicas", "--from-literal"},
    "helm": {"--create-namespace", "--namespace", "--set"},
    "buf curl": {"--protocol", "--http2-prior-knowledge", "--list-methods"},
    "http.server": {"--bind", "--directory"},
    "pre-commit": {"--hook-stage"},
    "mypy": {"--strict"},
    "envoy": {"--drain-time-s"},
    "git": {"--short"},
    "srun": {"--nodes", "--ntasks-per-node", "--kill-on-bad-exit"},
    "torchrun": {"--nproc-per-node", "--no-python", "--master-addr"},
    "curl": {"--cacert", "--cert", "--key"},
    "linker": {"--exclude-libs", "--gc-sections"},
}


def _tracked(*suffixes: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name.endswith(suffixes) and (ROOT / name).is_file()]


PAGES = [name for name in _tracked(".md") if name != "CHANGELOG.md"]
SOURCES = [name for name in _tracked(".py") if name.split("/")[0] in _PRODUCT]


def literals(source: str) -> Iterator[str]:
    """The string literals of a module, including docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named(text: str) -> set[str]:
    """The options in a text."""
    return set(_OPTION.findall(text))


@cache
def known_in_pages() -> frozenset[str]:
    """All options, including those of the benchmarks, the scripts and the training of the demo model."""
    others = [ROOT / name for name in _tracked(".py") if name.split("/")[0] in ("tests", "scripts", "deploy")]
    sources = [source for other in others if '"--' in (source := other.read_text())]
    own = {text for source in sources for text in literals(source) if _OPTION.fullmatch(text)}
    return KNOWN.union(*FOREIGN.values(), own)


KNOWN_IN_SOURCES = KNOWN.union(*FOREIGN.values())


@pytest.mark.parametrize("page", PAGES)
def test_options_of_a_page_exist(page: str) -> None:
    assert named((ROOT / page).read_text()) - known_in_pages() == set()


@pytest.mark.parametrize("folder", _PRODUCT)
def test_options_of_helps_errors_and_docstrings_exist(folder: str) -> None:
    wrong = {
        source: missing
        for source in SOURCES
        if source.startswith(f"{folder}/")
        for text in literals((ROOT / source).read_text())
        if (missing := named(text) - KNOWN_IN_SOURCES)
    }
    assert wrong == {}


def commands_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the name of each `fissile` command in a text, with its options there.

    A `;`, `&`, `>`, `#`, pipe or closing bracket ends a command.
    """
    joined = text.replace("\\\n", " ")
    spans = [line for block in _CODE_BLOCK.findall(joined) for line in block.splitlines()]
    spans += re.findall(r"`([^`]+)`", _CODE_BLOCK.sub("", joined).replace("\n", " "))
    for span in spans:
        for words, rest in _COMMAND.findall(span):
            name = " ".join(words.split())
            while name and name not in LEAVES:
                name = name.rpartition(" ")[0]
            # `fissile config show COMMAND` takes the options of COMMAND.
            if name and name != "config show":
                yield name, named(re.split(r"[;&>)]", rest)[0])


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_pages_take_their_options(page: str) -> None:
    wrong = [
        (name, option)
        for name, options in commands_in((ROOT / page).read_text())
        for option in options - names_of(LEAVES[name]) - {"--help"}
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", _PRODUCT)
def test_commands_in_errors_and_helps_take_their_options(folder: str) -> None:
    wrong = [
        (source, name, option)
        for source in SOURCES
        if source.startswith(f"{folder}/")
        for text in literals((ROOT / source).read_text())
        for name, options in commands_in(text)
        for option in options - names_of(LEAVES[name]) - {"--help"}
    ]
    assert wrong == []


def test_wrong_options_are_found() -> None:
    assert named("leave out --data-parallel-size, or --no-tls") - KNOWN == {"--data-parallel-size"}
    page = (
        "Run `fissile worker\n--tensor-parallel 2`:\n"
        "```sh\nfissile bench serve --rate 2 \\\n  --drafts 4 | head --lines 2\n```\n"
    )
    assert sorted(commands_in(page)) == [("bench serve", {"--rate", "--drafts"}), ("worker", {"--tensor-parallel"})]
