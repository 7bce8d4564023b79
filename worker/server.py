"""One worker in this process: its wiring, its start, its restarts and its end."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog
from fissile.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server

from common.cli.core.errors import CommandError
from common.config import Config
from common.errors import ApiError
from common.limits import (
    DRAIN_PROPAGATION_S,
    DRAIN_TIMEOUT_S,
    ENGINE_JOIN_S,
    SESSION_FLUSH_S,
    STEP_TIMEOUT_S,
    TELEMETRY_SHUTDOWN_S,
)
from common.params.names import ROLES
from common.process.restart_policy import GiveUp, RestartPolicy
from common.rpc.auth import PeerAccess
from common.rpc.scrape_port import scrape_port
from common.rpc.server import GrpcServer, HealthServer, PortTakenError
from common.rpc.tls import ServerTls, TlsError
from common.telemetry import names
from common.telemetry.exporter import ExportError
from common.telemetry.metrics import setup_metrics
from common.telemetry.output import exit_now
from common.telemetry.tracing import setup_tracing
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, TokenizerError, files_sha256, read_json
from common.version import fissile_version
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import model_tokenizer_files, naming
from worker.config.vector_config import checkpoint_pooling, relevance_tokens
from worker.doors.door_adapter import DoorAdapter
from worker.doors.served_doors import SERVED_DOORS
from worker.engine.core import EngineCore
from worker.engine.figures import StepTokens, observe_engine, show_engine_as_vllm
from worker.engine_factory import EngineOptions, build_engine
from worker.kv_tiers.tier_option import shared_stores
from worker.progress import StartProgress
from worker.ranks.rank_host import run_node
from worker.ranks.rank_peers import RankLostError
from worker.ranks.topology import Topology, threads_per_rank
from worker.session.engine_loop import EngineLoop
from worker.session.kv_session import NO_SHARED_KV, SharedKv
from worker.session.service import SERVICE, WorkerService
from worker.session.worker_info import WorkerFacts
from worker.simulation.cost_model import CostModel
from worker.step_dumps import FAILED, StepDumps

log = structlog.get_logger(__name__)

_FAILED: Final = 1
_OTHERS_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options that one worker is started with; times in seconds.

    Attributes:
        config: of the engine; `model` is the checkpoint folder.
        model_name: name of the model in requests.
        host: address to listen on.
        port: TCP port; 0 for any free one.
        worker_id: stable name; "" for host name and port.
        threads: of the model's arithmetic on this machine, all ranks together; None for PyTorch's choice, and for ranks
            one core after the other.
        drain_timeout_s: how long sequences may continue after SIGTERM.
        simulate: duration of steps without a model; None runs the model.
        topology: the ranks that share the model.
        step_timeout_s: time after which a step of several ranks counts as hung, and any step is dumped.
        step_dumps: folder of dumps of steps; None writes none.
        tls: of its port; None is plain text.
        access: admits or refuses every call; None admits all.
        health_port: of health in plain text; 0 for any free one, None for no such port.
        metrics_port: of metrics for scrapers; 0 for any free one, None for no such port.
        trace_slow: traces of sequences of at least this time are kept; None leaves it to the sampler.
        role: half of the work that it does, of ROLES.
        doors: engine protocols of other projects that its port serves too (`SERVED_DOORS`).
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
    step_dumps: Path | None = None
    tls: ServerTls | None = None
    access: PeerAccess | None = None
    health_port: int | None = None
    metrics_port: int | None = None
    trace_slow: float | None = None
    doors: tuple[str, ...] = ()
    role: str = ROLES[0]


class Worker:
    """One worker in this process. Construct it on its event loop.

    Attributes:
        server: its gRPC server.
        engine: its engine.
        service: its service.
        scrapes: port of its metrics, None if it is off.

    Raises:
        ModelError: the checkpoint's configuration cannot be served.
        TokenizerError: it has no tokenizer, or one that cannot be used.
        ExportError: the environment names an unknown kind of export.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._model_config = ModelConfig.from_folder(options.config.model)
        self._config = with_special_tokens(options.config, self._model_config)
        files = model_tokenizer_files(options.config.model)
        with naming(options.config.model):
            tokenizer = _checked_tokenizer(files)
        self._loaded = self._first_facts = _first_facts(options, self._config, self._model_config, files)
        self._tracing = setup_tracing("fissile-worker", self._loaded.instance_id, options.trace_slow)
        is_scraped = options.metrics_port is not None
        spans = self._tracing.open_spans
        self._metrics = setup_metrics(
            "fissile-worker", self._loaded.instance_id, is_scraped=is_scraped, open_spans=spans
        )
        self.server = GrpcServer(
            options.host,
            options.port,
            [SERVICE, *(name for door in options.doors for name in SERVED_DOORS[door].services)],
            tls=options.tls,
            access=options.access,
            health_port=options.health_port,
        )
        self.scrapes = scrape_port(options.host, options.metrics_port, self._metrics.table, self.server, options.tls)
        self._policy = RestartPolicy()
        self._core: EngineCore | None = None
        self._dumps = StepDumps(options.step_dumps, options.step_timeout_s)
        self._watch: asyncio.Task[None] | None = None
        self.engine = EngineLoop()
        self.service = WorkerService(self._loaded, files, self.engine, self._tracing)
        self._adapter = None
        if options.doors:
            self._adapter = DoorAdapter(self.service, self.engine, tokenizer, self._config, self._model_config, files)

    async def start(self) -> None:
        """Listens, and begins to load the model on the engine thread.

        Raises:
            PortTakenError: the address cannot be bound.
            TlsError: the certificate cannot be used.
        """
        add_WorkerServiceServicer_to_server(self.service, self.server.server)
        if self._adapter is not None:
            for door in self._options.doors:
                SERVED_DOORS[door].add(self._adapter, self.server.server)
        await self.server.start()
        worker_id = self._options.worker_id or f"{socket.gethostname()}-{self.server.port}"
        self._loaded = self._first_facts = self.service.facts = replace(self._loaded, worker_id=worker_id)
        self._tracing.listens_at(self.server.address)
        log.info("worker listening", address=self.server.address, worker_id=worker_id, **self._settings())
        labels = {names.REQUEST_MODEL: self._loaded.model, names.WORKER_ID: worker_id}
        observe_engine(self._metrics, lambda: self.engine.figures, labels)
        if self._metrics.enabled:
            self.engine.on_figures = StepTokens(self._metrics, labels).take
        if self._metrics.table is not None:
            show_engine_as_vllm(self._metrics.table, lambda: self.engine.figures, self._loaded.model)
        if self.scrapes is not None:
            self.scrapes.start()
        self.engine.start(self._build)
        self._dumps.worker_id = worker_id
        self._watch = asyncio.create_task(self._dumps.watch(self.engine))

    async def wait_ready(self) -> None:
        """Waits until the model is loaded and warm, then reports SERVING.

        Raises:
            ModelError, ApiError: it cannot be served with these options.
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

        A failed engine on ranks is replaced by a new one, under a new instance id, because its cache is empty and its
        sequences have ended. If ranks keep dying, the worker ends.

        Raises:
            ModelError, ApiError: as `wait_ready`.
        """
        try:
            while (code := await self._serve_engine(stop)) is None:
                # The remaining Sessions belong to routers that do not read, and refer to the old cache and instance.
                self.service.break_sessions()
                self._loaded = self.service.facts = replace(self._first_facts, instance_id=_instance_id())
                self.engine.start(self._build)
            return code
        finally:
            await self.stop()

    async def _serve_engine(self, stop: asyncio.Event) -> int | None:
        """Serves with one engine. Returns the exit code, None to continue with another engine."""
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
        """Dumps the steps, and waits before another engine is made. Returns the exit code, None to continue."""
        await self._dumps.write(self.engine.steps, FAILED)
        if not self._options.topology.has_ranks:
            return _FAILED
        # The engine ends its ranks, whose devices and ports the next ones need.
        if not await asyncio.to_thread(self.engine.join, self._options.step_timeout_s):
            log.error("the engine has failed and its step hangs", why=why)
            return _FAILED
        decision = self._policy.died(time.monotonic())
        if isinstance(decision, GiveUp):
            log.error("ranks are lost repeatedly", times=decision.deaths, why=why)
            return _FAILED
        log.warning("starting ranks again", after_s=decision.delay_s, why=why)
        return 0 if await _first(stop.wait(), asyncio.sleep(decision.delay_s)) == 0 else None

    async def stop(self) -> None:
        """Ends everything at once. May be called at any time, also twice."""
        if self._watch is not None:
            self._watch.cancel()
        self.engine.stop()
        await self.server.stop(0)
        if self.scrapes is not None:
            await asyncio.to_thread(self.scrapes.stop)
        await asyncio.gather(
            asyncio.to_thread(self._tracing.shutdown, TELEMETRY_SHUTDOWN_S),
            asyncio.to_thread(self._metrics.shutdown, TELEMETRY_SHUTDOWN_S),
        )
        log.info("worker stopped")

    async def _drain(self) -> int:
        """Takes no new work, and waits until routers have moved their sequences or the sequences have ended; then ends
        the rest.

        Load balancers need time to see NOT_SERVING; until then direct calls are still taken.
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
        if failed:
            await self._dumps.write(self.engine.steps, FAILED)
        return _FAILED if failed else 0

    async def _wait_idle(self) -> None:
        """Waits until no sequence is live, here and on engines that need this one's steps."""
        await self.engine.wait_idle()
        # The engine thread knows, but does not report it while it has no outputs.
        while self._core is not None and self._core.others_have_work:  # noqa: ASYNC110
            await asyncio.sleep(_OTHERS_LOOK_S)

    def _build(self) -> EngineCore:
        """Makes the engine; runs on the engine thread."""
        options = self._options
        built = build_engine(
            EngineOptions(
                self._config,
                self._model_config,
                threads=options.threads,
                topology=options.topology,
                step_timeout_s=options.step_timeout_s,
                simulate=options.simulate,
                takes_memory=True,
            ),
            StartProgress(),
        )
        tiers = built.core.tiers
        shared = NO_SHARED_KV if tiers is None else SharedKv(shared_stores(built.core.config.kv_tiers), tiers.root)
        self._loaded = self._loaded.loaded(built.core.config, built.describe(), shared)
        self._core = built.core
        return built.core

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


