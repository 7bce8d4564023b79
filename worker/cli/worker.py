"""`fissile worker`: the command and its options."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import click
import structlog
import uvloop
from typing_extensions import override

from common.cli.core.config_file import ConfigurableCommand, config_option
from common.cli.core.modes import unused_variables
from common.cli.core.options import options
from common.rpc.descriptors import raise_descriptor_limit
from common.telemetry.logs import setup_logging
from common.telemetry.output import guard_standard_streams
from worker.cli.launchers import PLACEMENT_KEY, place_node
from worker.cli.warmup import warmup
from worker.cli.worker_modes import MODES
from worker.cli.worker_options import worker_options
from worker.server import run_worker

log = structlog.get_logger(__name__)

WARMUP: Final = "warmup"
# How long the event loop may keep the interpreter from the engine thread, which wants it between two steps. Python's
# default is 5 ms.
SWITCH_INTERVAL_S: Final = 0.0005


class WorkerCommand(ConfigurableCommand):
    """`fissile worker`; with `warmup` as its first argument, that command, which runs no worker."""

    @override
    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        if args[:1] != [WARMUP]:
            context = super().make_context(info_name, args, *rest, **extra)
            # After the check of options without effect: a launcher gives all machines the options of machine 0.
            place_node(context, os.environ)
            return context
        return warmup.make_context(f"{info_name} {WARMUP}", args[1:], *rest, **extra)


@click.command(cls=WorkerCommand, modes=MODES, context_settings={"help_option_names": ["-h", "--help"]})
@config_option("worker")
@options("worker")
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
    if placed := click.get_current_context().meta.get(PLACEMENT_KEY):
        log.info("machines from the launcher's variables", **placed)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(run_worker(worker_options(**given)))
