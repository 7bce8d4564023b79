"""The official readers of what scrapers get, with types."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families


def read_text(text: str) -> list[Metric]:
    """The metrics of a text in Prometheus' format; raises ValueError if it is not valid."""
    return list(text_string_to_metric_families(text))


def read_openmetrics(text: str) -> list[Metric]:
    """The metrics of a text in OpenMetrics' format; raises ValueError if it is not valid."""
    return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def scrape(port: int) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Labels and values of the series of one process, by metric."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        samples = [sample for family in read_text(answer.read().decode()) for sample in family.samples]
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found
