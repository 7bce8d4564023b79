"""Makes the table in docs/contributing/contract-coverage.md: `python -m scripts.contract_table` (`--check` compares).

Fields come from the descriptors of fissile.v1. A field of a request is served if the router's lists say so, else it is
refused by name. A field of an answer is served if a test says so. A test says which fields it shows by the marker
`proto_field("SamplingParams.top_k", ...)`; a served field that no test shows, and a test that shows a field which is
refused, fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from fissile.v1 import inference_pb2 as pb
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from router.api.served_fields import SERVED

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing" / "contract-coverage.md"
BEGIN: Final = "<!-- Made by `python -m scripts.contract_table`. -->"
END: Final = "<!-- End of the generated part. -->"
MARKER: Final = "proto_field"
_REFUSED_BY: Final = "e2e/test_router.py::test_every_field_is_served_or_refused_by_name"
# Field of an answer, or a message of it as a whole, -> the field of a request that asks for it.
_ASKED_BY: Final[Mapping[str, str]] = {
    "GenerateResponse.logprobs": "OutputOptions.logprobs",
    "ChatResponse.logprobs": "OutputOptions.logprobs",
    "GeneratedText.logprobs": "OutputOptions.logprobs",
    "ChatAnswer.logprobs": "OutputOptions.logprobs",
    "TokenLogprobs": "OutputOptions.logprobs",
    "TopLogprob": "OutputOptions.logprobs",
    "Finish.logprob": "OutputOptions.logprobs",
    "GenerateResponse.prompt_logprobs": "OutputOptions.prompt_logprobs",
    "ChatResponse.prompt_logprobs": "OutputOptions.prompt_logprobs",
    "GenerateOnceResponse.prompt_logprobs": "OutputOptions.prompt_logprobs",
    "ChatOnceResponse.prompt_logprobs": "OutputOptions.prompt_logprobs",
    "StopDetail.constraint": "SamplingParams.constraint",
    "Usage.reasoning_tokens": "ChatRequest.reasoning",
    "ChatDelta.reasoning": "ChatRequest.reasoning",
    "ChatDelta.tool_calls": "ChatRequest.tools",
    "ToolCallDelta": "ChatRequest.tools",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Fields of a message that share a row."""

    message: str
    fields: Sequence[str]
    status: str
    test: str

    def line(self) -> str:
        """Line of the table."""
        names = ", ".join(f"`{name}`" for name in self.fields)
        test = "" if self.test == _REFUSED_BY else f"`{self.test}`"
        return f"| `{self.message}` | {names} | {self.status} | {test} |"


@dataclass(frozen=True, slots=True)
class Problem(Exception):
    """Mistakes in the marks of tests."""

    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def name_of(field: FieldDescriptor) -> str:
    """`Message.field`."""
    assert field.containing_type is not None
    return f"{field.containing_type.name}.{field.name}"


def reachable(descriptor: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """All fields of a message and of those in it that `seen` has not."""
    if descriptor.full_name in seen or not descriptor.full_name.startswith("fissile.v1."):
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from reachable(inner, seen)


def at_path(descriptor: Descriptor, path: str) -> FieldDescriptor:
    """The field that a path leads to."""
    name, _, rest = path.partition(".")
    field = descriptor.fields_by_name[name]
    if not rest:
        return field
    assert field.message_type is not None
    return at_path(field.message_type, rest)


def served_in_requests() -> set[str]:
    """Fields that some method serves."""
    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    return {name_of(at_path(methods[name].input_type, path)) for name, paths in SERVED.items() for path in paths}


def of_served_methods(*, requests: bool) -> set[str]:
    """Fields that requests, or answers, of methods that are served can have."""
    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    seen = set[str]()
    kinds = [methods[name].input_type if requests else methods[name].output_type for name in SERVED]
    return {name_of(field) for kind in kinds for field in reachable(kind, seen)}


def marks(folder: Path = ROOT / "tests") -> dict[str, str]:
    """Field -> the first test, `FILE::NAME`, that says it shows it; read from the syntax trees."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("test_*.py")):
        source = path.read_text("utf-8")
        if MARKER not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in _marked(node):
                    found.setdefault(name, f"{path.relative_to(folder)}::{node.name}")
    return found


def _marked(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{MARKER}":
            for argument in decorator.args:
                yield str(ast.literal_eval(argument))


def rows(shown: Mapping[str, str]) -> list[Row]:
    """The table.

    Raises:
        Problem: a served field that no test shows, or a mark of one that is not served.
    """
    served, asked = served_in_requests(), of_served_methods(requests=True)
    answered, problems = of_served_methods(requests=False), []
    made = []
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        stands = []
        for name in map(name_of, message.fields):
            status, test = _stand(name, shown, served, asked, answered)
            if not test:
                problems.append(f"{name} is {status}, and no test shows it: mark one with {MARKER}({name!r})")
            elif status != "served" and name in shown:
                problems.append(f"{shown[name]} shows {name}, which is {status}")
            stands.append((status, test, name.partition(".")[2]))
        for (status, test), fields in groupby(sorted(stands, key=lambda each: each[:2]), lambda each: each[:2]):
            made.append(Row(message.name, [each[2] for each in fields], status, test))
    known = {name_of(field) for message in pb.DESCRIPTOR.message_types_by_name.values() for field in message.fields}
    problems += [
        f"{test} shows {name}, which is not a field of fissile.v1" for name, test in shown.items() if name not in known
    ]
    if problems:
        raise Problem(problems)
    return made


def _stand(
    name: str, shown: Mapping[str, str], served: set[str], asked: set[str], answered: set[str]
) -> tuple[str, str]:
    """Status of a field, and the test that shows it; "" for none."""
    if name in served:
        return "served", shown.get(name, "")
    if name in asked:
        return "refused by name", _REFUSED_BY
    if name in answered and name in shown:
        return "served", shown[name]
    if name not in answered:
        return "its method is not served", _REFUSED_BY
    wish = _ASKED_BY.get(name) or _ASKED_BY.get(name.partition(".")[0])
    if wish is not None and wish not in served:
        return f"comes with `{wish}`, which is refused", _REFUSED_BY
    return "served", ""


def table() -> str:
    """Markdown of the table."""
    head = "| message | fields | | test |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"{row.line()}\n" for row in rows(marks()))


def page() -> str:
    """docs/contributing/contract-coverage.md with the table as it should be."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or compares it; 1 if something is to be done."""
    try:
        wanted = page()
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    if "--check" not in arguments:
        PAGE.write_text(wanted, "utf-8")
    elif wanted != PAGE.read_text("utf-8"):
        print(f"{PAGE} has another table of fields: python -m scripts.contract_table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
