"""Modes of `fissile worker`, and the options that have no effect in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.cli.core.modes import Mode

_CPU_KERNELS: Final = ("cpu", "torch")
_GPU_KERNELS: Final = ("triton", "aiter")


def _runs_ranks_only(given: Mapping[str, Any]) -> bool:
    return bool(given["node_rank"] > 0)


def _is_simulated(given: Mapping[str, Any]) -> bool:
    return given["simulate"] is not None


def _has_no_ranks(given: Mapping[str, Any]) -> bool:
    return bool(given["tp_size"] == 1 and given["dp_size"] == 1)


def _is_alone(given: Mapping[str, Any]) -> bool:
    return bool(given["nnodes"] == 1 and given["dp_size"] == 1)


def _is_on_cpu(given: Mapping[str, Any]) -> bool:
    """True if the options name kernels of a CPU. With `auto`, `_kernels` checks when the model is loaded."""
    return given["kernels"] in _CPU_KERNELS or given["cpu_isa"] != "auto"


RANKS_ONLY: Final = Mode(
    "with --node-rank 1 or more",
    _runs_ranks_only,
    "such a machine runs ranks, and machine 0 serves requests and says how the model is computed",
    only=frozenset(
        {
            "model",
            "tp_size",
            "nnodes",
            "node_rank",
            "dist_init",
            "dist_secret",
            "threads",
            "drain_timeout",
            "health_port",
            "host",
            "log_level",
        }
    ),
)
RANKS_WITHOUT_PORT: Final = Mode(
    "with --node-rank 1 or more and without --health-port",
    lambda given: _runs_ranks_only(given) and given["health_port"] is None,
    "no port is opened",
    unused=frozenset(("host",)),
)
SIMULATED: Final = Mode(
    "with --simulate",
    _is_simulated,
    "no model is computed",
    # `worker_options` checks `--speculative-config`, whose effect depends on its method.
    unused=frozenset(
        {
            "dtype",
            "kv_cache_dtype",
            "kernels",
            "cpu_isa",
            "batch_invariant",
            "enforce_eager",
            "graph_sizes",
            "quantize",
            "weights_cache",
            "threads",
            "kv_digests",
            "enable_constraints",
            "enable_expert_parallel",
            "dist_secret",
        }
    ),
    holds={"weights_cache": "off", "enable_constraints": False, "kv_digests": 0.0},
)
WITHOUT_RANKS: Final = Mode(
    "without --tp-size, --dp-size or --step-dumps",
    lambda given: _has_no_ranks(given) and given["step_dumps"] is None,
    "the model runs in the worker's own process, whose steps the router's --stall-timeout watches",
    unused=frozenset(("step_timeout",)),
)
ALONE: Final = Mode(
    "without --nnodes or --dp-size",
    _is_alone,
    "all ranks are this machine's own",
    unused=frozenset(("dist_secret",)),
)
DATA_PARALLEL: Final = Mode(
    "with --dp-size 2 or more",
    lambda given: given["dp_size"] > 1,
    "engines in lockstep capture no graphs",
    unused=frozenset(("enforce_eager", "graph_sizes")),
)
ON_CPU: Final = Mode(
    "with kernels of a CPU",
    _is_on_cpu,
    "it is about GPUs",
    unused=frozenset(("batch_invariant", "enforce_eager", "graph_sizes", "gpu_memory_utilization")),
    holds={"batch_invariant": True},
)
ON_GPU: Final = Mode(
    "with kernels of a GPU",
    lambda given: given["kernels"] in _GPU_KERNELS,
    "it is about CPUs",
    unused=frozenset(("weights_cache",)),
    holds={"weights_cache": "off"},
)
FIXED_KV_MEMORY: Final = Mode(
    "with --kv-cache-memory",
    lambda given: given["kv_cache_memory"] is not None,
    "the KV cache has the size that you give",
    unused=frozenset(("gpu_memory_utilization",)),
)
UNDIGESTED: Final = Mode(
    "with --no-prefix-caching or --no-batch-invariant",
    lambda given: not (given["prefix_caching"] and given["batch_invariant"]),
    "no KV block is digested: none is cached, or no other worker has equal ones",
    unused=frozenset(("kv_digests",)),
    holds={"kv_digests": 0.0},
)
# Modes that `fissile bench offline` has too.
ENGINE_MODES: Final = (ON_CPU, ON_GPU, FIXED_KV_MEMORY)
MODES: Final = (
    RANKS_ONLY,
    RANKS_WITHOUT_PORT,
    SIMULATED,
    WITHOUT_RANKS,
    ALONE,
    DATA_PARALLEL,
    *ENGINE_MODES,
    UNDIGESTED,
)