def _checked_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Reads a model's tokenizer files as every router will: a worker that none can use is not to begin.

    Raises:
        TokenizerError: one cannot be used.
    """
    read_json(files, "generation_config.json")
    tokenizer = Tokenizer.from_files(files)
    ChatTemplate.from_tokenizer(tokenizer)
    return tokenizer


def _first_facts(
    options: WorkerOptions, config: Config, model_config: ModelConfig, files: Mapping[str, bytes]
) -> WorkerFacts:
    """Facts known before the model is loaded; `config` is that of `options` with the model's special tokens."""
    return WorkerFacts(
        worker_id=options.worker_id,
        instance_id=_instance_id(),
        model=options.model_name,
        architecture=model_config.architecture,
        tokenizer_sha256=files_sha256(files),
        version=fissile_version(),
        block_size=config.kv_cache_block_size,
        hash_seed=config.hash_seed,
        vocab_size=model_config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        eos_token_ids=config.eos_token_ids,
        hidden_size=model_config.hidden_size,
        default_pooling=checkpoint_pooling(config.model),
        relevance_tokens=relevance_tokens(config.model, model_config.source, model_config.vocab_size),
        head=model_config.head,
        num_labels=model_config.num_labels,
        role="" if options.role == ROLES[0] else options.role,
    )


def _instance_id() -> str:
    return secrets.token_hex(8)


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


async def _run_ranks(options: WorkerOptions, stop: asyncio.Event) -> int:
    threads = threads_per_rank(options.threads, options.topology.ranks_per_node)
    health = None if options.health_port is None else HealthServer(options.host, options.health_port)
    return await run_node(options.topology, options.config.model, threads, stop, options.drain_timeout_s, health)


async def run_worker(options: WorkerOptions) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once. Returns the exit code.

    On a machine that is not the first of several, serves ranks only, until the engine on the first one has drained.

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
    try:
        if options.topology.node_rank > 0:
            return await _run_ranks(options, stop)
        worker = Worker(options)
        await worker.start()
        code = await worker.serve(stop)
    except (ModelError, TokenizerError, PortTakenError, TlsError, ExportError, ApiError) as error:
        raise CommandError(str(error)) from None
    if not await asyncio.to_thread(worker.engine.join, ENGINE_JOIN_S):
        # In the middle of a load or a step; the interpreter cannot be taken down under it.
        exit_now(code)
    return code
