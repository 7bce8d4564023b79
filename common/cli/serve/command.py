"""`fissile serve`: one router and its workers on this machine, as child processes, and a first question to them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import grpc
from click.core import ParameterSource
from fissile.v1 import inference_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cli.core.config_file import (
    ConfigurableCommand,
    config_option,
    file_of,
    read_text,
    sections,
)
from common.cli.core.console import Console
from common.cli.core.errors import CommandError
from common.cli.core.modes import Mode
from common.cli.core.options import argument, options
from common.cli.core.tls_options import server_tls
from common.cli.group import CHECKOUT, OFFLINE, find_entry_points, missing_extra
from common.cli.serve.first_question import GENERATES, FirstQuestion, http_step, next_steps
from common.cli.serve.launch_plan import KV_SHARE, Fleet, kv_memory_per_rank, threads_per_worker
from common.cli.serve.ports import free_ports
from common.cli.serve.supervisor import REFUSED, Supervisor, prefix_width
from common.config import Config
from common.hub import default_model_name
from common.params.config_parts import EAGLE3
from common.params.options.engine import SERVE, WORKER
from common.params.options.services import CONFIG_FILE, HTTP, ROUTER
from common.params.options.table import options_of
from common.params.step_defaults import default_token_budget
from common.process.available_memory import available_memory
from common.telemetry.logs import (
    FORCE_COLOR_VARIABLE,
    FORMAT_VARIABLE,
    NO_COLOR_VARIABLE,
    WIDTH_VARIABLE,
    setup_logging,
)
from common.telemetry.output import guard_standard_streams
from common.version import fissile_version

DEMO_HEAD: Final = CHECKOUT / "deploy" / "demo" / "eagle3"
_NUM_DRAFTS: Final = 3


def demo_speculation(model: str | None, given: str | None) -> str:
    """Makes the value of --speculative-config that drafts with the demo model's head.

    Raises:
        CommandError: another model is served, or an option of its own is there (exit code 2).
    """
    if model is not None or given is not None:
        raise CommandError(
            "--speculate takes the head of the demo model: leave it out with --model or --speculative-config"
        )
    return json.dumps({"method": EAGLE3, "model": str(DEMO_HEAD), "num_speculative_tokens": _NUM_DRAFTS})


DEMO_MODEL = CHECKOUT / "deploy" / "demo" / "checkpoint"
DEMO_NAME = "demo"
GIB = 1 << 30
# Least columns of log lines, for a terminal narrower than any field.
_LEAST_WIDTH: Final = 40
POLL_S = 0.1
# A connection that was refused because the router does not listen yet is tried again soon.
_QUICK_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]


class Service:
    """Runs a fleet from its start to its end."""

    def __init__(self, fleet: Fleet, first: FirstQuestion, console: Console, config: Path | None = None) -> None:
        self._fleet = fleet
        self._first = first
        self._console = console
        children = fleet.children()
        environment = _child_environment(console, config, prefix_width(children))
        self._supervisor = Supervisor(children, console, environment)
        self._ended_by: signal.Signals | None = None
        self._end = asyncio.Event()
        self._has_served = False

    async def run(self, description: str) -> int:
        """Prints the description, and runs until a signal, the first answer (with `once`), or a failure.

        Returns:
            The exit code.

        Raises:
            CommandError: a child was refused (exit code 2) or died too often, or the first question failed (1).
        """
        self._watch_signals()
        # Only now: whoever reads it may end the service already.
        self._console.line(description)
        keeping = asyncio.create_task(self._supervisor.run())
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({keeping, serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            killed = await self._shut_down(keeping, serving)
        for task in (keeping, serving):
            if not task.cancelled() and (error := task.exception()):
                raise error
        return self._exit_code(killed, answered=not serving.cancelled())

    async def _serve(self) -> None:
        """Waits for the router, asks the first question; returns only with `once`."""
        async with grpc.aio.insecure_channel(self._fleet.health_address, options=_QUICK_RECONNECT) as channel:
            await self._until_serving(channel)
            self._has_served = True
            capabilities = await self._ask() if self._first.ask else GENERATES
        if self._first.once:
            return
        fleet = self._fleet
        chats = not self._first.ask or pb.CAPABILITY_CHAT in capabilities
        http = http_step(fleet.http_url, fleet.model_name, fleet.curl_options) if chats else ""
        self._console.line(next_steps(fleet.address, fleet.client_options, capabilities, http))
        await asyncio.Event().wait()

    async def _until_serving(self, channel: grpc.aio.Channel) -> None:
        """Polls the router's health until it says SERVING, which takes longer for larger models."""
        started = time.monotonic()
        health = health_pb2_grpc.HealthStub(channel)
        while not await _is_serving(health):
            self._console.spin(f"waiting for the router to serve ({time.monotonic() - started:.0f} s)")
            await asyncio.sleep(POLL_S)
        self._console.line(f"the router serves, after {time.monotonic() - started:.1f} s")

    async def _ask(self) -> Collection[int]:
        """Asks the first question. Without `once` a failure is printed and the service continues.

        Returns:
            What the model can do.
        """
        self._console.line(f"\nthe first request: {self._first.prompt}")
        self._console.begin_answer()
        try:
            figures, capabilities = await self._first.answered(
                self._fleet.address, self._fleet.model_name, self._console.answer, self._fleet.drafting_workers
            )
        except CommandError as error:
            self._console.end_answer()
            if self._first.once:
                raise CommandError(f"the first request failed: {error}", 1) from error
            self._console.line(f"the first request failed: {error}")
            return GENERATES
        self._console.end_answer(figures)
        return capabilities

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(which, self._on_signal, which)

    def _on_signal(self, which: signal.Signals) -> None:
        """The first signal drains, a second one kills."""
        if self._end.is_set():
            self._supervisor.kill()
        self._ended_by = which
        self._end.set()

    async def _shut_down(self, keeping: asyncio.Task[None], serving: asyncio.Task[None]) -> list[str]:
        """Ends the children. Returns the names of those that had to be killed."""
        serving.cancel()
        error = keeping.exception() if keeping.done() else None
        refused = isinstance(error, CommandError) and error.exit_code == REFUSED
        if refused and not self._has_served:
            self._supervisor.kill()
        elif not keeping.done():
            self._console.line("draining; Ctrl-C again ends at once")
        killed = await self._supervisor.stop()
        await asyncio.wait({keeping, serving})
        return killed

    def _exit_code(self, killed: list[str], *, answered: bool) -> int:
        if killed:
            raise CommandError(f"{', '.join(killed)} did not end in time and had to be killed", 1)
        if self._first.once and not answered and self._ended_by is not None:
            return 128 + self._ended_by
        self._console.line("ended")
        return 0


