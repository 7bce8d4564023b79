"""`fissile bench offline`: measures the engine with a checkpoint, in this process."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from common.cli.bench.command import measure
from common.cli.bench.load import Load
from common.cli.bench.machine import CpuMeter
from common.cli.bench.plan import Plan
from common.cli.bench.records import Record
from common.cli.bench.service import Terms
from common.cli.bench.target import PROGRESS_EVERY_S, OnProgress
from common.cli.bench.workload import Work
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand
from common.cli.core.options import options
from common.config import Config
from common.errors import ApiError
from common.params.options.engine import ENGINE, OFFLINE
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging
from common.text.tokenizer import TokenizerError
from worker.cli.offline import OfflineRun
from worker.cli.worker_modes import ENGINE_MODES
from worker.cli.worker_options import engine_options
from worker.config.model_config import ModelError
from worker.engine.core import EngineDeadError
from worker.ranks.rank_peers import RankLostError


class EngineTarget:
    """Benchmark target: an engine in this process.

    Args:
        config: of the engine.
        threads: of arithmetic; None: all cores, or what OMP_NUM_THREADS says.
        terms: of all requests.

    Raises:
        CommandError: the checkpoint cannot be served (exit code 2), or a rank ended while it loaded (1).
    """

    mode = "offline"

    def __init__(self, config: Config, threads: int | None, terms: Terms) -> None:
        if threads is not None:
            # PyTorch reads it when imported; so do the ranks.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        # Listing the options needs no PyTorch.
        from worker.llm_engine import LLMEngine  # noqa: PLC0415

        try:
            self._engine = LLMEngine(config)
        except (ApiError, TokenizerError, ModelError) as error:
            raise CommandError(str(error)) from error
        except RankLostError as error:
            raise CommandError(f"the engine failed: {error}", 1) from error
        self.meter = CpuMeter()
        self.model: dict[str, Any] = {
            "name": config.model,
            "architecture": self._engine.io.model_config.architecture,
            "max_model_len": self._engine.config.max_model_len,
            "vocab_size": self._engine.io.model_config.vocab_size,
        }
        self._terms = terms
        self._runs = itertools.count()
        self._current: OfflineRun | None = None
        self._stopped = False

    def run(self, load: Load, work_of: Callable[[int], Work], on_progress: OnProgress) -> list[Record]:
        """Runs a load to its end, or to `stop`. Returns its records.

        Raises:
            CommandError: the engine failed, or a rank of it; nothing can be run any more (exit code 1).
        """
        told = time.monotonic()

        def on_step() -> None:
            nonlocal told
            if time.monotonic() - told > PROGRESS_EVERY_S:
                told = time.monotonic()
                on_progress(run.records, run.in_flight)

        # The engine refuses an id that it has seen.
        name = f"bench-{next(self._runs)}"
        run = self._current = OfflineRun(load, work_of, self._engine, self._terms, name, on_step=on_step)
        if self._stopped:
            run.stop()
        try:
            return run.run()
        except (RankLostError, EngineDeadError) as error:
            raise CommandError(f"the engine failed: {error}", 1) from error
        finally:
            self._current = None

    def stop(self) -> None:
        """Ends the running load after the current step, and every later one at once; for a signal handler."""
        self._stopped = True
        if self._current is not None:
            self._current.stop()

    def draft_counts(self) -> list[tuple[int, int]]:
        """Drafts of speculation verified and accepted so far, by their position behind a token."""
        return list(self._engine.core.scheduler.spec_stats.by_position)

    def close(self) -> None:
        """Ends the ranks, if there are any."""
        self._engine.close()


@click.command(cls=ModalCommand, modes=ENGINE_MODES, context_settings={"help_option_names": ["-h", "--help"]})
@options("bench offline")
def offline(**given: Any) -> int:
    """Measure the engine with a checkpoint, in this process: no router, no gRPC.

    Loads, figures and exit codes are those of `fissile bench serve`; the difference is what the service adds. The
    engine does not report how long requests queued, nor how many prompt tokens were cached.
    """
    engine = {row.value_name: given.pop(row.value_name) for row in ENGINE if OFFLINE in row.commands}
    engine["model"] = given.pop("model")
    plan = Plan.of(**given)
    _refuse_messages(plan)
    setup_logging(os.environ.get(LEVEL_VARIABLE, "warning"), service="offline")
    made = engine_options(engine)
    engine["max_num_batched_tokens"] = made.config.max_num_batched_tokens
    spec = made.config.speculative_config
    engine["speculative_config"] = None if spec is None else asdict(spec)
    engine["scheduling_policy"] = made.config.scheduling_policy
    return measure(plan, EngineTarget(made.config, made.threads, plan.terms()), {"engine": engine})


def _refuse_messages(plan: Plan) -> None:
    """Refuses chat messages before the model is loaded, because only routers have chat templates."""
    entries = () if plan.entries is None else plan.entries.entries
    for number, work in enumerate(entries, 1):
        if work.messages:
            raise CommandError(
                f"--dataset {plan.dataset}: request {number} has messages, which need a router; valid offline: prompt "
                "or token_ids"
            )
