"""The pages for operators name every metric, RPC, command and field of Config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from fissile.admin.v1 import admin_pb2

from common.cli.group import SUMMARIES
from common.config import Config
from common.telemetry import names
from worker.cli.worker import worker
from worker.cli.worker_options import worker_options

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "how-to" / "run-a-model.md").read_text(encoding="utf-8")
METRICS_PAGE = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (DOCS / "reference" / "operator-commands.md").read_text(encoding="utf-8")
METRICS = [
    value
    for name, value in vars(names).items()
    if name.startswith(("ROUTER_", "SERVER_", "ENGINE_", "PROCESS_")) or name in ("WORKER_RUNNING", "WORKER_QUEUED")
]


def documented() -> set[str]:
    """Metric names of the tables; `.suffix` replaces the end of the previous name."""
    found: set[str] = set()
    for row in re.findall(r"^\| (`[^|]+) \|", METRICS_PAGE, re.MULTILINE):
        cells = re.findall(r"`([^`]+)`", row)
        found.update(cells)
        for suffix in (cell for cell in cells if cell.startswith(".")):
            parts = cells[0].split(".")
            found.update(".".join(parts[:i]) + suffix for i in range(1, len(parts)))
    return found


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_in_a_table(metric: str) -> None:
    assert metric in documented()


@pytest.mark.parametrize("rpc", [m.name for m in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods])
def test_every_rpc_of_operators_is_described(rpc: str) -> None:
    assert rpc in COMMANDS_PAGE


@pytest.mark.parametrize("command", ["workers", "cordon", "uncordon", "drain", "flush", "routing", "reload"])
def test_every_command_of_operators_is_described(command: str) -> None:
    assert command in SUMMARIES
    assert f"`fissile {command}" in COMMANDS_PAGE


# Arguments of `fissile worker` that change each field of Config from its default.
REACHED_BY = {
    "model": ["--model", "/other"],
    "max_num_seqs": ["--max-num-seqs", "3"],
    "max_num_batched_tokens": ["--max-num-batched-tokens", "77"],
    "kv_cache_block_size": ["--block-size", "32"],
    "enable_prefix_caching": ["--no-prefix-caching"],
    "scheduler_delay_factor": ["--scheduler-delay-factor", "0.5"],
    "scheduling_policy": ["--scheduling-policy", "prefill_first"],
    "prefill_slice_s": ["--prefill-slice", "1s"],
    "gpu_memory_utilization": ["--gpu-memory-utilization", "0.5"],
    "kv_cache_memory": ["--kv-cache-memory", "3MiB"],
    "max_model_len": ["--max-model-len", "99"],
    "dtype": ["--dtype", "float16"],
    "kv_cache_dtype": ["--kv-cache-dtype", "fp8"],
    "kernels": ["--kernels", "torch"],
    "weights_cache": ["--weights-cache", "/cache"],
    "cpu_isa": ["--cpu-isa", "avx2"],
    "batch_invariant": ["--no-batch-invariant"],
    "enforce_eager": ["--enforce-eager"],
    "quantize": ["--quantize", "int8"],
    "tensor_parallel_size": ["--tp-size", "2"],
    "enable_expert_parallel": ["--tp-size", "2", "--enable-expert-parallel"],
    "parallel_config": ["--dp-size", "2", "--dist-init", "tcp://a:1", "--enable-expert-parallel"],
    "compilation_config": ["--graph-sizes", "2"],
    "hash_seed": ["--hash-seed", "7"],
    "kv_digests": ["--kv-digests", "50%"],
    "kv_tiers": ["--kv-tiers", "memory:1GiB"],
    "enable_constraints": ["--no-constraints"],
    "speculative_config": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
}


def config_of(arguments: list[str]) -> Config:
    params = worker.make_context("worker", arguments).params
    return worker_options(**{name: value for name, value in params.items() if name != "log_level"}).config


def fields_without_option() -> Iterator[str]:
    table = TEXT.partition("have no option:")[2].partition("## ")[0]
    for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE):
        yield from re.findall(r"`(\w+)`", row)


@pytest.mark.parametrize("field", REACHED_BY)
def test_option_value_reaches_config_field(field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plain = ["--model", str(tmp_path)]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    arguments = [str(other) if part == "/other" else part for part in REACHED_BY[field]]
    assert getattr(config_of([*plain, *arguments]), field) != getattr(config_of(plain), field)


def test_each_field_of_config_has_an_option_or_a_reason() -> None:
    assert sorted([*REACHED_BY, *fields_without_option()]) == sorted(each.name for each in fields(Config))
