"""`WorkerOptions` from the values of the options of `fissile worker`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from common.cli.core.errors import CommandError
from common.cli.core.tls_options import server_tls
from common.cli.group import missing_extra
from common.config import CompilationConfig, Config, ParallelConfig
from common.errors import ApiError
from common.files import UnreadableFileError, read_file
from common.hub import default_model_name
from common.limits import MAX_SECRET_BYTES
from common.params.config_parts import NGRAM
from common.params.names import ROLES
from common.params.options.engine import WORKER
from common.params.options.table import options_of
from common.params.step_defaults import default_scheduling_policy, default_token_budget
from common.rpc.auth import PeerAccess
from worker.cli.hub_models import command_model_folder
from worker.config.engine_config import default_weights_cache
from worker.doors.served_doors import SERVED_DOORS
from worker.kv_tiers.tier_option import check_tiers, is_shared
from worker.ranks.door import SECRET_VARIABLE
from worker.ranks.topology import Topology
from worker.server import WorkerOptions
from worker.simulation.presets import cost_model

# Options that are fields of Topology.
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
    """Makes WorkerOptions from the values of the options of `fissile worker`.

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
    for name in others["doors"]:
        if (module := SERVED_DOORS[name].module) and importlib.util.find_spec(module) is None:
            raise missing_extra(f"worker --doors {name}", module)
    try:
        topology = Topology(**{name: others.pop(name) for name in _OF_TOPOLOGY}, dist_secret=_secret(dist_secret))
        folder = command_model_folder(model, weights=simulate is None)
        config = _config(str(folder), topology, others, is_simulated=simulate is not None)
        cost = None if simulate is None else cost_model(simulate)
        check_tiers(config.kv_tiers)
        if others["role"] != ROLES[0] and not is_shared(config.kv_tiers):
            raise CommandError("--role needs --kv-tiers that workers share, where the other half finds the blocks")
    except ApiError as error:
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


def engine_options(given: Mapping[str, Any]) -> WorkerOptions:
    """Makes WorkerOptions for a command that runs the engine without serving.

    Args:
        given: values of the command's options; the others have the defaults of `fissile worker`.

    Raises:
        CommandError: a value is not allowed, or some do not fit together.
    """
    rows = {name: row for name, row in options_of(WORKER).items() if name not in ("config", "log_level")}
    defaults = {name: () if row.is_repeatable else row.default for name, row in rows.items()}
    # Digests and constraints are for requests of a service.
    return worker_options(**{**defaults, "kv_digests": 0.0, "enable_constraints": False, **given})


def _config(folder: str, topology: Topology, options: dict[str, Any], *, is_simulated: bool) -> Config:
    """Makes the Config from the engine's options, which it removes from `options`. Absent ones have the kernels'
    defaults."""
    rows = {name: row for name, row in options_of(WORKER).items() if row.field and name in options}
    given = {row.field: options.pop(name) for name, row in rows.items()}
    kernels = given["kernels"]
    given["max_num_batched_tokens"] = given["max_num_batched_tokens"] or default_token_budget(
        kernels, is_simulated=is_simulated, max_num_seqs=given["max_num_seqs"]
    )
    given["scheduling_policy"] = given["scheduling_policy"] or default_scheduling_policy(
        kernels, is_simulated=is_simulated
    )
    given["weights_cache"] = _weights_cache(given["weights_cache"])
    return Config(
        model=folder,
        tensor_parallel_size=topology.tp_size,
        parallel_config=ParallelConfig(topology.dp_size, topology.dp_rank),
        compilation_config=CompilationConfig(cudagraph_capture_sizes=options.pop("graph_sizes")),
        **{field: value for field, value in given.items() if value is not None},
    )


def _secret(file: Path | None) -> str:
    """Reads the secret of the ranks from its file; empty without one."""
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
    """Folder of packed weights; an empty path turns the cache off."""
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
