"""deploy/observability: rules by the real promtool; its files agree with each other, the docs and the manifests.

`tests/e2e/test_observability.py` compares them with a running fleet.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import ROOT, run
from tests.promql import DASHBOARDS, OBSERVABILITY, panels, rules

ALERTS = [rule for rule in rules() if "alert" in rule]


def read(name: str) -> Any:
    return yaml.safe_load((OBSERVABILITY / name).read_text("utf-8"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", OBSERVABILITY / "prometheus.yaml"],
        ["check", "rules", OBSERVABILITY / "rules.yaml"],
        ["test", "rules", OBSERVABILITY / "rules-test.yaml"],
    ],
    ids=["config", "rules", "tests of rules"],
)
def test_promtool_finds_nothing(arguments: list[str | Path]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    result = run(["promtool", *arguments])
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_a_severity_and_a_runbook() -> None:
    tested = {
        each["alertname"] for test in read("rules-test.yaml")["tests"] for each in test.get("alert_rule_test", [])
    }
    for alert in ALERTS:
        name, notes = alert["alert"], alert["annotations"]
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert notes["summary"]
        assert notes["description"]
        page, anchor = notes["runbook_url"].split("#")
        headings = re.findall(r"^## (.+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
        assert anchor == name.lower()
        assert name in headings
        # The slow ones differ from the fast ones in their windows alone.
        assert name in tested or name.replace("Slowly", "Fast") in tested, name


def test_runbook_has_no_section_without_an_alert() -> None:
    text = (ROOT / "docs/how-to/answer-an-alert.md").read_text("utf-8")
    assert set(re.findall(r"^## (Fissile\w+)$", text, re.MULTILINE)) == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_panels_are_whole(dashboard: Path) -> None:
    board, shown = json.loads(dashboard.read_text("utf-8")), panels(dashboard)
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert max(Counter(panel["id"] for panel in board["panels"]).values()) == 1
    cells = Counter[tuple[int, int]]()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells.update((x, place["y"] + y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["h"]))
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24
    for panel in shown:
        assert all(panel[part] for part in ("title", "description", "targets")), panel
        kind = variables[panel["datasource"]["uid"].removeprefix("$")]
        assert (kind["type"], kind["query"]) == ("datasource", panel["datasource"]["type"])
    used = set(re.findall(r"\$(\w+)", dashboard.read_text("utf-8"))) - {"__rate_interval", "__all"}
    assert used == variables.keys()


def test_pages_named_by_dashboards_exist() -> None:
    for dashboard in DASHBOARDS:
        for page in re.findall(r"docs/[\w/.-]+\.md", dashboard.read_text("utf-8")):
            assert (ROOT / page).exists()


def test_collector_pipelines_use_what_is_defined() -> None:
    collector = read("collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= collector[part].keys()
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(collector["service"]["extensions"]) == collector["extensions"].keys()
    used = {part for each in collector["service"]["pipelines"].values() for parts in each.values() for part in parts}
    assert used == {*collector["receivers"], *collector["processors"], *collector["exporters"]}
