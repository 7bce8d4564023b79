"""`--nnodes auto` takes machines from LeaderWorkerSet, torchrun or Slurm; without it no such variable counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.cli.core.errors import CommandError
from tests.e2e.simulated import simulated_model
from worker.cli.launchers import LAUNCHERS, first_host, node_placement
from worker.cli.worker import worker

TORCHRUN = {"GROUP_WORLD_SIZE": "4", "GROUP_RANK": "3", "MASTER_ADDR": "10.0.0.2", "LOCAL_WORLD_SIZE": "1"}
SLURM = {
    "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "m-0.m.llm"}
SETS = {"torchrun": TORCHRUN, "Slurm": SLURM, "LeaderWorkerSet": LWS}
FOUND = {
    "torchrun": (4, 3, "tcp://10.0.0.2:4100"),
    "Slurm": (2, 1, "tcp://gpu07:4100"),
    "LeaderWorkerSet": (2, 1, "tcp://m-0.m.llm:4100"),
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for each in SETS.values() for name in each}:
        monkeypatch.delenv(name, raising=False)


def placed(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *options: str) -> tuple[Any, ...]:
    """Parameters of `fissile worker` that say where its ranks run."""
    with monkeypatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        params = worker.make_context("worker", ["--model", "m", "--tp-size", "4", *options]).params
    return params["nnodes"], params["node_rank"], params["dist_init"]


@pytest.mark.parametrize("launcher", SETS)
def test_auto_takes_machines_from_launcher(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, SETS[launcher], "--nnodes", "auto") == FOUND[launcher]
    assert placed(monkeypatch, {**SETS[launcher], "FISSILE_NNODES": "auto"}) == FOUND[launcher]


@pytest.mark.parametrize("launcher", SETS)
def test_launcher_variables_without_auto_have_no_effect(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, SETS[launcher]) == (1, 0, "")


def test_options_by_hand_override_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--nnodes", "auto", "--dist-init", "tcp://10.1.1.1:77", "--node-rank", "0"]
    assert placed(monkeypatch, LWS, *given) == (2, 0, "tcp://10.1.1.1:77")
    by_variable = {**LWS, "FISSILE_DIST_INIT": "tcp://10.1.1.1:78"}
    assert placed(monkeypatch, by_variable, "--nnodes", "auto") == (2, 1, "tcp://10.1.1.1:78")


def test_auto_accepts_options_of_machine_0_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher runs one command line everywhere; by hand such an option is refused."""
    assert (
        placed(monkeypatch, LWS, "--nnodes", "auto", "--port", "1234", "--max-model-len", "99")
        == (FOUND["LeaderWorkerSet"])
    )
    by_hand = ["--nnodes", "2", "--dist-init", "tcp://a:1", "--node-rank", "1", "--port", "1234"]
    with pytest.raises(CommandError, match="--port has no effect with --node-rank"):
        placed(monkeypatch, {}, *by_hand)


def test_group_of_one_machine_has_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}
    assert placed(monkeypatch, alone, "--nnodes", "auto") == (1, 0, "")


def test_torchrun_overrides_the_job_around_it() -> None:
    assert node_placement({**LWS, **SLURM, **TORCHRUN}).source.startswith("torchrun (")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_each_missing_or_contradictory_variable_is_refused(launcher: Any) -> None:
    whole = SETS[launcher.name]
    for name in (launcher.size, launcher.rank, launcher.host):
        for cut in ({each: value for each, value in whole.items() if each != name}, {**whole, name: " "}):
            with pytest.raises(CommandError, match=f"{launcher.name}: {name} is not set beside"):
                node_placement(cut)
    wrong = [(launcher.rank, whole[launcher.size]), (launcher.rank, "-1"), (launcher.size, "two"), (launcher.size, "0")]
    if launcher.tasks:
        wrong.append((launcher.tasks, "8"))
    for name, value in wrong:
        with pytest.raises(CommandError) as refused:
            node_placement({**whole, name: value})
        assert f"{name} is " in str(refused.value)
        assert "\n" not in str(refused.value)


def test_auto_without_launcher_names_all_variables() -> None:
    with pytest.raises(CommandError) as refused:
        node_placement({"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"})
    for launcher in LAUNCHERS:
        assert launcher.rank in str(refused.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],other", "gpu07"), ("rack[1,3]-a", "rack1-a"),
        ("a.example.org,b[1-2]", "a.example.org"), ("10.0.0.2,10.0.0.3", "10.0.0.2"), ("n[010]", "n010"),
        ("rack[1-2]n[3-4]", "rack1n3"), ("r[03,07]n[08-10]-ib,x", "r03n08-ib"), ("n[0-8:4]", "n0"), ("[4-5]", "4"),
        ("n[1-2", ""), ("n[a-b]", ""), ("n[]", ""), ("n]1", ""), (",n1", ""), ("", ""),
    ],
)  # fmt: skip
def test_first_host_of_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_unreadable_slurm_list_is_refused_by_name() -> None:
    with pytest.raises(CommandError, match=r"SLURM_STEP_NODELIST is 'n\[1-2', not a list of machines"):
        node_placement({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"})


def test_auto_ipv6_leader_has_brackets() -> None:
    assert node_placement({**LWS, "LWS_LEADER_ADDRESS": "fd00::1"}).dist_init == "tcp://[fd00::1]:4100"


def run(folder: Path, variables: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FISSILE_NNODES")}
    command = [sys.executable, "-m", "common.cli.main", "worker", "--model", str(folder), "--tp-size", "2", *options]
    return subprocess.run(
        command, env={**kept, **variables}, capture_output=True, text=True, check=False, timeout=120, cwd=Path.cwd()
    )


def test_command_refuses_half_of_variables_with_one_line(tmp_path: Path) -> None:
    folder = simulated_model(tmp_path / "m")
    refused = run(folder, {"LWS_GROUP_SIZE": "2"}, "--nnodes", "auto")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "LWS_WORKER_INDEX is not set beside LWS_GROUP_SIZE" in refused.stderr


def test_start_log_names_launcher_and_machines(tmp_path: Path) -> None:
    folder = simulated_model(tmp_path / "m")
    leader = {**LWS, "LWS_WORKER_INDEX": "0", "FISSILE_LOG_FORMAT": "json"}
    # Two machines cannot share three ranks, so the command ends after its first lines.
    ended = run(folder, leader, "--nnodes", "auto", "--tp-size", "3")
    assert ended.returncode == 2
    logged = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    (line,) = [each for each in logged if each["event"] == "machines from the launcher's variables"]
    assert line["source"] == "LeaderWorkerSet (LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS)"
    assert (line["nnodes"], line["node_rank"], line["dist_init"]) == (2, 0, "tcp://m-0.m.llm:4100")
