"""A model on two machines: network namespaces with a cable between them, each with its own `fissile worker`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.checkpoints import make_checkpoint
from tests.networks import PROMPT, Machines, cable, machines, ranks_of
from tests.processes import is_alive
from worker.llm_engine import LLMEngine, default_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_key_value_heads=1)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with cable() as wire, machines(wire, model, tmp_path_factory.mktemp("machines")) as made:
        yield made


def test_two_machines_give_same_tokens_as_one(pair: Machines, model: Path) -> None:
    alone = LLMEngine(default_config(model)).generate(
        [PROMPT], {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    )
    assert pair.generate() == alone[0]["token_ids"]


def test_recovered_machine_is_used_again(pair: Machines) -> None:
    before, expected = pair.description(), pair.generate()
    os.kill(pair.remote_rank, signal.SIGKILL)
    pair.wait_lost()
    pair.first.wait_serving()
    assert pair.description().instance_id != before.instance_id
    assert pair.generate() == expected
    assert "rank 1 on another machine has closed its connection" in pair.first.log.read_text()


@pytest.mark.parametrize("machine", [0, 1])
def test_killed_machine_joins_again_with_same_tokens(pair: Machines, machine: int) -> None:
    """Its process and rank end at once. The other machine waits for it, and needs no restart by hand."""
    expected, other = pair.generate(), (pair.first.running if machine else pair.second).pid
    stream = pair.stream(400)
    next(stream)
    pair.kill(machine)
    with pytest.raises(grpc.RpcError):
        list(stream)
    if machine:
        pair.wait_lost()
    pair.start(machine)
    pair.first.wait_serving()
    assert pair.generate() == expected
    assert (pair.first.running if machine else pair.second).pid == other


def test_logs_of_both_machines_are_json_lines(pair: Machines) -> None:
    """Former fault: PyTorch wrote plain-text warnings that the other machine's address has no name."""
    for log in (pair.first.log, pair.second_log):
        lines = log.read_text().splitlines()
        assert lines
        assert [line for line in lines if not line.startswith("{")] == []


def test_answer_ends_after_sigterm_of_both_machines(pair: Machines) -> None:
    """Former fault: SIGTERM ended the ranks of machine 1 at once, and with them the answers of a draining worker."""
    expected = list(pair.stream(400))
    pids = ranks_of(pair.second.pid) + ranks_of(pair.first.running.pid)
    assert len(pids) == 2
    stream = pair.stream(400)
    tokens = [next(stream)]
    pair.second.send_signal(signal.SIGTERM)
    pair.first.running.send_signal(signal.SIGTERM)
    tokens += stream
    assert tokens == expected
    assert pair.first.running.wait(60) == 0
    assert pair.second.wait(60) == 0
    assert not any(map(is_alive, pids))
