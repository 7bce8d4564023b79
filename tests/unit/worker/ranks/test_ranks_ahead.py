"""Ranks that launch a step before the tokens of the previous one arrive: real processes and a real model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import is_alive
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.executor import TimedOutput
from worker.engine.sequence import Sequence
from worker.llm_engine import default_config
from worker.progress import StartProgress
from worker.ranks.rank_client import RankGroup
from worker.ranks.rank_peers import Peer, RankLostError
from worker.ranks.rank_setup import load_ranks
from worker.ranks.topology import Topology

SOON_S = 60.0


class HeldGroup(RankGroup):
    """One rank, whose tokens come when its folder says (held_rank)."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(Topology(1), str(model), 1, StartProgress())
        self.folder = folder

    def _spawn(self, rank: int) -> Peer:
        ours, theirs = socket.socketpair()
        module = "tests.unit.worker.ranks.held_rank"
        command = [
            "common.process.exec_child",
            str(os.getpid()),
            module,
            str(rank),
            f"fd:{theirs.fileno()}",
            self._model,
        ]
        environment = {**os.environ, "HELD_STEPS": str(self.folder)}
        with theirs:
            process = subprocess.Popen([sys.executable, "-m", *command], pass_fds=(theirs.fileno(),), env=environment)
        return Peer(rank, ours, process)

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def launched(self) -> set[str]:
        return {path.name for path in self.folder.glob("launched-*")}

    def come(self, number: int, how: str = "") -> None:
        """At once with its content."""
        (self.folder / "written").write_text(how)
        (self.folder / "written").rename(self.folder / f"come-{number}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[bool], HeldGroup]]:
    """Starts a group, with deferred output or without."""
    started: list[HeldGroup] = []

    def make(deferred: bool) -> HeldGroup:
        group = HeldGroup(model, tmp_path)
        started.append(group)
        config = replace(default_config(model), num_kvcache_blocks=16, kernels="torch", deferred_output=deferred)
        load_ranks(group, config, ModelConfig.from_folder(model), StartProgress())
        group.hold()
        return group

    yield make
    for group in started:
        group.close()
        assert not any(map(is_alive, group.pids.values()))


def step(first_token: int, num_blocks: int = 1) -> ScheduledBatch:
    seq = Sequence([first_token, 8, 9], 16)
    seq.block_table = list(range(num_blocks))
    return ScheduledBatch({seq.id: seq}, [3], 3)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def two_launched(group: HeldGroup) -> tuple[Future[TimedOutput], Future[TimedOutput]]:
    steps = group.submit(step(7)), group.submit(step(11))
    until(lambda: group.launched() == {"launched-0", "launched-1"})
    assert not any(each.done() for each in steps)
    return steps


@pytest.mark.slow
def test_step_is_launched_before_tokens_of_previous_step(start: Callable[[bool], HeldGroup]) -> None:
    """Steps are answered in order, a failed launch after the step before it."""
    group, began = start(True), time.monotonic()
    first, second = two_launched(group)
    group.come(1)
    time.sleep(0.1)
    assert not second.done()
    group.come(0)
    outputs = [each.result(SOON_S) for each in (first, second)]
    assert [len(each.output.token_ids) for each in outputs] == [1, 1]
    assert 0.1 < sum(each.duration_s for each in outputs) < time.monotonic() - began
    third, fails = group.submit(step(7)), group.submit(step(7, num_blocks=0))
    until(lambda: len(group.launched()) == 3)
    assert group.failure() is None
    group.come(2)
    (token,) = third.result(SOON_S).output.token_ids.values()
    assert [token] == list(outputs[0].output.token_ids.values())
    with pytest.raises(RankLostError, match="rank 0 failed: ValueError: a block table does not cover its sequence"):
        fails.result(SOON_S)


@pytest.mark.slow
def test_failed_launch_is_reported_while_previous_step_hangs(start: Callable[[bool], HeldGroup]) -> None:
    group = start(True)
    hangs, fails = group.submit(step(7)), group.submit(step(7, num_blocks=0))
    for each in (fails, hangs):
        with pytest.raises(RankLostError, match="rank 0 failed: ValueError: a block table does not cover its sequence"):
            each.result(SOON_S)


@pytest.mark.slow
def test_lost_tokens_fail_all_steps_once(start: Callable[[bool], HeldGroup]) -> None:
    group = start(True)
    steps = two_launched(group)
    group.come(0, "lost")
    errors = [each.exception(SOON_S) for each in (*steps, group.submit(step(7)))]
    assert {str(error) for error in errors} == {"rank 0 failed: RuntimeError: the device is lost"}


@pytest.mark.slow
def test_step_without_deferred_output_waits_for_previous(start: Callable[[bool], HeldGroup]) -> None:
    """Steps in flight all fail if their rank is killed."""
    group = start(False)
    first, second, third = (group.submit(step(7)) for _ in range(3))
    until(lambda: group.launched() == {"launched-0"})
    time.sleep(0.1)
    assert group.launched() == {"launched-0"}
    group.come(0)
    assert first.result(SOON_S).output.token_ids
    until(lambda: len(group.launched()) == 2)
    os.kill(group.pids[0], signal.SIGKILL)
    for each in (second, third):
        with pytest.raises(RankLostError, match="was killed by SIGKILL"):
            each.result(SOON_S)
