"""Skips of a run by reason, for its closing table; in a strict run a reason outside the short list fails the run."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

# Set by .ci/run.
STRICT_VARIABLE = "FISSILE_TESTS_STRICT"
TOOLS = (
    "buf",
    "pyright",
    "kubectl",
    "helm",
    "cel-python",
    "envoy",
    "hadolint",
    "yamllint",
    "check-jsonschema",
    "zizmor",
    "kubernetes-validate",
    "ip",
    "the generator",
    "MkDocs",
    "promtool",
    "Prometheus",
    "redis-server",
)
# Facts of a machine that a strict run accepts; the beginning of a reason.
ALLOWED = re.compile(
    r"this processor has no \w+"
    r"|there is (a|no) GPU"
    rf"|({'|'.join(map(re.escape, TOOLS))}) is not installed"
    r"|AITER is installed here"
    r"|this system has no large pages"
    r"|the package registry is not reachable"
    r"|this machine lets no network namespace be made"
    r"|a package registry is not reachable"
    r"|the version before is not in this clone"
)


def is_strict() -> bool:
    """True if skips for other reasons than the allowed ones fail this run."""
    return os.environ.get(STRICT_VARIABLE, "") not in ("", "0")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Reason of a skip, on one line."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return " ".join(text.removeprefix("Skipped: ").split()) or "no reason given"


class Skips:
    """Counts the skips of a run; the plugin of the process that reports, also where others run the tests."""

    def __init__(self, strict: bool) -> None:
        """Makes an empty table; `strict` fails a run with a reason that is not allowed."""
        self.strict = strict
        self.counts: Counter[str] = Counter()

    @property
    def forbidden(self) -> list[str]:
        """Reasons that a strict run does not accept."""
        return [reason for reason in self.counts if not ALLOWED.match(reason)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test that was skipped; an expected failure is none."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.counts[reason_of(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Counts a module that was skipped whole."""
        if report.skipped:
            self.counts[reason_of(report)] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a strict run with forbidden skips that would have passed."""
        if self.strict and self.forbidden and session.exitstatus in (pytest.ExitCode.OK, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.counts:
            return
        terminalreporter.section("skipped, by reason")
        for reason, count in self.counts.most_common():
            mark = "FORBIDDEN  " if self.strict and reason in self.forbidden else ""
            terminalreporter.write_line(f"{count:5d}  {mark}{reason}")
        if self.strict and self.forbidden:
            terminalreporter.write_line(
                f"{STRICT_VARIABLE} is set: a skip for a reason that tests/skips.py does not list fails the run",
                red=True,
            )
