"""Writes docs/reference/clients.md: `python -m scripts.client_table REPORT.xml...` (`--check` compares).

A row is a client, its version, what a test tried with it, and the result. The marker `client` of the tests names client
and trial; results come from JUnit reports of pytest. A row that no report has keeps its result; a row of a marker that
is gone is dropped. `make client-table` runs the marked tests, and then this.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "clients.md"
BEGIN: Final = "<!-- Made by `python -m scripts.client_table`. -->"
END: Final = "<!-- End of the generated part. -->"
NOT_RUN: Final = "not run"
_MARKER: Final = "client"
_HEAD: Final = "| client | version | tried | result | test |\n| --- | --- | --- | --- | --- |\n"
Trial = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One trial of a client.

    Attributes:
        client: its name.
        tried: what the test tries.
        test: `FILE::NAME`.
        version: of the client; "" before the first run.
        result: `passed DATE`, `failed DATE` or NOT_RUN.
    """

    client: str
    tried: str
    test: str
    version: str = ""
    result: str = NOT_RUN

    @property
    def trial(self) -> Trial:
        """Client and feature; unique among the rows."""
        return self.client, self.tried

    @property
    def line(self) -> str:
        """Line of the table."""
        return f"| {self.client} | {self.version} | {self.tried} | {self.result} | `{self.test}` |\n"


def marked(folder: Path = ROOT / "tests") -> list[Row]:
    """Rows without a result, of all markers, read from the syntax trees.

    Raises:
        ValueError: two markers name the same trial.
    """
    found: dict[Trial, Row] = {}
    for path in sorted(folder.rglob("test_*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if f"mark.{_MARKER}(" in source else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for client, tried in _marks(node):
                    row = Row(client, tried, f"{path.relative_to(folder)}::{node.name}")
                    if row.trial in found:
                        raise ValueError(f"{row.test} and {found[row.trial].test} both try {client}: {tried}")
                    found[row.trial] = row
    return sorted(found.values(), key=lambda row: (row.client.lower(), row.test, row.tried))


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Trial]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{_MARKER}":
            client, tried = map(ast.literal_eval, decorator.args)
            yield client, tried


def reported(report: str) -> dict[Trial, tuple[str, str]]:
    """Version and result by trial, of one JUnit report. A trial has passed if all cases of its test have."""
    found: dict[Trial, tuple[str, str]] = {}
    for suite in ElementTree.fromstring(report).iter("testsuite"):
        date = suite.attrib["timestamp"][:10]
        for case in suite.iter("testcase"):
            if case.find("skipped") is not None:
                continue
            has_failed = case.find("failure") is not None or case.find("error") is not None
            for each in case.iter("property"):
                if each.attrib["name"] == _MARKER:
                    client, version, tried = each.attrib["value"].split("|")
                    before = found.get((client, tried), ("", ""))[1]
                    is_failure = has_failed or before.startswith("failed")
                    found[client, tried] = version, f"{'failed' if is_failure else 'passed'} {date}"
    return found


def shown(page: str) -> list[Row]:
    """Rows of a page."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [Row(client, tried, test.strip("`"), version, result) for client, version, tried, result, test in cells[2:]]


def updated(rows: Iterable[Row], page: str, reports: Mapping[Trial, tuple[str, str]]) -> str:
    """A page with these rows; versions and results are those of the reports, else those of the page."""
    known = {row.trial: (row.version, row.result) for row in shown(page)} | dict(reports)
    lines = []
    for row in rows:
        version, result = known.get(row.trial, (row.version, row.result))
        lines.append(replace(row, version=version, result=result).line)
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{_HEAD}{''.join(lines)}\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or compares it; 1 if it differs or a trial has failed."""
    page = PAGE.read_text("utf-8")
    reports: dict[Trial, tuple[str, str]] = {}
    for name in arguments:
        if name != "--check":
            reports |= reported(Path(name).read_text("utf-8"))
    wanted = updated(marked(), page, reports)
    if "--check" not in arguments:
        PAGE.write_text(wanted, "utf-8")
    elif wanted != page:
        print(f"{PAGE} has other trials than the tests: make client-table", file=sys.stderr)
        return 1
    failed = [row for row in shown(wanted) if row.result.startswith("failed")]
    for row in failed:
        print(f"{row.client}: {row.tried}: {row.result} ({row.test})", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
