"""Reads the metrics, matchers and labels of PromQL expressions, and the expressions of deploy/observability."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OBSERVABILITY = Path(__file__).resolve().parents[1] / "deploy" / "observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana").glob("*.json"))
# Variables of the dashboards, with what Grafana would put in their place.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\d[\w.]*|[A-Za-z_:][\w:]*|=~|!~|!=|>=|<=|==|[^\s\w])')
_GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = frozenset({"or", "and", "unless", "offset", "bool"})


@dataclass
class Expression:
    """Metrics of an expression, each with its matchers (label, operator, value); and the labels that it groups by."""

    text: str
    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)


def parse(text: str) -> Expression:
    """Reads an expression that is valid PromQL."""
    found, tokens, at = Expression(text), _TOKEN.findall(re.sub(r"#.*", "", text)), 0

    def until(end: str) -> Iterator[str]:
        nonlocal at
        while tokens[at] != end:
            yield tokens[at]
            at += 1

    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
        at += 1
        if token in _GROUPING:
            at += 1
            found.groups.update(each for each in until(")") if each != ",")
        elif token == "[":
            list(until("]"))
        elif re.match(r"[A-Za-z_:]", token) and token not in _WORDS and following not in ("(", *_GROUPING):
            matchers: list[tuple[str, str, str]] = []
            if following == "{":
                at += 1
                parts = [each for each in until("}") if each != ","]
                matchers = [(a, b, json.loads(c)) for a, b, c in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]
            found.selectors.append((token, matchers))
    return found


def rules() -> list[dict[str, Any]]:
    """All rules of deploy/observability."""
    groups = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard, without the headings of rows."""
    return [panel for panel in json.loads(dashboard.read_text("utf-8"))["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """The queries of all dashboards to Prometheus, by dashboard, panel and number, with their variables filled in."""
    found = {}
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                if panel["datasource"]["type"] != "prometheus":
                    continue
                text = target["expr"]
                for variable, value in VARIABLES.items():
                    text = text.replace(variable, value)
                found[f"{dashboard.stem}: {panel['title']} {target['refId']}"] = text
    return found
