"""`fissile worker`: the wiring of one worker, its start and its end."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

import click
import structlog
import uvloop
from fissile.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

from common.cli.core.config_file import ConfigurableCommand, config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import SHORTEST_S, ByteSize, Duration, Sizes, option
from common.cli.core.tls_options import health_port_option, server_tls, server_tls_options
from common.config import QUANTIZE, SCHEDULING_POLICIES, CompilationConfig, Config, ParallelConfig
from common.errors import ApiError
from common.hub import HubError, default_model_name, model_folder
from common.limits import (
    DRAIN_PROPAGATION_S,
    DRAIN_TIMEOUT_S,
    ENGINE_JOIN_S,
    SESSION_FLUSH_S,
    STEP_TIMEOUT_S,
    TELEMETRY_SHUTDOWN_S,
)
from common.process.restart_policy import GiveUp, RestartPolicy
from common.rpc.auth import PeerAccess
from common.rpc.descriptors import raise_descriptor_limit
from common.rpc.server import GrpcServer, PortTakenError
from common.rpc.tls import ServerTls, TlsError
from common.step_defaults import (
    BUDGET_ON_CPU,
    BUDGET_ON_GPU,
    POLICY_ON_CPU,
    POLICY_ON_GPU,
    default_scheduling_policy,
    default_token_budget,
)
from common.telemetry import names
from common.telemetry.exporter import ExportError
from common.telemetry.logs import LEVELS, setup_logging
from common.telemetry.metrics import setup_metrics
from common.telemetry.output import exit_now, guard_standard_streams
from common.telemetry.tracing import setup_tracing
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, TokenizerError, files_sha256, read_json, tokenizer_files
from worker.config.engine_config import default_weights_cache, with_special_tokens
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.core import EngineCore
from worker.progress import Progress
from worker.ranks.engine_factory import build_rank_engine
from worker.ranks.rank_client import RankGroup, RankLostError
from worker.ranks.rank_host import run_node
from worker.ranks.topology import Topology, threads_per_rank
from worker.session.engine_loop import EngineLoop
from worker.session.service import SERVICE, WorkerService
from worker.session.worker_info import WorkerFacts
from worker.simulation.cost_model import CostModel
from worker.simulation.engine_factory import build_simulated_engine
from worker.simulation.presets import cost_model

log = structlog.get_logger(__name__)

WARMUP: Final = "warmup"
_FAILED = 1
_OTHERS_LOOK_S = 0.05
# For so long the event loop keeps the interpreter from the engine thread, which wants it between two steps; by default
# 5 ms, each time.
SWITCH_INTERVAL_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options that one worker is started with; times in seconds.

    Attributes:
        config: of the engine; `model` is the checkpoint folder.
        model_name: name of the model in requests.
        host: address to listen on.
        port: TCP port; 0 takes any.
        worker_id: stable name; empty takes host name and port.
        threads: of the model's arithmetic on this machine, all ranks together; None leaves it to PyTorch, and gives
            ranks one core after the other.
        drain_timeout_s: how long sequences may go on after SIGTERM.
        simulate: duration of steps without a model; None runs the model.
        topology: the ranks that share the model.
        step_timeout_s: after which a step of several ranks counts as hung.
        tls: of its port; None is plain text.
        access: decides about every call; None admits all.
        health_port: of health in plain text; 0 takes any, None is off.
    """

    config: Config
    model_name: str
    host: str = "127.0.0.1"
    port: int = 50061
    worker_id: str = ""
    threads: int | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    simulate: CostModel | None = None
    topology: Topology = field(default_factory=Topology)
    step_timeout_s: float = STEP_TIMEOUT_S
    tls: ServerTls | None = None
    access: PeerAccess | None = None
    health_port: int | None = None


