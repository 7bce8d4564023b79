"""From the options of `fissile worker` to those of a Worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from common.cli.core.errors import CommandError
from common.cli.core.tls_options import server_tls
from common.config import CompilationConfig, Config, ParallelConfig
from common.errors import ApiError
from common.files import UnreadableFileError, read_file
from common.hub import HubError, default_model_name, model_folder
from common.limits import MAX_SECRET_BYTES
from common.params.config_parts import NGRAM
from common.rpc.auth import PeerAccess
from common.step_defaults import default_scheduling_policy, default_token_budget
from worker.config.engine_config import default_weights_cache
from worker.ranks.door import SECRET_VARIABLE
from worker.ranks.topology import Topology
from worker.server import WorkerOptions
from worker.simulation.presets import cost_model

# Options that are fields of Config by the same name.
_OF_CONFIG: Final = (
    "max_num_seqs",
    "scheduler_delay_factor",
    "hash_seed",
    "kv_digests",
    "enable_constraints",
    "dtype",
    "kv_cache_dtype",
    "kernels",
    "cpu_isa",
    "batch_invariant",
    "enforce_eager",
    "quantize",
    "gpu_memory_utilization",
    "speculative_config",
    "prefill_slice_s",
    "enable_expert_parallel",
)
# Likewise of Topology.
_OF_TOPOLOGY: Final = ("tp_size", "nnodes", "node_rank", "dist_init", "dp_size", "dp_rank")


def worker_options(
    *,
    model: str,
    model_name: str | None,
    simulate: str | None,
    drain_timeout: float,
    step_timeout: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    router_identities: tuple[str, ...],
    dist_secret: Path | None,
    **others: Any,
) -> WorkerOptions:
    """The command's options as the classes take them.

    Raises:
        CommandError: a value is not allowed, or some do not fit together.
    """
    if simulate is not None and max(others["tp_size"], others["dp_size"]) > 1:
        raise CommandError("--simulate runs no ranks: leave --tp-size and --dp-size away, and name a preset with -tpN")
    speculation = others["speculative_config"]
    if simulate is not None and speculation is not None and speculation.method != NGRAM:
        raise CommandError(
            f"--speculative-config has no effect with --simulate and the method {speculation.method}, whose drafts a "
            f"model makes; take the method {NGRAM}"
        )
    try:
        topology = Topology(**{name: others.pop(name) for name in _OF_TOPOLOGY}, dist_secret=_secret(dist_secret))
        folder = model_folder(model, weights=simulate is None)
        config = _config(str(folder), topology, others, is_simulated=simulate is not None)
        cost = None if simulate is None else cost_model(simulate)
    except (ApiError, HubError) as error:
        raise CommandError(str(error)) from None
    return WorkerOptions(
        config=config,
        model_name=model_name or default_model_name(model),
        drain_timeout_s=drain_timeout,
        simulate=cost,
        topology=topology,
        step_timeout_s=step_timeout,
        tls=server_tls(tls_cert, tls_key, tls_client_ca),
        access=_access(tls_client_ca, router_identities),
        **others,
    )


def _config(folder: str, topology: Topology, options: dict[str, Any], *, is_simulated: bool) -> Config:
    """Takes the engine's options out of `options`, with the defaults of its kernels for those that are not given."""
    kernels = options["kernels"]
    budget = options.pop("max_num_batched_tokens") or default_token_budget(
        kernels, is_simulated=is_simulated, max_num_seqs=options["max_num_seqs"]
    )
    policy = options.pop("scheduling_policy") or default_scheduling_policy(kernels, is_simulated=is_simulated)
    return Config(
        model=folder,
        kv_cache_block_size=options.pop("block_size"),
        enable_prefix_caching=options.pop("prefix_caching"),
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        kv_cache_memory=options.pop("kv_cache_memory") or 0,
        max_model_len=options.pop("max_model_len") or 0,
        weights_cache=_weights_cache(options.pop("weights_cache")),
        tensor_parallel_size=topology.tp_size,
        parallel_config=ParallelConfig(topology.dp_size, topology.dp_rank),
        compilation_config=CompilationConfig(cudagraph_capture_sizes=options.pop("graph_sizes")),
        **{name: options.pop(name) for name in _OF_CONFIG},
    )


def _secret(file: Path | None) -> str:
    """The secret of the ranks; empty for none."""
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "")
    try:
        secret = read_file(file, MAX_SECRET_BYTES).decode("utf-8").strip()
    except (UnreadableFileError, UnicodeDecodeError) as error:
        raise CommandError(f"--dist-secret: {error}") from None
    if not secret:
        raise CommandError(f"--dist-secret: {file} is empty")
    return secret


def _weights_cache(given: str | None) -> str:
    """The folder; empty for none."""
    if given == "off":
        return ""
    return str(Path(given).absolute()) if given else default_weights_cache()


def _access(client_ca: Path | None, router_identities: tuple[str, ...]) -> PeerAccess | None:
    if client_ca is None and not router_identities:
        return None
    if client_ca is None:
        raise CommandError("--router-identity needs --tls-client-ca: without it nobody shows a certificate")
    if not router_identities:
        raise CommandError("--tls-client-ca needs --router-identity: the names in the certificates of routers")
    return PeerAccess(router_identities)