async def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _child_environment(console: Console, config: Path | None, prefix: int) -> dict[str, str]:
    """Environment variables of the children: the checkout's module paths, the --config file, and the format of logs.

    Args:
        console: shows the children's lines.
        config: file of --config; None without one.
        prefix: columns of the child's name before each of its lines.
    """
    paths = [str(CHECKOUT), str(CHECKOUT / "protos"), *filter(None, [os.environ.get("PYTHONPATH")])]
    log_format = os.environ.get(FORMAT_VARIABLE, "console" if console.terminal else "auto")
    shown: dict[str, str] = {}
    if console.terminal:
        shown[WIDTH_VARIABLE] = str(max(_LEAST_WIDTH, shutil.get_terminal_size().columns - prefix))
        if not os.environ.get(NO_COLOR_VARIABLE):
            shown[FORCE_COLOR_VARIABLE] = "1"
    file = {} if config is None else {CONFIG_FILE.variable: str(config.resolve())}
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", FORMAT_VARIABLE: log_format, **file, **shown}


def make_fleet(
    *,
    model: str | None,
    model_name: str | None,
    workers: int,
    host: str,
    port: int,
    max_num_batched_tokens: int | None,
    prefix_caching: bool,
    kv_cache_memory: str | None,
    drain_timeout: float,
    log_level: str,
    simulate: str | None,
    threads: int | None,
    tp_size: int,
    enable_expert_parallel: bool,
    protection: Mapping[str, object],
    http_port: int | None = None,
    **passed_on: Any,
) -> Fleet:
    """Fills in what depends on this machine: free ports, and each worker's share of cores and memory.

    Args:
        protection: options of the router's TLS and API keys.
        http_port: port of an HTTP facade; 0 takes a free one, None runs none.
        passed_on: further options that router or workers have too.
        others: as on the command line.

    Raises:
        CommandError: there is no model to serve, or nothing to run it with (exit code 2).
    """
    _check_can_serve(model, simulate)
    if not (threads or simulate):
        threads = threads_per_worker(workers)
    facade = {name: passed_on.pop(name) or None for name in _ROUTER_TLS if name in passed_on}
    of_router = {name: passed_on.pop(name) for name in options_of(ROUTER) if name in passed_on}
    of_both = {name: value for name, value in of_router.items() if WORKER in options_of(SERVE)[name].commands}
    # One call, so that all are different.
    router_port, health_port, free_http_port, metrics_port, *worker_ports = free_ports(workers + 4)
    if of_router.get("metrics_port") == 0:
        of_router["metrics_port"] = metrics_port
    return Fleet(
        model=model or str(DEMO_MODEL),
        model_name=model_name or (default_model_name(model) if model else DEMO_NAME),
        host=host,
        port=port or router_port,
        worker_ports=worker_ports,
        max_num_batched_tokens=max_num_batched_tokens or _token_budget(passed_on, is_simulated=bool(simulate)),
        prefix_caching=prefix_caching,
        kv_cache_memory=kv_cache_memory or ("" if simulate else default_kv_memory(workers, tp_size)),
        drain_timeout_s=drain_timeout,
        log_level=log_level,
        router_options={**of_router, **protection},
        worker_options={"threads": threads, "tp_size": tp_size, **passed_on, **of_both},
        simulate=simulate or "",
        expert_parallel=enable_expert_parallel,
        health_port=health_port if protection.get("tls_cert") else 0,
        http_port=free_http_port if http_port == 0 else http_port,
        facade_options={} if http_port is None else _facade_options(facade, protection),
    )


