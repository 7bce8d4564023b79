"""The engine as `fissile bench offline` runs it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from common.cli.bench.load import ClosedLoop, Extent
from common.cli.bench.service import Terms
from common.cli.bench.workload import RandomWorkload
from common.cli.core.errors import CommandError
from common.config import Config
from common.params.options.types import Lengths
from worker.cli.bench import EngineTarget, offline
from worker.cli.worker import worker
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "checkpoint"


def test_missing_model_error_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere"):
        EngineTarget(Config(model=str(tmp_path / "nowhere")), None, Terms())


def test_engine_target_runs_workload_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request ids of two runs differ: the engine takes none twice."""
    monkeypatch.setattr("worker.cli.bench.PROGRESS_EVERY_S", -1.0)
    target = EngineTarget(Config(model=str(DEMO), num_kvcache_blocks=64), None, Terms(sampling={"temperature": 0.0}))
    workload = RandomWorkload(0, target.model["vocab_size"], Lengths(3, 9), Lengths(4, 4))
    shown: list[int] = []
    try:
        for round_ in range(2):
            records = target.run(
                ClosedLoop(2, Extent(3)),
                partial(workload.work, round_),
                lambda records, in_flight: shown.append(in_flight),
            )
            assert [(record.status, record.output_tokens) for record in records] == [("OK", 4)] * 3
            assert all(0 < (record.ttft or 0) <= record.latency for record in records)
    finally:
        target.close()
    assert target.model["architecture"] == "Qwen3ForCausalLM"
    assert max(shown) == 2


class Failing:
    """A model whose steps raise an error."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        raise RuntimeError("no\nmemory")


def test_bench_failure_is_one_line_and_stop_prevents_run() -> None:
    target = EngineTarget(Config(model=str(DEMO), num_kvcache_blocks=64), None, Terms())
    target._engine.core.runner = Failing()
    work = partial(RandomWorkload(0, 100, Lengths(3, 3), Lengths(4, 4)).work, 0)
    try:
        with pytest.raises(CommandError, match="the engine failed: RuntimeError: no memory") as failed:
            target.run(ClosedLoop(2, Extent(3)), work, lambda records, in_flight: None)
        assert failed.value.exit_code == 1
        target.stop()
        assert target.run(ClosedLoop(2, Extent(3)), work, lambda records, in_flight: None) == []
    finally:
        target.close()


def test_message_dataset_is_refused_before_model_load(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    arguments = ["--model", str(tmp_path / "nowhere"), "--dataset", str(file)]
    refused = CliRunner().invoke(offline, arguments, standalone_mode=False).exception
    assert isinstance(refused, CommandError)
    assert refused.exit_code == 2
    assert str(refused) == (
        f"--dataset {file}: request 2 has messages, which need a router; valid offline: prompt or token_ids"
    )


def test_bench_offline_has_every_engine_option() -> None:
    options = {option.name: option for option in offline.params if isinstance(option, click.Option)}
    of_worker = {option.name: option for option in worker.params}
    assert {"model", "dtype", "kernels", "threads", "tp_size", "scheduling_policy", "max_num_seqs"} <= options.keys()
    assert not {"host", "port", "config", "tls_cert", "node_rank", "simulate", "log_level"} & options.keys()
    assert options["dtype"].to_info_dict() == of_worker["dtype"].to_info_dict()
    assert all(option.help and option.show_envvar for option in options.values())
    variables = [option.envvar for option in options.values()]
    assert len(set(variables)) == len(variables)
