"""The official readers of what scrapers get, with types."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families


def read_text(text: str) -> list[Metric]:
    """The metrics of a text in Prometheus' format; raises ValueError if it is not valid."""
    return list(text_string_to_metric_families(text))


def read_openmetrics(text: str) -> list[Metric]:
    """The metrics of a text in OpenMetrics' format; raises ValueError if it is not valid."""
    return list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
