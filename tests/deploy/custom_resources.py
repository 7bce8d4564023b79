"""Checks custom resources: their fields by JSON Schema, and their rules by a program for CEL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from tests.deploy.tools import run, tool

Object = dict[str, Any]
DEFINITIONS: Final[Mapping[str, Object]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
CUSTOM: Final = frozenset(DEFINITIONS)
_TYPES: Final[Mapping[str, Object]] = {
    "string": {"type": "string"},
    "int": {"type": "integer"},
    "bool": {"type": "boolean"},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
    "any": {},
}
_EVALUATE: Final = """
import json, sys, celpy
def holds(rule, value):
    environment = celpy.Environment()
    return bool(environment.program(environment.compile(rule)).evaluate({"self": celpy.json_to_cel(value)}))
print(json.dumps([holds(rule, value) for rule, value in json.load(sys.stdin)]))
"""


def schema_of(kind: str) -> Object:
    """The JSON Schema of a kind."""
    definition = DEFINITIONS[kind]
    lists = frozenset(definition.get("lists", ()))
    fields = {
        "apiVersion!": [definition["apiVersion"]],
        "kind!": [kind],
        "metadata!": "any",
        "spec!": definition["spec"],
    }
    return _schema(fields, "", lists)


def _schema(fields: Any, path: str, lists: frozenset[str]) -> Object:
    if path in lists:
        items = fields[0] if isinstance(fields, list) else fields
        return {"type": "array", "minItems": 1, "items": _schema(items, path + ".", lists)}
    if isinstance(fields, str):
        return _TYPES[fields]
    if isinstance(fields, list):
        return {"enum": fields}
    names = {name.removesuffix("!"): name for name in fields}
    prefix = f"{path.removesuffix('.')}." if path else ""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name for name, written in names.items() if written != name],
        "properties": {name: _schema(fields[written], prefix + name, lists) for name, written in names.items()},
    }


def problems(found: Object) -> list[str]:
    """The fields of a custom resource that are wrong."""
    validator = jsonschema.Draft202012Validator(schema_of(found["kind"]))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]


def program_for_rules() -> Path:
    """A Python with a program for CEL; skips the test where there is none."""
    if run([python := tool("python"), "-c", "import celpy"]).returncode:
        pytest.skip("cel-python is not installed: make setup does so where its package can be had")
    return python


def broken_rules(resources: Iterable[Object]) -> list[str]:
    """The rules that custom resources break."""
    python = program_for_rules()
    asked = [(rule, _at(found, path)) for found in resources for path, rule in DEFINITIONS[found["kind"]]["rules"]]
    result = run([python, "-c", _EVALUATE], stdin=json.dumps(asked))
    assert result.returncode == 0, result.stderr
    return [rule for (rule, _), holds in zip(asked, json.loads(result.stdout), strict=True) if not holds]


def _at(found: Object, path: str) -> Any:
    value: Any = found
    for name in path.split("."):
        value = value[name]
    return value
