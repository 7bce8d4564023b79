"""Texts tell people to install from a checkout, never by a package name.

`fissile` and `fissile-client` are unpublished, so anybody may register these names and run code on the machine of each
reader who installs them by name.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli.group import INSTALLED_BY

ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_SUFFIXES = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".Dockerfile", "Makefile")
# An install command, up to the end of its line or of its backticks.
_COMMAND = re.compile(r"\b(?:pipx? (?:install|download|wheel)|uv (?:add|pip install|tool install)|uvx)\b([^`\n]*)")
# One of our package names with extras, anywhere in a text. A field `fissile` of an object is none.
_EXTRAS_OF_A_NAME = re.compile(r"(?<!\.)\bfissile(?:-client)?\[")
# One of our package names as an argument of an install command.
_NAME = re.compile(r"(?:^|\s)['\"]?fissile(?:[-_]client)?(?:['\"]|\[|[=<>~]|\s|\)|$)")
_OWN = "tests/unit/test_install_texts.py"


def _texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name.endswith(_SUFFIXES) and name != _OWN and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text("utf-8")


def by_name(text: str) -> list[str]:
    """The lines of a text that install one of our packages by name."""
    return [
        line.strip()
        for line in text.splitlines()
        if _EXTRAS_OF_A_NAME.search(line) or any(_NAME.search(command[1]) for command in _COMMAND.finditer(line))
    ]


def test_no_text_installs_our_packages_by_name() -> None:
    assert {name: lines for name, text in _texts() if (lines := by_name(text))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install fissile-client",
        "run `pipx install 'fissile[router]'`, then",
        "python -m pip install --upgrade fissile==0.1.0",
        "uv pip install fissile",
        'f"install fissile[triton]"',
        "(`pip install fissile`)",
    ],
)
def test_install_by_package_name_is_found(line: str) -> None:
    assert by_name(line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "pip install ./protos '.[router]'",
        "fissile serve",
        "the distribution `fissile-client`",
        'choice.fissile["exact"]',
    ],
)
def test_install_from_checkout_is_not_found_by_name(line: str) -> None:
    assert by_name(line) == []


def folders(command: str) -> list[str]:
    """The folders among the arguments of an install command, with their extras."""
    words = re.findall(r"(?<=\s)['\"]?(\.(?:/\w+)?(?:\[[\w,]+\])?)['\"]?(?=[\s)`\"']|$)", f" {command}")
    return [word for word in words if word]


def test_folders_and_extras_of_install_commands_exist() -> None:
    seen = 0
    for name, text in _texts():
        if not name.endswith((".md", ".Dockerfile")) and name not in ("common/cli/group.py", "kernels/select.py"):
            continue
        for command in (found for line in text.splitlines() for found in _COMMAND.findall(line)):
            for folder in folders(command):
                path, _, extras = folder.partition("[")
                assert (ROOT / path / "pyproject.toml").is_file(), f"{name}: {command}"
                wanted = {extra for extra in extras.removesuffix("]").split(",") if extra}
                assert wanted <= _PROJECT["optional-dependencies"].keys(), f"{name}: {command}"
                # Without ./protos pip asks the package index for `fissile-client`.
                assert "protos" in command, f"{name}: {command}"
                seen += 1
    assert seen >= 10


def test_hint_for_missing_module_names_its_extra() -> None:
    """The hint for a missing module names an extra that requires the module."""
    distributions = {"dns": "dnspython", "smg_grpc_proto": "smg-grpc-proto"}
    for module, arguments in INSTALLED_BY.items():
        (service,) = [word for word in shlex.split(arguments) if word.startswith(".[")]
        extras = service.removeprefix(".[").removesuffix("]").split(",")
        brought = {
            re.split(r"[<>=;\[ ]", line)[0] for extra in extras for line in _PROJECT["optional-dependencies"][extra]
        }
        assert distributions.get(module, module) in brought, (module, extras)
