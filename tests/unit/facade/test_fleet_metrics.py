"""The metrics of several routers together, as Prometheus reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.rpc.scrape_port import ScrapePort
from common.rpc.tls import ClientTls, ServerTls
from common.telemetry.prometheus import SeriesTable
from facade import fleet_metrics
from facade.fleet_metrics import FleetMetrics, fleet_text
from tests.certificates import Authority
from tests.scraped import read_text

FIRST = """\
# HELP fissile_router_workers Workers
# TYPE fissile_router_workers gauge
fissile_router_workers 3
# HELP vllm:num_requests_waiting Requests that wait in this router
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a b"} 3
# HELP vllm:kv_cache_usage_perc In use
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="a b"} 0.25
# HELP vllm:cache_config_info Blocks
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{model_name="a b",block_size="16"} 1
"""
SECOND = """\
# HELP vllm:num_requests_waiting Requests that wait in this router
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="a b"} 4
vllm:num_requests_waiting{model_name="\\\\ \\" x"} 1
# HELP vllm:kv_cache_usage_perc In use
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="a b"} 0.75
# HELP vllm:cache_config_info Blocks
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{model_name="a b",block_size="16"} 1
# HELP vllm:time_to_first_token_seconds Time
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{model_name="a b",le="1.0"} 2
vllm:time_to_first_token_seconds_bucket{model_name="a b",le="+Inf"} 3
vllm:time_to_first_token_seconds_count{model_name="a b"} 3
vllm:time_to_first_token_seconds_sum{model_name="a b"} 4.5
"""


def values(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("model_name", "")): sample.value
        for family in read_text(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_counts_add_up_and_usage_is_averaged() -> None:
    found = fleet_text([FIRST, SECOND])
    assert values(found) == {
        ("fissile_http_routers", ""): 2,
        ("vllm:num_requests_waiting", "a b"): 7,
        ("vllm:num_requests_waiting", '\\ " x'): 1,
        ("vllm:kv_cache_usage_perc", "a b"): 0.5,
        ("vllm:cache_config_info", "a b"): 1,
        ("vllm:time_to_first_token_seconds_count", "a b"): 3,
        ("vllm:time_to_first_token_seconds_sum", "a b"): 4.5,
    }
    twice = values(fleet_text([SECOND, SECOND]))
    assert twice["vllm:time_to_first_token_seconds_sum", "a b"] == 9
    kinds = {family.name: family.type for family in read_text(found)}
    assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
    assert "fissile_router_workers" not in kinds


def test_text_of_another_exporter_adds_nothing() -> None:
    other = "# HELP up x\n# TYPE up gauge\nup 1 1700000000\n# a comment\n# EOF\n"
    assert values(fleet_text([other])) == {("fissile_http_routers", ""): 1}


def test_no_router_is_a_text_without_models() -> None:
    assert values(fleet_text([])) == {("fissile_http_routers", ""): 0}


async def test_routers_with_tls_are_read_with_the_facades_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine is no fault of the router.
    monkeypatch.setattr(fleet_metrics, "SCRAPE_ROUTER_TIMEOUT_S", 60.0)
    authority = Authority(tmp_path)
    server, client = authority.issue("router", "router.internal"), authority.issue("facade")
    table = SeriesTable({})
    table.add("vllm:num_requests_waiting", "gauge", "", "x", lambda: [(5, {"model_name": "m"})])
    port = ScrapePort("127.0.0.1", 0, table, lambda: True, ServerTls(server.cert, server.key, authority.cert))
    port.start()
    try:
        places = [f"127.0.0.1:{port.port}"]
        # The router's own certificate counts as a CA, as with gRPC.
        for ca in (authority.cert, server.cert):
            known = ClientTls(ca, client.cert, client.key, "router.internal")
            read = await FleetMetrics(places, known)._read()
            assert read is not None
            assert values(read.decode())["vllm:num_requests_waiting", "m"] == 5
        for stranger in (None, ClientTls(authority.cert, name="router.internal"), ClientTls(authority.cert, name="x")):
            assert await FleetMetrics(places, stranger)._read() is None
    finally:
        port.stop()
