"""docs/reference/metrics.md names every metric as OTLP and as Prometheus have it."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from common.errors import is_client_fault
from common.telemetry.metrics import setup_metrics
from common.telemetry.prometheus import Family
from router.telemetry.metrics import RouterMetrics
from worker.engine.figures import EngineFigures, StepTokens, observe_engine, show_engine_as_vllm

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text("utf-8")
ROWS = re.findall(r"^\| (`[^|]+`) \| (`[^|]+`) \| (?:gauge|counter|histogram) \|", TEXT, re.MULTILINE)


def families() -> list[Family]:
    """The metrics of a router and a worker, without values."""
    metrics = setup_metrics("x", "1", is_scraped=True)
    assert metrics.table is not None
    observe_engine(metrics, EngineFigures, {})
    StepTokens(metrics, {})
    show_engine_as_vllm(metrics.table, EngineFigures, "m")
    RouterMetrics(metrics)
    return metrics.table.collect()


def names_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_documented_prometheus_names_are_those_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    served = {f"{each.name}_total" if each.kind == "counter" else each.name for each in families()}
    own = {name for _, cell in ROWS for name in names_of(cell)}
    assert own == {name for name in served if name.startswith(("fissile_", "gen_ai_"))}
    assert set(re.findall(r"`(vllm:\w+)`", TEXT)) - {"vllm:lora_requests_info"} == {
        name for name in served if name.startswith("vllm:")
    }


def test_documented_names_of_a_row_are_of_one_metric() -> None:
    """The name in Prometheus is the name in OTLP with underscores, and perhaps a unit."""
    for cell, plain in ROWS:
        names, prometheus = names_of(cell), names_of(plain)
        assert len(names) == len(prometheus)
        for name, other in zip(names, prometheus, strict=True):
            assert name.replace(".", "_").strip("_") in other


def test_documented_faults_are_those_counted() -> None:
    """Each status and each reason of the table is on its side; every other status is a fault of the server."""
    cells = dict(re.findall(r"^\| `(client|server)` \| (.+) \|$", TEXT, re.MULTILINE))
    statuses = {code for code in grpc.StatusCode if re.search(rf"\b{code.name}\b", cells["client"])}
    for code in grpc.StatusCode:
        assert is_client_fault(code, "") is (code in statuses)
    for fault, cell in cells.items():
        for reason in re.findall(r"`([A-Z_]+)`", cell):
            code = (
                grpc.StatusCode.CANCELLED if reason == "CANCELLED_BY_OPERATOR" else grpc.StatusCode.RESOURCE_EXHAUSTED
            )
            assert is_client_fault(code, reason) is (fault == "client"), reason
