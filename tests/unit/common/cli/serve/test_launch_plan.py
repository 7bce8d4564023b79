from __future__ import annotations

import dataclasses

import pytest

from common.cli.serve.command import make_fleet, serve
from common.cli.serve.launch_plan import Fleet, kv_memory_per_rank, threads_per_worker

FLEET = Fleet(
    model="/models/m",
    model_name="m",
    host="0.0.0.0",
    port=50051,
    worker_ports=[7001, 7002],
    max_num_batched_tokens=2048,
    prefix_caching=True,
    kv_cache_memory="",
    drain_timeout_s=30.0,
    log_level="info",
    router_options={"delay_factor": 0.5},
    worker_options={"max_model_len": 128, "dtype": None},
)


def test_supervisor_ends_router_before_workers() -> None:
    assert [child.name for child in FLEET.children()] == ["router", "worker-0", "worker-1"]
    assert all(child.drain_s > FLEET.drain_timeout_s for child in FLEET.children())


def test_command_lines() -> None:
    router, first, second = (" ".join(child.arguments) for child in FLEET.children())
    assert router == (
        "--host 0.0.0.0 --port 50051 --worker 127.0.0.1:7001 --worker 127.0.0.1:7002"
        " --drain-timeout 30 --log-level info --delay-factor 0.5"
    )
    assert first == (
        "--model /models/m --model-name m --host 127.0.0.1 --port 7001 --worker-id worker-0"
        " --max-num-batched-tokens 2048 --prefix-caching --drain-timeout 30 --log-level info --max-model-len 128"
    )
    assert "--port 7002 --worker-id worker-1" in second


def test_trace_slow_reaches_router_and_workers() -> None:
    given = serve.make_context("serve", ["--simulate", "instant", "--workers", "2", "--trace-slow", "1500ms"]).params
    own = {"ask", "prompt", "once", "tls_cert", "tls_key", "tls_client_ca", "api_keys", "speculate"}
    fleet = make_fleet(protection={}, **{name: each for name, each in given.items() if name not in own})
    assert ["--trace-slow 1.5" in " ".join(child.arguments) for child in fleet.children()] == [True] * 3


def test_command_lines_of_the_other_choices() -> None:
    fleet = dataclasses.replace(
        FLEET, prefix_caching=False, kv_cache_memory="2GiB", simulate="fixed:2ms", expert_parallel=True
    )
    arguments = " ".join(fleet.children()[1].arguments)
    assert "--no-prefix-caching --kv-cache-memory 2GiB --simulate fixed:2ms --enable-expert-parallel" in arguments


def test_local_clients_reach_router_on_wildcard_address() -> None:
    assert FLEET.address == "127.0.0.1:50051"
    assert dataclasses.replace(FLEET, host="10.1.2.3").address == "10.1.2.3:50051"


def test_startup_block_describes_fleet() -> None:
    block = FLEET.describe("0.1.0", "1 GiB per worker")
    for said in ("m from /models/m", "0.0.0.0:50051", "2: 127.0.0.1:7001, 127.0.0.1:7002", "on", "2048", "1 GiB per"):
        assert said in block


@pytest.mark.parametrize(("workers", "cores", "threads"), [(1, 8, None), (2, 8, 4), (3, 8, 2), (4, 2, 1)])
def test_workers_share_the_cores(workers: int, cores: int, threads: int | None) -> None:
    assert threads_per_worker(workers, cores) == threads


def test_workers_share_a_quarter_of_the_memory() -> None:
    assert kv_memory_per_rank(1, 2, 8 << 30) == ""
    assert kv_memory_per_rank(4, 1, 8 << 30) == "512MiB"
    assert kv_memory_per_rank(4, 2, 8 << 30) == "256MiB"


def test_facade_is_a_child_that_ends_before_its_router() -> None:
    assert [child.module for child in FLEET.children()].count("facade") == 0
    first, second, *_ = dataclasses.replace(FLEET, http_port=8000).children()
    assert (first.module, second.module) == ("facade", "router")
    assert first.arguments[:6] == ["--host", FLEET.host, "--port", "8000", "--routers", FLEET.address]
    assert "--router-metrics" not in first.arguments


def test_facade_gets_the_routers_port_for_metrics_and_its_own_certificates() -> None:
    given = {"tls_cert": "/c.pem", "tls_client_ca": None, "router_ca": "/ca.pem"}
    fleet = dataclasses.replace(FLEET, http_port=8000, router_options={"metrics_port": 9090}, facade_options=given)
    arguments = fleet.children()[0].arguments
    assert arguments[6:8] == ["--router-metrics", "127.0.0.1:9090"]
    assert arguments[-4:] == ["--tls-cert", "/c.pem", "--router-ca", "/ca.pem"]
    assert fleet.http_url == "https://127.0.0.1:8000"
    assert fleet.curl_options == " --cacert FILE"
