"""A real Envoy with a configuration of deploy/mesh, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY, ROOT, tool
from tests.e2e.service import free_port

START_TIMEOUT_S = 60.0
Configuration = dict[str, Any]


@dataclass
class Envoy:
    """A running Envoy: the port of its listener, that of its admin interface, and its log file."""

    port: int
    admin_port: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """host:port of its listener."""
        return f"127.0.0.1:{self.port}"

    def admin(self, path: str) -> tuple[int, str]:
        """Status and body of its admin interface."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def counters(self) -> dict[str, int]:
        """Its counters and gauges by name."""
        lines = (line.rpartition(": ") for line in self.admin("/stats")[1].splitlines())
        return {name: int(value) for name, _, value in lines if value.isdigit()}

    def of_host(self, port: int, figure: str) -> int:
        """A figure of one host of the cluster, `rq_active` for example."""
        prefix = f"127.0.0.1:{port}::{figure}::"
        (line,) = [line for line in self.admin("/clusters")[1].splitlines() if prefix in line]
        return int(line.rpartition("::")[2])

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition; fails with the log when Envoy ends before."""
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"Envoy: not {what}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def wait_healthy(self, hosts: int, cluster: str = "routers") -> None:
        """Waits until so many hosts of a cluster are healthy for it."""
        name = f"cluster.{cluster}.membership_healthy"
        self.wait(lambda: self.counters().get(name) == hosts, f"{hosts} healthy {cluster}")


def load(name: str) -> Configuration:
    """A configuration of deploy/mesh."""
    content: Configuration = yaml.safe_load((DEPLOY / "mesh" / name).read_text(encoding="utf-8"))
    return content


def connection_manager(configuration: Configuration) -> Configuration:
    """Its HTTP connection manager."""
    filters = configuration["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    found: Configuration = filters[0]["typed_config"]
    return found


@contextlib.contextmanager
def running_envoy(folder: Path, configuration: Configuration, upstream_ports: Sequence[int]) -> Iterator[Envoy]:
    """Starts Envoy with a configuration whose addresses are replaced by those of this test, and ends it."""
    port, admin_port = free_port(), free_port()
    configuration["admin"]["address"]["socket_address"]["port_value"] = admin_port
    static = configuration["static_resources"]
    static["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    static["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": [_endpoint(p) for p in upstream_ports]}]
    path, log = folder / f"envoy-{port}.yaml", folder / f"envoy-{port}.log"
    path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    command = [tool("envoy"), "-c", path, "--disable-hot-restart", "--concurrency", "1", "--log-level", "warn"]
    with log.open("wb") as output:
        # The path of the descriptor set is relative to the root of the checkout.
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=output, stderr=output)
    envoy = Envoy(port, admin_port, log, process)
    try:
        envoy.wait(lambda: envoy.admin("/ready")[0] == 200, "ready")
        yield envoy
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _endpoint(port: int) -> Configuration:
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
