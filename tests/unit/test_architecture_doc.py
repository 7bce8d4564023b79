"""Places and names in docs/explanation/architecture.md exist; its table of folders is the layout."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.check_imports import BESIDE, place_of, sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
_HEADING = "## Names of the engine's specification"
_CODE = re.compile(r"`([^`]+)`")


def rows() -> list[tuple[list[str], list[str]]]:
    """Names and places of each row of the table."""
    section = PAGE.read_text().split(_HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [line.strip("|").split("|") for line in lines if not line.startswith("| ---")]
    return [(_CODE.findall(names), _CODE.findall(places)) for names, places, _ in cells]


def found(place: str) -> list[Any]:
    """The module at the start of a place, and each object on the way from there."""
    parts = place.split(".")
    at = [i for i in range(1, len(parts) + 1) if (ROOT / Path(*parts[:i])).with_suffix(".py").is_file()]
    assert at, f"{place}: no such module"
    things: list[Any] = [importlib.import_module(".".join(parts[: at[0]]))]
    for name in parts[at[0] :]:
        assert has(things[-1], name), f"{place}: no {name}"
        things.append(getattr(things[-1], name, None))
    return things


def has(thing: Any, name: str) -> bool:
    """True if a module or class has an attribute, or instances of the class have it."""
    if hasattr(thing, name):
        return True
    return any(name in own_attributes(base) for base in thing.__mro__[:-1]) if inspect.isclass(thing) else False


def own_attributes(cls: type) -> set[str]:
    """Attributes that a class declares, or that its methods set on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return stored | set(inspect.get_annotations(cls))


@pytest.mark.parametrize(("names", "places"), rows(), ids=[", ".join(names) or places[0] for names, places in rows()])
def test_places_exist(names: list[str], places: list[str]) -> None:
    assert places
    for place in places:
        assert found(place)


@pytest.mark.parametrize(
    ("place", "there"),
    [
        ("worker.engine.scheduler.Scheduler.waiting", True),
        ("worker.engine.sequence.Sequence.stream_callback", True),
        ("worker.engine.scheduler.Scheduler.deque", False),
        ("worker.engine.nowhere.Scheduler", False),
    ],
)
def test_wrong_documented_place_is_found(place: str, there: bool) -> None:
    if there:
        assert found(place)
    else:
        with pytest.raises(AssertionError):
            found(place)


def test_architecture_table_names_exist() -> None:
    """Names of a row are attributes of its place or its own name, unless the row says otherwise."""
    # The row says that these have another name here, or do not exist.
    elsewhere = {
        *("_passed_delay", "prev_time", "prev_prompt", "update_spec_stats", "CoreManager", "busy_loop"),
        *("EngineCoreRequestType", "input_queue", "output_queue", "tokenIDProcessor", "AsyncIOProcManager"),
        *("AsyncIOProc", "init_dist_env", "ForwardMeta", "seq_lens_kv", "block_table", "prev_ids"),
        *("spec_decode_metadata", "_process_engine_step", "process_input_sockets", "pull_and_process_input_queue"),
        *("outputs_queue", "select", "build_meta", "build_params", "build_prev_ids", "cur_len", "q_len"),
    }
    missing = []
    for names, places in rows():
        things = [thing for place in places for thing in found(place)]
        known = {part for place in places for part in place.split(".")}
        for name in (name.partition("(")[0] for name in names):
            is_there = name in known or any(has(thing, name) for thing in things if not isinstance(thing, ModuleType))
            if is_there == (name in elsewhere):
                missing.append(name)
    assert missing == []


def folder_rows() -> list[tuple[list[str], list[str], str]]:
    """Places of each row of the folder table, the places in its middle column, and its allowed imports."""
    section = PAGE.read_text().split("\n## Folders\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [([place.rstrip("/") for place in _CODE.findall(a)], _CODE.findall(b), c.strip()) for a, b, c in cells]


def test_every_folder_of_router_and_worker_has_a_row() -> None:
    named = {place for places, others, _ in folder_rows() for place in [*places, *others]}
    there = {place_of(path) for path in sources() if path.startswith(("router/", "worker/")) and "__" not in path}
    assert there - named == set()
    assert [place for places, _, _ in folder_rows() for place in places if not (ROOT / place).exists()] == []


def test_architecture_table_equals_checked_imports() -> None:
    """Compares the table with that of `scripts/check_imports.py`, except entries of other packages."""
    compared = []
    for places, others, allowed in folder_rows():
        package = places[0].split("/")[0]
        for place in (place for place in places if place in BESIDE):
            names = {name for name in _CODE.findall(allowed) if (ROOT / package / name).exists()}
            if allowed == "all of the router below":
                names = {name for name in BESIDE[place] if f"`{package}/{name}" in PAGE.read_text()}
            assert names == BESIDE[place], (place, others)
            compared.append(place)
    assert sorted(compared) == sorted(BESIDE)