def _check_can_serve(model: str | None, simulate: str | None) -> None:
    if model is None and not DEMO_MODEL.is_dir():
        raise CommandError(f"there is no demo model at {DEMO_MODEL}: name a checkpoint folder with --model")
    if not simulate and importlib.util.find_spec("torch") is None:
        raise missing_extra("serve", "torch")


def _facade_options(given: Mapping[str, object], router: Mapping[str, object]) -> Mapping[str, object]:
    """Completes the facade's options by the router's TLS, which the facade has too.

    Raises:
        CommandError: it cannot run, or lacks a file (exit code 2).
    """
    if importlib.util.find_spec("uvicorn") is None:
        raise missing_extra("serve --http-port", "uvicorn")
    if router["tls_client_ca"] and not given["router_client_cert"]:
        raise CommandError("--http-port with --tls-client-ca needs --router-client-cert, which its facade shows")
    tls = {name: router[name] for name in ("tls_cert", "tls_key", "tls_client_ca")}
    return {**tls, **given, "router_ca": given["router_ca"] or tls["tls_cert"]}


def _token_budget(worker_options: Mapping[str, Any], *, is_simulated: bool) -> int:
    """Returns the budget that a worker with these options has by itself."""
    return default_token_budget(
        worker_options.get("kernels") or Config.kernels,
        is_simulated=is_simulated,
        max_num_seqs=worker_options.get("max_num_seqs") or Config.max_num_seqs,
    )


_TO_SERVE: Final = "say it in the section `serve`"
# Credentials that the router wants of its callers, `serve` among them.
_PROTECTION: Final = {
    **dict.fromkeys(("tls-cert", "tls-key", "tls-client-ca", "api-keys"), _TO_SERVE),
    "api-key-line": "put the line into a file, and say api-keys in the section `serve`",
}
_KEY_LINES_VARIABLE: Final = "FISSILE_API_KEY_LINES"


def refuse_twice_said(fleet: Fleet, config: Path) -> None:
    """Refuses options in the sections of `router`, `worker` and `http` that `serve` sets itself.

    What it gives them itself would do nothing there; with TLS and keys that it does not know of it could not call the
    router.

    Raises:
        CommandError: there is one.
    """
    given = sections(read_text(config), config)
    router = given.get("router")
    for name in _PROTECTION:
        if isinstance(router, dict) and name in router:
            where = f"--config {config}: router.{name}"
            raise CommandError(f"{where}: `fissile serve` must know of it: {_PROTECTION[name]}")
    for child in fleet.children():
        command = HTTP if child.module == "facade" else child.module
        section = given.get(command)
        names = section.keys() if isinstance(section, dict) else ()
        for word in child.arguments:
            name = word.removeprefix("--").removeprefix("no-") if word.startswith("--") else ""
            if name and name in names:
                where = f"--config {config}: {command}.{name}"
                raise CommandError(f"{where} is set by `fissile serve`: say it in its section, or leave it out")