class Worker:
    """One worker in this process. To be made on its event loop.

    Attributes:
        server: its gRPC server.
        engine: its engine.
        service: its service.

    Raises:
        ModelError: the checkpoint's configuration can not be served.
        TokenizerError: it has no tokenizer, or one that can not be used.
        ExportError: the environment asks for an export that there is not.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._model_config = ModelConfig.from_folder(options.config.model)
        self._config = with_special_tokens(options.config, self._model_config)
        files = tokenizer_files(options.config.model)
        _check_text_files(files)
        self._loaded = self._first_facts = _first_facts(options, self._model_config, files)
        self._tracing = setup_tracing("fissile-worker", self._loaded.instance_id)
        self._metrics = setup_metrics("fissile-worker", self._loaded.instance_id)
        self.server = GrpcServer(
            options.host,
            options.port,
            [SERVICE],
            tls=options.tls,
            access=options.access,
            health_port=options.health_port,
        )
        self._policy = RestartPolicy()
        self._core: EngineCore | None = None
        self.engine = EngineLoop()
        self.service = WorkerService(self._loaded, files, self.engine, self._tracing)

    async def start(self) -> None:
        """Listens, and begins to load the model on the engine thread.

        Raises:
            PortTakenError: the address can not be listened on.
            TlsError: the certificate can not be used.
        """
        add_WorkerServiceServicer_to_server(self.service, self.server.server)
        await self.server.start()
        worker_id = self._options.worker_id or f"{socket.gethostname()}-{self.server.port}"
        self._loaded = self._first_facts = self.service.facts = replace(self._loaded, worker_id=worker_id)
        log.info("worker listening", address=self.server.address, worker_id=worker_id, **self._settings())
        labels = {names.REQUEST_MODEL: self._loaded.model, names.WORKER_ID: worker_id}
        self._metrics.observe_engine(lambda: self.engine.figures, labels)
        self.engine.start(self._build)

    async def wait_ready(self) -> None:
        """Waits until the model is loaded and warm, then says SERVING.

        Raises:
            ModelError, ApiError: it can not be served with these options.
        """
        await self.engine.wait_started()
        facts = self.service.facts = self._loaded
        models_own = self._model_config.max_position_embeddings
        if facts.max_model_len < models_own:
            log.info("model length lowered", max_model_len=facts.max_model_len, models_own=models_own)
        await self.server.set_serving(True)
        log.info(
            "worker serving",
            address=self.server.address,
            model=facts.model,
            max_model_len=facts.max_model_len,
            kv_blocks=facts.total_blocks,
            kernels=facts.kernels,
            dtype=facts.dtype,
            numerics=facts.numerics,
        )

    async def serve(self, stop: asyncio.Event) -> int:
        """Serves until `stop`, the Drain RPC or a failure, then ends. Returns the exit code.

        An engine on ranks that fails is replaced by a new one, under a new instance id: its cache is empty, and what it
        ran has ended. Ranks that go on dying end the worker.

        Raises:
            ModelError, ApiError: as `wait_ready`.
        """
        try:
            while (code := await self._serve_engine(stop)) is None:
                # Those left have a router that does not read; they know the cache and the instance of the old engine.
                self.service.break_sessions()
                self._loaded = self.service.facts = replace(self._first_facts, instance_id=_instance_id())
                self.engine.start(self._build)
            return code
        finally:
            await self.stop()

    async def _serve_engine(self, stop: asyncio.Event) -> int | None:
        """Serves with one engine. Returns the exit code, None to go on with another engine."""
        try:
            if await _first(stop.wait(), self.wait_ready()) == 0:
                return 0
        except RankLostError as error:
            return await self._after_failure(stop, str(error))
        ended_by = await _first(self.engine.wait_failed(), stop.wait(), _wait(self.service.drain_wanted))
        if ended_by != 0:
            return await self._drain()
        await self.server.set_serving(False)
        await self.service.finish(SESSION_FLUSH_S)
        return await self._after_failure(stop, await self.engine.wait_failed())

    async def _after_failure(self, stop: asyncio.Event, why: str) -> int | None:
        """Waits before another engine is made. Returns the exit code, None to go on."""
        if not self._options.topology.has_ranks:
            return _FAILED
        # It ends its ranks, whose devices and ports the next ones need.
        if not await asyncio.to_thread(self.engine.join, self._options.step_timeout_s):
            log.error("the engine has failed and its step does not end", why=why)
            return _FAILED
        decision = self._policy.died(time.monotonic())
        if isinstance(decision, GiveUp):
            log.error("ranks are lost again and again", times=decision.deaths, why=why)
            return _FAILED
        log.warning("starting ranks again", after_s=decision.delay_s, why=why)
        return 0 if await _first(stop.wait(), asyncio.sleep(decision.delay_s)) == 0 else None

    async def stop(self) -> None:
        """Ends everything at once. May be called at any time, twice too."""
        self.engine.stop()
        await self.server.stop(0)
        await asyncio.gather(
            asyncio.to_thread(self._tracing.shutdown, TELEMETRY_SHUTDOWN_S),
            asyncio.to_thread(self._metrics.shutdown, TELEMETRY_SHUTDOWN_S),
        )
        log.info("worker stopped")

    async def _drain(self) -> int:
        """Takes no new work, and lets routers move their sequences or the sequences finish; then ends the rest.

        Balancers need a while to learn that health says NOT_SERVING: until then direct calls are still taken.
        """
        wanted = self.service.drain_wanted
        timeout_s = (wanted.result() if wanted.done() else None) or self._options.drain_timeout_s
        log.info("draining", sequences=self.engine.num_live, timeout_s=timeout_s)
        self.service.drain(timeout_s)
        await self.server.set_serving(False)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(DRAIN_PROPAGATION_S)
                self.service.refuse_calls()
                failed = await _first(self.engine.wait_failed(), self._wait_idle()) == 0
        except TimeoutError:
            log.warning("drain timeout", sequences=self.engine.num_live)
            self.engine.end_all("the worker was drained and the sequence did not end in time")
            failed = (
                await _first(self.engine.wait_failed(), asyncio.sleep(SESSION_FLUSH_S), self.engine.wait_idle()) == 0
            )
        await self.service.finish(SESSION_FLUSH_S)
        return _FAILED if failed else 0

    async def _wait_idle(self) -> None:
        """Waits until no sequence is live, here and on engines that need this one's steps."""
        await self.engine.wait_idle()
        # The engine thread knows, and says nothing while it has no outputs.
        while self._core is not None and self._core.others_have_work:  # noqa: ASYNC110
            await asyncio.sleep(_OTHERS_LOOK_S)

    def _build(self) -> EngineCore:
        """Makes the engine; runs on the engine thread."""
        self._core = self._make_engine()
        return self._core

    def _make_engine(self) -> EngineCore:
        options = self._options
        if options.simulate is not None:
            core, self._loaded = build_simulated_engine(
                self._config, self._model_config, self._loaded, options.simulate
            )
            return core
        progress = Progress()
        if options.topology.has_ranks:
            return self._build_on_ranks(progress)
        progress.stage("loading PyTorch")
        # A simulated worker runs where PyTorch is not installed.
        from worker.model.engine_factory import build_model_engine  # noqa: PLC0415

        try:
            core, self._loaded = build_model_engine(
                self._config, self._model_config, self._loaded, options.threads, progress
            )
        finally:
            progress.done()
        return core

    def _build_on_ranks(self, progress: Progress) -> EngineCore:
        options, topology = self._options, self._options.topology
        threads = threads_per_rank(options.threads, topology.ranks_per_node)
        group = RankGroup(topology, options.config.model, threads, progress, options.step_timeout_s)
        try:
            core, self._loaded = build_rank_engine(group, self._config, self._model_config, self._loaded, progress)
        finally:
            progress.done()
        return core

    def _settings(self) -> dict[str, object]:
        config = self._config
        return {
            "model": config.model,
            "simulated": self._options.simulate is not None,
            "scheduling_policy": config.scheduling_policy,
            "prefix_caching": config.enable_prefix_caching,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_dtype": config.kv_cache_dtype,
            "tp_size": config.tensor_parallel_size,
            "dp_rank": f"{self._options.topology.dp_rank} of {self._options.topology.dp_size}",
        }


