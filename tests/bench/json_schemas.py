"""How many published JSON Schemas are served, and rightly: `python -m tests.bench.json_schemas FOLDER [FOLDER ...]`.

A folder has schemas as files; or, as JSONSchemaBench's `maskbench/data` and the official JSON-Schema-Test-Suite have
them, schemas with instances that are said to be valid or not. Each schema is checked as a router does. For each that is
served, `jsonschema` and `jsonschema-rs` validate random walks of its grammar that finish, and its instances are
compared with what the grammar has. Prints counts, refusals by keyword, and everything that is not as it is said; fails
where an answer could be invalid or have no end. `--sample N` takes each N-th file.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.constraints import library
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from tests.schema_checks import Judges, byte_walker, readings

_END: Final = 256
_VOCABULARY: Final = library.byte_vocabulary({}, {_END})
_WALKER: Final = byte_walker()
_QUOTED: Final = re.compile(r"(?:at \S+: )?(.*)")
_EXAMPLES: Final = 60


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and its instances: description, value, and whether the instance is valid."""

    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]


@dataclass(slots=True)
class Found:
    """Counts, and names of wrong results."""

    served: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    instances: Counter[str] = field(default_factory=Counter)
    walks: Counter[str] = field(default_factory=Counter)
    milliseconds: list[float] = field(default_factory=list)
    refused_after: list[float] = field(default_factory=list)
    strange: dict[str, list[str]] = field(default_factory=dict)

    def note(self, what: str, name: str) -> None:
        self.strange.setdefault(what, []).append(name)


def cases(folder: Path, every: int) -> Iterator[Case]:
    """All schemas of a folder that jsonschema takes for one."""
    paths = sorted(path for path in folder.rglob("*.json") if path.is_file())[::every]
    for path in paths:
        name = str(path.relative_to(folder))
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        for i, group in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(group, dict) and "schema" in group and "tests" in group:
                tests = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
                yield Case(f"{name} {i}", group["schema"], tests)
            else:
                yield Case(name, group, [])


def look(case: Case, found: Found, rnd: random.Random, walks: int) -> None:
    """Checks one schema, its instances, and walks of its grammar."""
    began = time.perf_counter()
    try:
        constraint = Constraint.of({"json_schema": json.dumps(case.schema, ensure_ascii=False)})
        text = GrammarChecker({}, {_END}).check(constraint, optional_space=False)
    except InvalidFieldError as error:
        found.refused[_reason(error)] += 1
        found.refused_after.append((time.perf_counter() - began) * 1e3)
        return
    found.milliseconds.append((time.perf_counter() - began) * 1e3)
    found.served += 1
    start, judges = library.compiled(text, _VOCABULARY, library.RUNNING), Judges(case.schema)
    for description, value, valid in case.tests:
        said, has = ("valid" if valid else "invalid"), _has(start, value)
        found.instances[f"{said}, {'in' if has else 'not in'} the grammar"] += 1
        if has != valid:
            also = "" if bool(judges.refused_by(value)) is has else ", validators see it as the grammar does"
            found.note(f"{said}, but {'in' if has else 'not in'} the grammar{also}", f"{case.name}: {description}")
    for walk in _WALKER.walks(text, rnd, walks, most=600):
        found.walks[walk.end] += 1
        if walk.end == "dead":
            found.note("nothing can follow", f"{case.name}: {walk.text.decode(errors='replace')}")
        values = readings(walk.text) if walk.end == "whole" else []
        if by := next((by for value in values if (by := judges.refused_by(value))), ""):
            found.walks["INVALID"] += 1
            found.note(f"whole, and refused by {by}", f"{case.name}: {walk.text.decode()}")


def _reason(error: InvalidFieldError) -> str:
    said = _QUOTED.sub(r"\1", str(error.violations[0].problem).removeprefix("cannot be served: "))
    keyword = re.match(r"'[^']+' is not supported|format '[^']+' is not supported", said)
    return keyword[0] if keyword else re.sub(r'"[^"]*"|\d+|`[^`]*`', "_", said)[:70]


def _has(start: library.Matcher, value: Any) -> bool:
    matcher = start.deep_copy()
    data = list(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def report(folder: Path, found: Found, seconds: float) -> None:
    """Prints the results of a folder."""
    count = found.served + found.refused.total()
    print(f"{folder}: {count} schemas in {seconds:.0f} s, {found.served} served ({found.served / max(count, 1):.1%})")
    for what, times in (("served", found.milliseconds), ("refused", found.refused_after)):
        if len(times) > 1:
            cuts = statistics.quantiles(times, n=100)
            print(
                f"  {what} after ms: p50 {cuts[49]:.1f}, p90 {cuts[89]:.1f}, p99 {cuts[98]:.1f}, most {max(times):.0f}"
            )
    for reason, number in found.refused.most_common(25):
        print(f"  refused {number}: {reason}")
    for counts in (found.instances, found.walks):
        for what, number in sorted(counts.items()):
            print(f"  {number} {what}")
    for what, names in found.strange.items():
        print(f"  {len(names)} {what}")
        for name in names[:_EXAMPLES]:
            print(f"    {name[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="take each N-th file")
    parser.add_argument("--walks", type=int, default=2, help="random answers of each schema")
    options = parser.parse_args()
    failed = False
    for folder in options.folders:
        found, rnd, began = Found(), random.Random(1), time.perf_counter()
        for case in cases(folder, options.sample):
            look(case, found, rnd, options.walks)
        report(folder, found, time.perf_counter() - began)
        failed |= bool(found.walks["INVALID"] or found.walks["dead"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