def with_model_folder(fleet: Fleet) -> Fleet:
    """Downloads a model of the Hub once for all workers. Returns the fleet with the checkpoint folder.

    Raises:
        CommandError: it cannot be had.
    """
    guard_standard_streams()
    setup_logging(fleet.log_level, service="serve")
    model_folder = find_entry_points(OFFLINE)["model_folder"].load()
    return replace(fleet, model=str(model_folder(fleet.model, weights=not fleet.simulate)))


def default_kv_memory(workers: int, tp_size: int) -> str:
    """KV memory of each rank of several workers of this machine, or of this container; empty for a single worker."""
    return kv_memory_per_rank(workers, tp_size, available_memory())


def describe_kv_memory(fleet: Fleet) -> str:
    """Describes the size of the KV caches."""
    if fleet.kv_cache_memory:
        return f"{fleet.kv_cache_memory} per rank"
    if fleet.simulate:
        return "the preset's"
    return f"a quarter of the free memory ({available_memory() / KV_SHARE / GIB:.1f} GiB)"


def _is_protected(given: Mapping[str, Any]) -> bool:
    """True if callers of the router need TLS or an API key; this command has neither."""
    return any(given[name] for name in ("tls_cert", "tls_key", "tls_client_ca", "api_keys")) or bool(
        os.environ.get(_KEY_LINES_VARIABLE)
    )


# What the facade of --http-port trusts, and shows.
_ROUTER_TLS: Final = frozenset({"router_ca", "router_tls_name", "router_client_cert", "router_client_key"})
_MODES: Final = (
    Mode(
        "with --once",
        lambda given: given["once"] and not given["ask"],
        "it ends after the first answer",
        unused=frozenset({"ask"}),
    ),
    Mode(
        "with --no-ask",
        lambda given: not given["ask"] and not given["once"],
        "there is no first request",
        unused=frozenset({"prompt"}),
    ),
    Mode(
        "with TLS or API keys",
        lambda given: given["ask"] and _is_protected(given),
        "this command has no credentials for a first request",
        unused=frozenset({"ask", "prompt"}),
    ),
    Mode(
        "without --http-port",
        lambda given: given["http_port"] is None,
        "there is no facade",
        unused=_ROUTER_TLS,
    ),
    Mode(
        "without --audit and --audit-kv",
        lambda given: given["audit"] is None and given["audit_kv"] is False,
        "no answer is compared",
        unused=frozenset({"audit_dir"}),
    ),
)


@click.command(cls=ConfigurableCommand, modes=_MODES)
@argument("served", required=False, metavar="[MODEL]")
@config_option("serve")
@options("serve")
def serve(
    served: str | None,
    ask: bool,
    prompt: str,
    once: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    api_keys: Path | None,
    speculate: bool,
    **values: Any,
) -> int:
    """Serve MODEL on this machine: one router and its workers, until Ctrl-C.

    MODEL is what --model takes: a folder, or org/name on the Hugging Face Hub, which is downloaded if necessary.

    Waits until the router's health says SERVING, sends a first request and streams the answer. With TLS or API keys the
    first request is skipped, because this command has no credentials. Workers listen on loopback. Further options of
    router, workers and facade can be set by their environment variables (`fissile router --help`, `fissile worker
    --help`, `fissile http --help`), and in the file of --config, in the sections `router`, `worker` and `http`.
    """
    if served is not None:
        if click.get_current_context().get_parameter_source("model") is ParameterSource.COMMANDLINE:
            raise CommandError(f"{served} and --model {values['model']}: name one model")
        values["model"] = served
    server_tls(tls_cert, tls_key, tls_client_ca)
    protection = {"tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca, "api_keys": api_keys}
    is_protected = _is_protected(protection)
    if once and is_protected:
        raise CommandError("--once asks in plain text and without a key: leave --tls-cert and --api-keys away")
    if speculate:
        values["speculative_config"] = demo_speculation(values["model"], values["speculative_config"])
    console = Console()
    config = file_of(click.get_current_context())
    fleet = with_model_folder(make_fleet(protection=protection, **values))
    if config is not None:
        refuse_twice_said(fleet, config)
    description = fleet.describe(fissile_version(), describe_kv_memory(fleet))
    first = FirstQuestion((ask or once) and not is_protected, prompt, once)
    return asyncio.run(Service(fleet, first, console, config).run(description))
