"""`fissile worker`: the command and its options."""

from __future__ import annotations

import sys
from typing import Any, Final

import click
import structlog
import uvloop
from typing_extensions import override

from common.cli.core.config_file import ConfigurableCommand, config_option
from common.cli.core.modes import unused_variables
from common.cli.core.options import SHORTEST_S, ByteSize, Duration, Fraction, Sizes, option
from common.cli.core.speculative_option import Speculation
from common.cli.core.tls_options import file_option, health_port_option, server_tls_options
from common.config import QUANTIZE, SCHEDULING_POLICIES, Config
from common.limits import (
    DRAIN_TIMEOUT_S,
    STEP_TIMEOUT_S,
)
from common.rpc.descriptors import raise_descriptor_limit
from common.step_defaults import (
    BUDGET_ON_CPU,
    BUDGET_ON_GPU,
    POLICY_ON_CPU,
    POLICY_ON_GPU,
    PREFILL_SLICE_S,
)
from common.telemetry.logs import LEVELS, setup_logging
from common.telemetry.output import guard_standard_streams
from worker.cli.worker_modes import MODES
from worker.cli.worker_options import worker_options
from worker.server import run_worker

log = structlog.get_logger(__name__)

WARMUP: Final = "warmup"
# For so long the event loop keeps the interpreter from the engine thread, which wants it between two steps; by default
# 5 ms, each time.
SWITCH_INTERVAL_S: Final = 0.0005


class WorkerCommand(ConfigurableCommand):
    """`fissile worker`; with `warmup` as its first argument, that command, which runs no worker."""

    @override
    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        if args[:1] != [WARMUP]:
            return super().make_context(info_name, args, *rest, **extra)
        # It takes its options from the command below.
        from worker.cli.warmup import warmup  # noqa: PLC0415

        return warmup.make_context(f"{info_name} {WARMUP}", args[1:], *rest, **extra)


@click.command(cls=WorkerCommand, modes=MODES, context_settings={"help_option_names": ["-h", "--help"]})
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
def worker(log_level: str, **given: Any) -> int:
    """Run one worker: an engine with its model, for routers.

    With --tp-size the model is split over several processes, on this machine or on several (--nnodes). When one of them
    dies or hangs, routers move its requests to other workers, health becomes NOT_SERVING, and all ranks are started
    again.

    Ends on SIGTERM or Ctrl-C: health becomes NOT_SERVING, routers move running answers to other workers of the same
    numerics class, the others finish, exit code 0. The Drain RPC does the same.

    `fissile worker warmup --model MODEL` compiles the kernels that a worker on a GPU needs, before it is started.
    """
    guard_standard_streams()
    setup_logging(log_level, service="worker")
    if unused := unused_variables(click.get_current_context()):
        log.warning("variables without effect in this mode", variables=unused)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(run_worker(worker_options(**given)))
