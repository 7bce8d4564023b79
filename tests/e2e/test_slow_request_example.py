"""The example of docs/how-to/find-a-slow-request.md: its commands lead from the alert to the tenant that caused it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.chaos.support import log_entries, until
from tests.e2e.service import REPOSITORY, Service, free_port, running_service
from tests.e2e.simulated import request, simulated_model, wait_workers
from tests.e2e.test_observability import Prometheus

PAGE = REPOSITORY / "docs" / "how-to" / "find-a-slow-request.md"
HEADING = "## An example: from an alert to the neighbour"
# A prompt of 30,000 tokens takes some seconds.
SIMULATED = ["--simulate", "mi300x-llama-70b", "--max-model-len", "40000"]
LONG = 30_000


class Load:
    """Short chats of one tenant, all the time, and from `plant` on long prompts of another one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_over = threading.Event()
        self._has_reports = threading.Event()

    def plant(self) -> None:
        """Starts the long prompts."""
        self._has_reports.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sends requests until the block ends."""
        with ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(self._chat, number) for number in range(4)]
            clients += [pool.submit(self._report, number) for number in range(2)]
            try:
                yield
            finally:
                self._is_over.set()
                self._has_reports.set()
        for client in clients:
            client.result()

    def _ask(self, asked: pb.GenerateRequest, tenant: str) -> None:
        for _ in self._service.stub.Generate(asked, timeout=300, metadata=(("x-fissile-tenant", tenant),)):
            pass

    def _chat(self, client: int) -> None:
        number = client
        while not self._is_over.is_set():
            asked = request(number, 20)
            asked.request_id = f"chat-{number}"
            self._ask(asked, "chat")
            number += 4

    def _report(self, client: int) -> None:
        self._has_reports.wait()
        number = client
        while not self._is_over.is_set():
            ids = [(number * 31 + i * 7) % 250 for i in range(LONG)]
            asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), request_id=f"report-{number}")
            asked.sampling_params.max_tokens = 2
            self._ask(asked, "reports")
            number += 2


class Example:
    """The commands of the page, for a running fleet."""

    def __init__(self, folder: Path, service: Service, admin_port: int, prometheus: Prometheus) -> None:
        self._folder = folder
        self._router = service.router
        self._prometheus = prometheus
        fissile = folder / "fissile"
        fissile.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from common.cli.main import main; main()" "$@"\n')
        fissile.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "protos")]),
            "FISSILE_ADDRESS": service.router.address,
            "FISSILE_ADMIN_ADDRESS": f"127.0.0.1:{admin_port}",
            "FISSILE_TIMEOUT": "120s",
            "COLUMNS": "100",
        }

    def run(self, command: str) -> str:
        """The output of a command of the page."""
        here = command.replace("http://127.0.0.1:9090", f"http://{self._prometheus.address}")
        done = subprocess.run(
            ["sh", "-c", here], cwd=self._folder, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout)
        return done.stdout

    def until_fires(self, alert: str) -> None:
        """Waits for the alert."""
        end = time.monotonic() + 180
        query = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
        while not self._prometheus.has_values(query):
            assert time.monotonic() < end
            time.sleep(0.5)

    def until_logged(self, request_id: str) -> None:
        """Waits for the line of an ended request."""
        ended = ("request ended", request_id)
        until(lambda: any((each["event"], each.get("request_id")) == ended for each in log_entries(self._router)))


@contextlib.contextmanager
def running_example(folder: Path) -> Iterator[tuple[Example, Load]]:
    """Starts a fleet of one worker, and a Prometheus with the rules of deploy/observability."""
    ports = {"router": [free_port()], "worker": [free_port()]}
    admin, model = free_port(), simulated_model(folder / "model", 40_000)
    with running_service(
        folder, model,
        worker_options=[*SIMULATED, "--metrics-port", str(ports["worker"][0])],
        router_options=["--admin-port", str(admin), "--metrics-port", str(ports["router"][0])],
    ) as service, Prometheus(folder, ports) as prometheus:  # fmt: skip
        wait_workers(service, 1)
        yield Example(folder, service, admin, prometheus), Load(service)


def commands() -> list[str]:
    """The commands of the example, in order."""
    section = PAGE.read_text("utf-8").split(HEADING)[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)\n```", section, re.DOTALL)


@pytest.mark.slow
def test_five_commands_lead_from_alert_to_tenant_with_long_prompts(tmp_path: Path) -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed")
    alert, top, trace, log, steps = commands()
    with running_example(tmp_path) as (example, load), load.running():
        load.plant()
        example.until_fires("FissileFirstTokenBudgetBurnsFast")
        assert "FissileFirstTokenBudgetBurnsFast" in example.run(alert)
        frame = example.run(top)
        assert re.search(r"^reports ", frame, re.MULTILINE), frame
        (documented,) = re.findall(r"\b[0-9a-f]{32}\b", log)
        blamed, end = list[str](), time.monotonic() + 180
        # Between two reports a request may be fast.
        while not blamed:
            drawn = example.run(trace)
            (asked,) = re.findall(r"request ([0-9a-f]{32})$", drawn, re.MULTILINE)
            example.until_logged(asked)
            blamed = re.findall(r'"(report-\d+)", "tenant": "reports"', example.run(log.replace(documented, asked)))
            assert time.monotonic() < end, drawn
        assert "a request of another tenant" in drawn
        shown = example.run(re.sub(r"report-\d+", blamed[-1], steps))
        assert re.search(r"prefill \d+ at \d+", shown), shown
