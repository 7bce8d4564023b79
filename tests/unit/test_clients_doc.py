"""The page of clients has a row for each marker of a test, and keeps results of other runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import client_table
from tests.clients import INSTALLED, PINNED, version_of

REPORT = """<testsuites><testsuite timestamp="2026-01-02T03:04:05">
<testcase name="test_a[1]"><properties><property name="client" value="c|1.0|one"/></properties></testcase>
<testcase name="test_a[2]"><properties><property name="client" value="c|1.0|one"/></properties>{}</testcase>
<testcase name="test_b"><properties><property name="client" value="c|1.0|two"/></properties><skipped/></testcase>
</testsuite></testsuites>"""


def test_page_has_the_trials_of_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert client_table.main(["--check"]) == 0, capsys.readouterr().err


def test_each_client_has_a_version() -> None:
    assert {row.client for row in client_table.marked()} == {*PINNED, *INSTALLED}
    for client in (*PINNED, *INSTALLED):
        assert version_of(client)[0].isdigit()


@pytest.mark.parametrize("failure", ["", "<failure/>", "<error/>"])
def test_trial_passes_if_all_cases_pass_and_none_is_skipped(failure: str) -> None:
    result = "failed 2026-01-02" if failure else "passed 2026-01-02"
    assert client_table.reported(REPORT.format(failure)) == {("c", "one"): ("1.0", result)}


def test_results_of_other_runs_stay_and_rows_without_marker_go() -> None:
    page = f"# Head\n\n{client_table.BEGIN}\n\n{client_table.END}\ntail\n"
    one, two = client_table.Row("c", "one", "t.py::test_a"), client_table.Row("c", "two", "t.py::test_b")
    page = client_table.updated([one, two], page, {one.trial: ("1.0", "passed 2026-01-02")})
    assert [(row.version, row.result) for row in client_table.shown(page)] == [
        ("1.0", "passed 2026-01-02"),
        ("", client_table.NOT_RUN),
    ]
    page = client_table.updated([one], page, {})
    assert [(row.trial, row.version) for row in client_table.shown(page)] == [(one.trial, "1.0")]
    assert page.startswith("# Head\n")
    assert page.endswith("\ntail\n")


def test_two_markers_of_one_trial_are_refused(tmp_path: Path) -> None:
    source = "import pytest\n" + "".join(
        f'@pytest.mark.client("c", "one")\ndef test_{name}(): ...\n' for name in ("a", "b")
    )
    (tmp_path / "test_x.py").write_text(source)
    with pytest.raises(ValueError, match=r"both try c: one"):
        client_table.marked(tmp_path)
