"""The options of `fissile worker`, and the `WorkerOptions` made from their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click

from common.cli.core.config_file import config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import SHORTEST_S, ByteSize, Duration, Fraction, Sizes, option
from common.cli.core.speculative_option import Speculation
from common.cli.core.tls_options import file_option, health_port_option, server_tls, server_tls_options
from common.config import QUANTIZE, SCHEDULING_POLICIES, CompilationConfig, Config, ParallelConfig
from common.errors import ApiError
from common.files import UnreadableFileError, read_file
from common.hub import HubError, default_model_name, model_folder
from common.limits import DRAIN_TIMEOUT_S, MAX_SECRET_BYTES, STEP_TIMEOUT_S
from common.params.config_parts import NGRAM
from common.params.names import LEVELS
from common.params.step_defaults import (
    BUDGET_ON_CPU,
    BUDGET_ON_GPU,
    POLICY_ON_CPU,
    POLICY_ON_GPU,
    PREFILL_SLICE_S,
    default_scheduling_policy,
    default_token_budget,
)
from common.rpc.auth import PeerAccess
from worker.config.engine_config import default_weights_cache
from worker.ranks.door import SECRET_VARIABLE
from worker.ranks.topology import Topology
from worker.server import WorkerOptions
from worker.simulation.presets import cost_model


@click.command
@config_option("worker")
@option(
    "--model", envvar="FISSILE_MODEL", required=True, metavar="MODEL",
    help="Hugging Face checkpoint: a folder, or org/name[@revision] on the Hub.",
)  # fmt: skip
@option(
    "--model-name", envvar="FISSILE_MODEL_NAME",
    help="Model name in requests. Default: the name of the folder or repository.",
)  # fmt: skip
@option("--host", envvar="FISSILE_WORKER_HOST", default="127.0.0.1", help="Address to listen on.")
@option("--port", envvar="FISSILE_WORKER_PORT", default=50061, type=click.IntRange(0, 65535), help="Port; 0 takes any.")
@option(
    "--worker-id", envvar="FISSILE_WORKER_ID", default="",
    help="Stable name of the worker. Default: host name and port.",
)  # fmt: skip
@option(
    "--dtype", envvar="FISSILE_DTYPE", default="auto",
    help="Dtype of weights and activations: auto, float32, bfloat16 or float16.",
)  # fmt: skip
@option(
    "--kv-cache-dtype", envvar="FISSILE_KV_CACHE_DTYPE", default="auto",
    help="Dtype of the KV cache: auto (the model's), bfloat16, float16 or fp8.",
)  # fmt: skip
@option(
    "--kernels", envvar="FISSILE_KERNELS", default="auto",
    help="Kernel back end: cpu (native CPU kernels), triton or aiter (GPUs), torch (PyTorch's operations), or auto: "
    "the first that this machine can run.",
)  # fmt: skip
@option(
    "--batch-invariant/--no-batch-invariant", envvar="FISSILE_BATCH_INVARIANT", default=Config.batch_invariant,
    help="On a GPU: keep answers independent of what else runs. Without it kernels may be faster, and equal requests "
    "may get different answers.",
)  # fmt: skip
@option(
    "--enforce-eager", envvar="FISSILE_ENFORCE_EAGER", is_flag=True, default=Config.enforce_eager,
    help="On a GPU: capture no decode steps as graphs. Starts sooner, takes less memory, decodes more slowly.",
)  # fmt: skip
@option(
    "--graph-sizes", envvar="FISSILE_GRAPH_SIZES", type=Sizes(), default=(), metavar="N,N,...",
    help="On a GPU: batch sizes whose decode step is captured as a graph. Default: 1, 2, 4, 8, 16, 24, ... up to "
    "--max-num-seqs.",
)  # fmt: skip
@option(
    "--weights-cache", envvar="FISSILE_WEIGHTS_CACHE", default=None, metavar="DIR|off",
    help="Folder of packed weights, which later starts and other workers of this machine map; off keeps none. "
    "Default: fissile/weights in $XDG_CACHE_HOME or ~/.cache.",
)  # fmt: skip
@option(
    "--cpu-isa", envvar="FISSILE_CPU_ISA", default="auto",
    help="Instruction set of the native kernels: auto (the best here), amx, avx512bf16, avx512, avx2 or plain. Under "
    "--failover exact, requests move only between workers with the same one.",
)  # fmt: skip
@option(
    "--quantize", envvar="FISSILE_QUANTIZE", type=click.Choice(QUANTIZE), default=Config.quantize,
    help="Quantize the weights when they are loaded. int8 (on GPUs fp8 too): weights only, at half the memory of "
    "bfloat16. w8a8_int8, w8a8_fp8 (GPUs): activations in 8 bits too. Answers change slightly. Under --failover "
    "exact, requests move only between workers with the same setting.",
)  # fmt: skip
@option(
    "--speculative-config", envvar="FISSILE_SPECULATIVE_CONFIG", type=Speculation(), default=None, metavar="JSON",
    help="Verify draft tokens, so that a step brings several; no answer changes. An object with method (ngram: what "
    "followed the newest tokens before; mtp: the checkpoint's own layer; eagle3: the head in the folder model; "
    "draft_model: the model in it), num_speculative_tokens (most per step), for ngram prompt_lookup_max and "
    "prompt_lookup_min (how many tokens are looked up), and adaptive: false, which verifies all drafts, whether that "
    "pays or not. Default: none.",
)  # fmt: skip
@option(
    "--max-model-len", envvar="FISSILE_MAX_MODEL_LEN", type=click.IntRange(min=2),
    help="Longest prompt plus answer, in tokens. Default: the model's, or what the KV cache holds.",
)  # fmt: skip
@option(
    "--max-num-seqs", envvar="FISSILE_MAX_NUM_SEQS", type=click.IntRange(min=1), default=Config.max_num_seqs,
    help="Most sequences that run at once.",
)  # fmt: skip
@option(
    "--max-num-batched-tokens", envvar="FISSILE_MAX_NUM_BATCHED_TOKENS", type=click.IntRange(min=1),
    help=f"Token budget of a step. Default: {BUDGET_ON_CPU} plus --max-num-seqs on a CPU, {BUDGET_ON_GPU} on a GPU and "
    "with --simulate.",
)  # fmt: skip
@option(
    "--kv-cache-memory", envvar="FISSILE_KV_CACHE_MEMORY", type=ByteSize(),
    help="KV cache memory of each rank, e.g. 2GiB. Default: a quarter of the free memory, for all ranks together.",
)  # fmt: skip
@option(
    "--gpu-memory-utilization", envvar="FISSILE_GPU_MEMORY_UTILIZATION", type=Fraction(),
    default=f"{100 * Config.gpu_memory_utilization:g}%", metavar="FRACTION",
    help="On a GPU and with --simulate: part of the memory for weights, a step, the KV cache and other processes "
    "together.",
)  # fmt: skip
@option(
    "--block-size", envvar="FISSILE_BLOCK_SIZE", type=int, default=Config.kv_cache_block_size,
    help="Tokens per KV block; 1 or a multiple of 16.",
)  # fmt: skip
@option(
    "--scheduling-policy", envvar="FISSILE_SCHEDULING_POLICY", type=click.Choice(SCHEDULING_POLICIES),
    help="Scheduling policy of steps. prefill_first: prompts go before running answers; mixed: both share each step. "
    f"Default: {POLICY_ON_CPU} on a CPU, {POLICY_ON_GPU} on a GPU and with --simulate.",
)  # fmt: skip
@option(
    "--prefill-slice", "prefill_slice_s", envvar="FISSILE_PREFILL_SLICE", type=Duration(),
    default=f"{1000 * PREFILL_SLICE_S:g}ms",
    help="Longest step with prompts while anything decodes, or five usual decode steps where these take longer: "
    "streams have no longer gaps beside a long prompt. 0s bounds steps by tokens alone.",
)  # fmt: skip
@option(
    "--prefix-caching/--no-prefix-caching", envvar="FISSILE_PREFIX_CACHING", default=True,
    help="Reuse the KV blocks of equal prefixes.",
)  # fmt: skip
@option(
    "--scheduler-delay-factor", envvar="FISSILE_SCHEDULER_DELAY_FACTOR", type=click.FloatRange(min=0), default=0.0,
    help="Delay gate of requests that come without a router, in prefill durations; 0 is off. Routers have their own.",
)  # fmt: skip
@option(
    "--hash-seed", envvar="FISSILE_HASH_SEED", type=click.IntRange(0, 2**64 - 1), default=0,
    help="Seed of the block hashes, the same for the whole fleet.",
)  # fmt: skip
@option(
    "--kv-digests", envvar="FISSILE_KV_DIGESTS", type=Fraction(), default="6.25%", metavar="FRACTION",
    help="Part of the cached KV blocks whose contents are digested, so that routers find workers that differ. All "
    "workers choose the same ones. 0% is off.",
)  # fmt: skip
@option(
    "--constraints/--no-constraints", "enable_constraints", envvar="FISSILE_CONSTRAINTS", default=True,
    help="Serve answers that are confined to a schema, an expression or a grammar. The vocabulary in the form that "
    "this needs takes up to 100 MB, on each rank.",
)  # fmt: skip
@option(
    "--threads", envvar="FISSILE_THREADS", type=click.IntRange(min=1),
    help="Compute threads, shared among the ranks of this machine. Default: all cores.",
)  # fmt: skip
@option(
    "--tp-size", envvar="FISSILE_TP_SIZE", type=click.IntRange(min=1), default=1,
    help="Tensor parallelism: number of ranks, each a process with its slice of the weights. It must divide attention "
    "heads and feed-forward units, and divide the key/value heads or be a multiple of them.",
)  # fmt: skip
@option(
    "--enable-expert-parallel/--no-enable-expert-parallel", envvar="FISSILE_ENABLE_EXPERT_PARALLEL", default=False,
    help="Expert parallelism: each rank holds some experts whole, instead of a part of each.",
)  # fmt: skip
@option(
    "--dp-size", envvar="FISSILE_DP_SIZE", type=click.IntRange(min=1), default=1,
    help="Data parallelism in lockstep, for mixtures of experts with --enable-expert-parallel: this many workers, "
    "each with its own requests and cache, share the experts. Start them with the same options but --port and "
    "--dp-rank 0, 1, ...; all of them serve, or none. Without --enable-expert-parallel run independent workers "
    "instead.",
)  # fmt: skip
@option(
    "--dp-rank", envvar="FISSILE_DP_RANK", type=click.IntRange(min=0), default=0,
    help="Number of this worker among those of --dp-size, from 0.",
)  # fmt: skip
@option(
    "--nnodes", envvar="FISSILE_NNODES", type=click.IntRange(min=1), default=1,
    help="Number of machines that the ranks are spread over, equally many on each. Run this command on all of them "
    "with the same --tp-size, --nnodes, --dist-init and --model, and with --node-rank 0, 1, ...: machine 0 serves "
    "requests; the others run ranks only, and besides take --dist-secret, --threads, --health-port with --host, and "
    "--log-level.",
)  # fmt: skip
@option(
    "--node-rank", envvar="FISSILE_NODE_RANK", type=click.IntRange(min=0), default=0,
    help="Number of this machine, from 0.",
)  # fmt: skip
@option(
    "--dist-init", envvar="FISSILE_DIST_INIT", default="", metavar="tcp://HOST:PORT",
    help="With --nnodes or --dp-size: an address of machine 0, or of worker 0, where it waits for the others' ranks. "
    "Ranks also open ports of their own among each other, unencrypted: use a private network.",
)  # fmt: skip
@file_option(
    "--dist-secret",
    "FISSILE_DIST_SECRET_FILE",
    "File with the secret that ranks prove to know at --dist-init, the same everywhere; or set FISSILE_DIST_SECRET to "
    "the secret itself. Default: none, whoever reaches --dist-init can pose as a rank.",
)
@option(
    "--step-timeout", envvar="FISSILE_STEP_TIMEOUT", type=Duration(SHORTEST_S),
    default=f"{STEP_TIMEOUT_S:g}s",
    help="Time after which a step of several ranks counts as hung: routers move its requests to other workers, and "
    "the ranks are started again. It must be longer than the longest prefill step.",
)  # fmt: skip
@option(
    "--drain-timeout", envvar="FISSILE_DRAIN_TIMEOUT", type=Duration(), default=f"{DRAIN_TIMEOUT_S:g}s",
    help="How long running requests may continue after SIGTERM.",
)  # fmt: skip
@server_tls_options("FISSILE_WORKER")
@health_port_option("FISSILE_WORKER")
@option(
    "--router-identity", "router_identities", envvar="FISSILE_ROUTER_IDENTITY", multiple=True, metavar="NAME",
    help="With --tls-client-ca: DNS name or URI (such as a SPIFFE id) in the certificates of routers. All other "
    "callers are refused, except for health. Repeatable; separated by spaces in the variable.",
)  # fmt: skip
@option(
    "--log-level", envvar="FISSILE_LOG_LEVEL", default="info", type=click.Choice(LEVELS),
    help="Lowest level that is logged.",
)  # fmt: skip
@option(
    "--simulate", envvar="FISSILE_SIMULATE", metavar="PRESET",
    help="Make up tokens without a model, at the speed of a preset: instant, fixed:5ms, mi300x-llama-8b, ...",
)  # fmt: skip
def _options() -> None:
    """Holds the options for the commands that share them."""


# Each of the options above, in the order of the help text.
WORKER_PARAMETERS: Final = tuple(_options.params)

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