def _check_text_files(files: Mapping[str, bytes]) -> None:
    """Reads a model's tokenizer files as every router will: a worker that none can use is not to begin.

    Raises:
        TokenizerError: one can not be used.
    """
    read_json(files, "generation_config.json")
    Tokenizer.from_files(files)
    ChatTemplate.from_files(files)


def _first_facts(options: WorkerOptions, model_config: ModelConfig, files: Mapping[str, bytes]) -> WorkerFacts:
    """Facts known before the model is loaded."""
    config = options.config
    return WorkerFacts(
        worker_id=options.worker_id,
        instance_id=_instance_id(),
        model=options.model_name,
        architecture=model_config.architecture,
        tokenizer_sha256=files_sha256(files),
        version=_version(),
        block_size=config.kv_cache_block_size,
        hash_seed=config.hash_seed,
        vocab_size=model_config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
    )


def _instance_id() -> str:
    return secrets.token_hex(8)


def _version() -> str:
    try:
        return version_of("fissile")
    except PackageNotFoundError:
        return "checkout"


async def _wait(future: asyncio.Future[Any]) -> None:
    await asyncio.shield(future)


async def _first(*work: Awaitable[Any]) -> int:
    """Waits for the first to end and cancels the others. Returns its index; raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        index = next(i for i, task in enumerate(tasks) if task.done())
        tasks[index].result()
        return index
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_worker(options: WorkerOptions) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once. Returns the exit code.

    On a machine that is not the first of several, serves ranks only, without draining.

    Raises:
        CommandError: something must be changed; one line.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            exit_now(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    if options.topology.node_rank > 0:
        threads = threads_per_rank(options.threads, options.topology.ranks_per_node)
        return await run_node(options.topology, options.config.model, threads, stop)
    try:
        worker = Worker(options)
        await worker.start()
        code = await worker.serve(stop)
    except (ModelError, TokenizerError, PortTakenError, TlsError, ExportError, ApiError) as error:
        raise CommandError(str(error)) from None
    if not await asyncio.to_thread(worker.engine.join, ENGINE_JOIN_S):
        # In the middle of a load or a step; the interpreter can not be taken down under it.
        exit_now(code)
    return code


class WorkerCommand(ConfigurableCommand):
    """`fissile worker`; with `warmup` as its first argument, that command, which runs no worker."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """See ConfigurableCommand."""
        if args[:1] != [WARMUP]:
            return super().make_context(info_name, args, *rest, **extra)
        # It takes its options from the command below.
        from worker.cli.warmup import warmup  # noqa: PLC0415

        return warmup.make_context(f"{info_name} {WARMUP}", args[1:], *rest, **extra)


@click.command(cls=WorkerCommand, context_settings={"help_option_names": ["-h", "--help"]})
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
    "--block-size", envvar="FISSILE_BLOCK_SIZE", type=int, default=Config.kv_cache_block_size,
    help="Tokens per KV block; 1 or a multiple of 16.",
)  # fmt: skip
@option(
    "--scheduling-policy", envvar="FISSILE_SCHEDULING_POLICY", type=click.Choice(SCHEDULING_POLICIES),
    help="Scheduling policy of steps. prefill_first: prompts go before running answers; mixed: both share each step. "
    f"Default: {POLICY_ON_CPU} on a CPU, {POLICY_ON_GPU} on a GPU and with --simulate.",
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
    "requests, the others run ranks only and need no other option.",
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
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(run_worker(worker_options(**given)))


# Options that are fields of Config by the same name.
_OF_CONFIG: Final = (
    "max_num_seqs",
    "scheduler_delay_factor",
    "hash_seed",
    "dtype",
    "kv_cache_dtype",
    "kernels",
    "cpu_isa",
    "batch_invariant",
    "enforce_eager",
    "quantize",
    "enable_expert_parallel",
)


def worker_options(
    *,
    model: str,
    model_name: str | None,
    max_model_len: int | None,
    kv_cache_memory: int | None,
    block_size: int,
    max_num_batched_tokens: int | None,
    scheduling_policy: str | None,
    prefix_caching: bool,
    weights_cache: str | None,
    drain_timeout: float,
    simulate: str | None,
    graph_sizes: tuple[int, ...],
    tp_size: int,
    nnodes: int,
    node_rank: int,
    dist_init: str,
    dp_size: int,
    dp_rank: int,
    step_timeout: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    router_identities: tuple[str, ...],
    **others: Any,
) -> WorkerOptions:
    """The command's options as the classes take them.

    Raises:
        CommandError: a value is not allowed, or some do not fit together.
    """
    if simulate is not None and max(tp_size, dp_size) > 1:
        raise CommandError("--simulate runs no ranks: leave --tp-size and --dp-size away, and name a preset with -tpN")
    kernels, is_simulated = others["kernels"], simulate is not None
    try:
        topology = Topology(tp_size, nnodes, node_rank, dist_init, dp_size, dp_rank)
        folder = model_folder(model, weights=simulate is None)
        config = Config(
            model=str(folder),
            kv_cache_block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens
            or default_token_budget(kernels, is_simulated=is_simulated, max_num_seqs=others["max_num_seqs"]),
            scheduling_policy=scheduling_policy or default_scheduling_policy(kernels, is_simulated=is_simulated),
            enable_prefix_caching=prefix_caching,
            kv_cache_memory=kv_cache_memory or 0,
            max_model_len=max_model_len or 0,
            weights_cache=_weights_cache(weights_cache),
            tensor_parallel_size=tp_size,
            parallel_config=ParallelConfig(dp_size, dp_rank),
            compilation_config=CompilationConfig(cudagraph_capture_sizes=graph_sizes),
            **{name: others.pop(name) for name in _OF_CONFIG},
        )
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
