"""Rules and dashboards of deploy/observability against a running fleet: each metric, label and value is there."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import yaml
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.service import Process, free_port, generate, running
from tests.e2e.simulated import OPTIONS, outcome, request, simulated_model
from tests.promql import OBSERVABILITY, Expression, parse, queries, rules
from tests.scraped import scrape

PATIENT_S = 60.0
# Labels that Prometheus adds.
OF_SCRAPES = frozenset({"instance", "job"})
# A counter has no series before the first failure, which nothing from outside provokes.
UNSEEN = frozenset({"fissile_telemetry_failed_total", "fissile_tasks_failed_total"})
# No time is unexplained where routers and workers have one version.
UNSEEN_MATCHER = ("fissile_stage", "=", "unexplained")
# Series by metric: the labels of each.
Scraped = dict[str, list[Mapping[str, str]]]


@dataclass
class Fleet:
    """A router and two workers, each with a port for scrapers."""

    router: Process
    workers: list[Process]
    ports: dict[str, list[int]]

    def load(self, stub: InferenceServiceStub) -> None:
        """Answers and failures."""
        for i in range(4):
            generate(stub, request(i, max_tokens=4))
        self.fail(stub)

    def fail(self, stub: InferenceServiceStub) -> None:
        """Failures by faults of the client and of the service."""
        with pytest.raises(grpc.RpcError):
            generate(stub, pb.GenerateRequest(model="no such model", text="x"))
        late = stub.Generate(request(7, max_tokens=1900), timeout=1)
        with pytest.raises(grpc.RpcError):
            list(late)

    def lose_worker(self, stub: InferenceServiceStub) -> None:
        """Kills the second worker while it has requests, which the first one continues."""
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(outcome, stub, i, 100) for i in range(8)]
            end = time.monotonic() + PATIENT_S
            while not any(
                labels["fissile_worker_id"] == "worker-1" and value
                for labels, value in scrape(self.ports["router"][0])["fissile_router_worker_running"]
            ):
                assert time.monotonic() < end
            self.workers[1].stop(signal.SIGKILL)
            assert {answer.result() for answer in answers} == {(grpc.StatusCode.OK, 100)}


def shows_failures(of_router: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> bool:
    """True if a router has counted lost attempts, and faults of clients and of the service."""
    failed = of_router.get("fissile_router_requests_failed_total", [])
    faults = {labels["fissile_fault"] for labels, _ in failed}
    return "fissile_router_attempts_lost_total" in of_router and faults == {"client", "server"}


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Starts a fleet, with its files in a folder."""
    model = simulated_model(folder / "model")
    ports = {"router": [free_port()], "worker": [free_port(), free_port()]}
    workers = []
    for i, scraped in enumerate(ports["worker"]):
        port = free_port()
        arguments = ["worker", "--model", str(model), "--model-name", "test", "--worker-id", f"worker-{i}"]
        # A request of the second worker does not end before that is killed.
        speed = OPTIONS if i == 0 else ["--simulate", "fixed:400ms"]
        arguments += ["--port", str(port), "--metrics-port", str(scraped), "--kv-tiers", "memory:64MiB", *speed]
        workers.append(Process(f"worker-{i}", arguments, port, folder / f"worker-{i}.log"))
    port = free_port()
    arguments = ["router", "--port", str(port), "--metrics-port", str(ports["router"][0])]
    arguments += ["--audit", "1", "--placement", "round_robin"]
    arguments += [part for worker in workers for part in ("--worker", worker.address)]
    router = Process("router", arguments, port, folder / "router.log")
    with running([*workers, router]):
        yield Fleet(router, workers, ports)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Scraped:
    """The series of all processes, after a load and the loss of a worker."""
    with (
        running_fleet(tmp_path_factory.mktemp("observability")) as fleet,
        grpc.insecure_channel(fleet.router.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        fleet.load(stub)
        of_workers = [scrape(port) for port in fleet.ports["worker"]]
        fleet.lose_worker(stub)
        end = time.monotonic() + PATIENT_S
        # The figures of a router are up to 0.1 s old, and an attempt is lost once its worker is known to be dead. On a
        # busy machine a call may pass its deadline before the router knows of it.
        while not shows_failures(of_router := scrape(fleet.ports["router"][0])):
            assert time.monotonic() < end
            fleet.fail(stub)
    found: Scraped = {}
    for process in (of_router, *of_workers):
        for name, series in process.items():
            found.setdefault(name, []).extend(labels for labels, _ in series)
    for rule in rules():
        if "record" in rule:
            found[rule["record"]] = [dict.fromkeys(parse(rule["expr"]).groups, "")]
    return found


def problems(expression: Expression, scraped: Scraped) -> list[str]:
    """Metrics, labels and values of an expression that no process shows."""
    found, labels = [], set(OF_SCRAPES)
    for name, matchers in expression.selectors:
        if name in UNSEEN:
            continue
        series = scraped.get(name, [{"job": "fissile-router"}] if name == "up" else [])
        labels.update(label for each in series for label in each)
        if not series:
            found.append(f"no metric {name}")
        for label, operator, value in matchers:
            if (label, operator, value) == UNSEEN_MATCHER:
                continue
            values = {each[label] for each in series if label in each}
            if not values or (operator == "=" and value not in values):
                found.append(f"{name} has {label} in {sorted(values)}, not {value!r}")
    found += [f"no label {label}" for label in sorted(expression.groups - labels)]
    return found


def test_reading_finds_what_no_process_shows() -> None:
    shown: Scraped = {"a_total": [{"x": "1", "y": "2"}], "b": [{"x": "1"}]}
    good = parse('histogram_quantile(0.5, sum by (x) (rate(a_total{y="2",x=~".+"}[5m] offset 1h))) > 2 * b or 0')
    assert [name for name, _ in good.selectors] == ["a_total", "b"]
    assert problems(good, shown) == []
    for bad in ("c", 'a_total{y="3"}', 'b{y="2"}', "sum by (z) (b)", "sum(rate(a[5m])) without (y)"):
        assert problems(parse(bad), shown), bad


def test_every_rule_reads_metrics_of_a_running_fleet(scraped: Scraped) -> None:
    found = {rule.get("record") or rule["alert"]: problems(parse(rule["expr"]), scraped) for rule in rules()}
    assert {name: each for name, each in found.items() if each} == {}


def test_every_panel_reads_metrics_of_a_running_fleet(scraped: Scraped) -> None:
    found = {name: problems(parse(text), scraped) for name, text in queries().items()}
    assert {name: each for name, each in found.items() if each} == {}


class Prometheus:
    """A real Prometheus with the configuration of deploy/observability, which scrapes a fleet every second.

    Args:
        folder: for its files.
        ports: ports of the fleet's metrics, by component.

    Attributes:
        address: HOST:PORT of its HTTP API.
    """

    def __init__(self, folder: Path, ports: Mapping[str, list[int]]) -> None:
        settings = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text("utf-8"))
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(OBSERVABILITY / name) for name in settings["rule_files"]]
        for job in settings["scrape_configs"]:
            targets = [f"127.0.0.1:{port}" for port in ports[job["job_name"].removeprefix("fissile-")]]
            job["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
            "--enable-feature=exemplar-storage",
        ]

    def __enter__(self) -> Prometheus:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **parameters: str) -> Any:
        """Data of an answer of the HTTP API; None while it does not serve yet."""
        assert self._process.poll() is None, self._log.read_text()
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENT_S) as answer:
                return msgspec.json.decode(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        except OSError:
            pass
        return None

    def has_values(self, query: str) -> bool:
        """True if a query has a value that is a number."""
        found = self.get("query", query=query)
        return found is not None and any(each["value"][1] != "NaN" for each in found["result"])


def of_rules() -> dict[str, str]:
    """Queries whose values rules need: the records themselves, and the series that alerts read."""
    found = {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name, matchers in parse(rule["expr"]).selectors:
            if name not in UNSEEN and UNSEEN_MATCHER not in matchers:
                text = ",".join(f"{label}{operator}{json.dumps(value)}" for label, operator, value in matchers)
                found[f"{name}{{{text}}}"] = f"{name}{{{text}}}"
    return found


def exemplars(data: Any) -> set[str]:
    """Trace ids of the exemplars that Prometheus has of a query."""
    return {exemplar["labels"]["trace_id"] for each in data or () for exemplar in each["exemplars"]}


@pytest.mark.slow
def test_every_panel_has_data_in_a_real_prometheus(tmp_path: Path) -> None:
    """So has every recording rule, and every series that an alert reads; trace ids of requests are exemplars."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with (
        running_fleet(tmp_path) as fleet,
        Prometheus(tmp_path, fleet.ports) as prometheus,
        grpc.insecure_channel(fleet.router.address) as channel,
    ):
        stub, missing = InferenceServiceStub(channel), queries() | of_rules()
        has_lost, seen = False, set[str]()
        end = time.monotonic() + 3 * PATIENT_S
        while missing or not has_lost or trace_id not in seen:
            fleet.load(stub)
            # It has samples from before the loss.
            if not has_lost and prometheus.has_values('fissile_router_worker_up{fissile_worker_id="worker-1"} == 1'):
                fleet.lose_worker(stub)
                has_lost = True
            traced = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
            list(stub.Generate(request(8, max_tokens=4), metadata=traced, timeout=PATIENT_S))
            missing = {name: query for name, query in missing.items() if not prometheus.has_values(query)}
            found = prometheus.get(
                "query_exemplars",
                query="gen_ai_server_time_to_first_token_seconds_bucket",
                start=str(time.time() - 600),
                end=str(time.time() + 600),
            )
            seen |= exemplars(found)
            assert time.monotonic() < end, (missing, has_lost, seen)
        evaluated = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert len(evaluated) == len(rules())
        assert {rule["health"]: rule.get("lastError") for rule in evaluated} == {"ok": None}
