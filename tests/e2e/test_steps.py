"""The flight recorder of real workers, as operators see it: `fissile steps` and ListSteps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.cli.core.errors import CommandError
from router.cli.steps import steps
from tests.e2e.service import Service, free_port, generate, running_service
from tests.e2e.simulated import request, simulated_model, wait_workers


class Site:
    """A service with one worker that preempts, and its administration."""

    def __init__(self, service: Service, admin: str) -> None:
        self.service = service
        self.admin = admin

    def run(self, *arguments: str) -> str:
        """The text that `fissile steps` prints."""
        result = CliRunner().invoke(steps, [*arguments, "--admin-address", self.admin], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    def listed(self, *arguments: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.run("worker-0", "--json", *arguments).splitlines()]

    def until_ended(self) -> list[dict[str, object]]:
        """All recorded steps, once none is in flight."""
        end = time.monotonic() + 60
        while True:
            found = self.listed("--last", "4096")
            if not any(step["in_flight"] for step in found):
                return found
            assert time.monotonic() < end


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("steps"), free_port()
    model = simulated_model(tmp_path_factory.mktemp("model"))
    options = ["--admin-port", str(port)]
    with running_service(folder, model, worker_options=["--simulate", "fixed:2ms"], router_options=options) as service:
        wait_workers(service, 1)
        yield Site(service, f"127.0.0.1:{port}")


def test_steps_under_load_add_up_to_prompts_and_answers(site: Site) -> None:
    asked = [request(100 + i, 40) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: generate(site.service.stub, each), asked))
    found = site.until_ended()
    numbers = [int(str(step["number"])) for step in found]
    assert numbers == list(range(1, len(found) + 1))
    computed: dict[str, list[dict[str, object]]] = {}
    for step in found:
        for row in step["rows"]:  # type: ignore[attr-defined]
            computed.setdefault(row["request_id"], []).append(row)
    assert computed.keys() == {each.request_id for each in asked}
    prompts = sorted(len(each.token_ids.ids) for each in asked)
    prefills = [[row for row in rows if row["kind"] == "STEP_ROW_KIND_PREFILL"] for rows in computed.values()]
    # The first token comes with the prompt, and nothing follows the last one.
    assert sorted(sum(int(str(row["tokens"])) for row in rows) for rows in prefills) == prompts
    assert all(len(rows) - len(prompt) >= 39 for rows, prompt in zip(computed.values(), prefills, strict=True))
    assert sum(int(str(step["new_tokens"])) for step in found) == sum(len(answer.token_ids) for answer in answers)


def test_table_shows_steps_of_one_request(site: Site) -> None:
    with grpc.insecure_channel(site.service.workers[0].address) as channel:
        wanted = wpb.GenerateRequest(request_id="slow", token_ids=range(1, 30))
        wanted.params.max_tokens = 5
        wanted.params.top_p = wanted.params.repetition_penalty = 1
        wanted.params.ignore_eos = True
        assert len([*WorkerServiceStub(channel).Generate(wanted, timeout=60)]) >= 1
    lines = site.run("worker-0", "--request", "slow", "--last", "100").splitlines()
    assert lines[0].split() == [
        *("STEP", "START", "MS", "DECODE", "VERIFY", "PREFILL", "NEW", "KV", "WAITING", "LOST", "REQUEST", "TIME"),
    ]  # fmt: skip
    parts = ["prefill 29 at 0", *(f"decode 1 at {position}" for position in range(29, 33))]
    assert [part for line, part in zip(lines[1:], parts, strict=True) if part not in line] == []
    assert all(set(line.split()[-1]) <= set("░▒█") for line in lines[1:])
    assert site.run("worker-0", "--request", "other") == "no step is recorded of request other\n"
    assert len(site.run("worker-0", "--last", "3").splitlines()) == 4


def test_dump_is_drawn_as_the_live_worker(site: Site, tmp_path: Path) -> None:
    generate(site.service.stub, request(7, 12))
    site.until_ended()
    dump, shown = tmp_path / "steps.jsonl", site.run("worker-0", "--last", "4096", "--request", "r7")
    assert len(shown.splitlines()) >= 13
    dump.write_text(site.run("worker-0", "--last", "4096", "--json"), "utf-8")
    offline = ["--file", str(dump), "--admin-address", "127.0.0.1:1"]
    assert CliRunner().invoke(steps, [*offline, "--last", "4096", "--request", "r7"]).output == shown
    assert CliRunner().invoke(steps, [*offline, "--request", "other"]).output == site.run(
        "worker-0", "--request", "other"
    )
    assert CliRunner().invoke(steps, offline).output == site.run("worker-0")


def test_steps_come_from_either_worker_or_file(tmp_path: Path) -> None:
    for arguments in ([], ["worker-0", "--file", str(tmp_path / "dump")]):
        result = CliRunner().invoke(steps, arguments)
        assert result.exit_code == 2
        assert "give WORKER or --file FILE" in result.output
    with pytest.raises(CommandError, match="cannot be read"):
        CliRunner().invoke(steps, ["--file", str(tmp_path / "dump")], catch_exceptions=False)


def test_unknown_worker_is_named_with_known_ones(site: Site) -> None:
    with pytest.raises(CommandError, match="worker-0"):
        site.run("nobody")
