"""Names that clients make up are no label values: figures of many requests keep no more objects than those of few."""

from __future__ import annotations

import contextlib
import gc

import grpc
import pytest

from common.errors import InvalidFieldError, TenantLimitError, UnknownModelError
from common.telemetry import names
from common.telemetry.metrics import setup_metrics
from common.telemetry.prometheus import SeriesTable, prometheus_text
from common.telemetry.request_record import RequestRecord
from router.telemetry.metrics import RouterMetrics
from tests.scraped import read_text


async def refuse(metrics: RouterMetrics, number: int) -> None:
    """A request whose model, tenant, id and field nobody else has; every fourth one is answered."""
    record = RequestRecord(request_id=f"r{number}", tenant=f"tenant {number}", model=f"model {number}")
    errors = (
        UnknownModelError(f"model {number}", ["m"]),
        TenantLimitError(f"tenant {number}", 1, 1.0),
        InvalidFieldError(f"sampling_params.x{number}", f"is {number}", "1"),
        None,
    )
    error = errors[number % 4]
    measured = metrics.request(names.CHAT, 0.0, lambda: 1.0, lambda: grpc.StatusCode.CANCELLED, record)
    with contextlib.suppress(*map(type, errors[:3])):
        async with measured as measure:
            if error is not None:
                raise error
            measure.model("m")
            measure.first_token(0.5, "worker-0", 0.4)
            measure.usage(3, 0, 4)
            measure.finished(0.5, 4, "stop", "worker-0")


def series(table: SeriesTable) -> int:
    """Number of series that a scraper sees."""
    return sum(len(family.samples) for family in read_text(prometheus_text(table.collect()).decode()))


def objects() -> int:
    """Number of containers that are alive."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
async def test_made_up_names_add_no_series_and_no_objects(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    made = setup_metrics("fissile-router", "1", is_scraped=True)
    metrics = RouterMetrics(made)
    assert made.table is not None
    for number in range(1000):
        await refuse(metrics, number)
    before, num_objects = series(made.table), objects()
    for number in range(1000, 1000 + count):
        await refuse(metrics, number)
    assert objects() < num_objects + 100
    assert series(made.table) == before
    assert sum(metrics.failed.values()) == (1000 + count) * 3 // 4
    assert len(metrics.failed) == 3
