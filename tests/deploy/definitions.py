"""Checks the chart's custom resources by definitions of their projects: `python -m tests.deploy.definitions FILE...`.

The files are YAML with CustomResourceDefinitions, such as those of a release, or of `kubectl get crd -o yaml`. Fields
are checked by the schemas, strictly, after their defaults are filled in; rules (x-kubernetes-validations) by a program
for CEL. Rules that compare with an earlier state of the object are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

from tests.deploy.custom_resources import program_for_rules
from tests.deploy.manifests import VARIANTS, Object, all_objects
from tests.deploy.tools import run

Key = tuple[str, str]
# Keywords that mean the same in JSON Schema.
_KEPT: Final = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
    "maxProperties", "allOf", "anyOf", "oneOf", "not",
)  # fmt: skip
# A rule with a function that cel-python lacks is a problem of the check; it must not count as kept.
_EVALUATE: Final = """
import json, sys, celpy
environment, programs = celpy.Environment(), {}
def holds(rule, value):
    try:
        if rule not in programs:
            programs[rule] = environment.program(environment.compile(rule))
        return "holds" if programs[rule].evaluate({"self": celpy.json_to_cel(value)}) else "is broken"
    except Exception as error:
        return f"cannot be evaluated: {type(error).__name__}: {error}"
print(json.dumps([holds(rule, value) for rule, value in json.load(sys.stdin)]))
"""


def schemas(documents: Iterable[Any]) -> dict[Key, Object]:
    """The schemas of definitions by apiVersion and kind."""
    found = {}
    for document in documents:
        for each in document.get("items", [document]) if isinstance(document, dict) else ():
            if each.get("kind") == "CustomResourceDefinition":
                group, kind = each["spec"]["group"], each["spec"]["names"]["kind"]
                for version in each["spec"]["versions"]:
                    found[f"{group}/{version['name']}", kind] = version["schema"]["openAPIV3Schema"]
    return found


def strict(schema: Mapping[str, Any]) -> Object:
    """JSON Schema of a structural schema, for which a field without a name is an error."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made: Object = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if "items" in schema:
        made["items"] = strict(schema["items"])
    if "properties" in schema:
        made["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        made["required"] = schema.get("required", [])
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    elif isinstance(more := schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(more)
    return made


def with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """A copy of a value with the schema's defaults."""
    if isinstance(value, list):
        return [with_defaults(each, schema.get("items", {})) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: each["default"] for name, each in properties.items() if "default" in each} | value
    more = schema.get("additionalProperties")
    other = more if isinstance(more, dict) else {}
    return {name: with_defaults(each, properties.get(name, other)) for name, each in filled.items()}


def rules(value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The rules that apply to a value and its parts, each with its part."""
    for each in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in each["rule"]:
            yield each["rule"], value
    if isinstance(value, list):
        for each in value:
            yield from rules(each, schema.get("items", {}))
    elif isinstance(value, dict):
        more = schema.get("additionalProperties")
        for name, each in value.items():
            yield from rules(each, schema.get("properties", {}).get(name, more if isinstance(more, dict) else {}))


def problems(resources: Iterable[Object], known: Mapping[Key, Object]) -> tuple[list[str], int]:
    """What definitions say against custom resources, and how many rules were evaluated."""
    found, asked = [], []
    for each in resources:
        schema = known[each["apiVersion"], each["kind"]]
        filled = with_defaults(each, schema)
        properties = {**schema.get("properties", {}), "metadata": {"x-kubernetes-preserve-unknown-fields": True}}
        validator = jsonschema.Draft202012Validator(strict({**schema, "properties": properties}))
        found += [f"{each['kind']} {error.json_path}: {error.message}" for error in validator.iter_errors(filled)]
        asked += [(each["kind"], rule, part) for rule, part in rules(filled, schema)]
    result = run([program_for_rules(), "-c", _EVALUATE], stdin=json.dumps([(rule, part) for _, rule, part in asked]))
    assert result.returncode == 0, result.stderr
    for (kind, rule, _), said in zip(asked, json.loads(result.stdout), strict=True):
        if said != "holds":
            found.append(f"{kind}: the rule {rule!r} {said}")
    return found, len(asked)


def main(files: list[str]) -> int:
    """Prints the problems of all value sets. Returns the exit code, 0 without problems."""
    known = schemas(each for file in files for each in yaml.safe_load_all(Path(file).read_text("utf-8")))
    every = [each for variant in VARIANTS for each in all_objects(variant)]
    resources = [each for each in every if (each["apiVersion"], each["kind"]) in known]
    found, count = problems(resources, known)
    print(*found, sep="\n", end="\n" if found else "")
    kinds = sorted({each["kind"] for each in resources})
    print(f"{len(resources)} objects of {', '.join(kinds)}; {count} rules; {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
