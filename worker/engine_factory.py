"""Builds engines: with the model in this process, on ranks that hold it, or simulated.

Services and the offline engine are built here. PyTorch takes seconds to import, so only code that runs the model
imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

from common.config import Config
from common.limits import STEP_TIMEOUT_S
from worker.config.model_config import ModelConfig
from worker.config.model_tokenizer import model_tokenizer
from worker.engine.core import DPEngineCoreProc, EngineCore
from worker.engine.tier_lookups import Tiers, root_name
from worker.grammars import grammars_to_check
from worker.kv_tiers.tier_option import check_tiers, open_tiers
from worker.kv_tiers.tiers import KvTiers
from worker.progress import StartProgress
from worker.ranks.rank_client import RankGroup
from worker.ranks.rank_setup import load_ranks
from worker.ranks.topology import Topology, threads_per_rank
from worker.simulation.cost_model import CostModel
from worker.simulation.runner import simulated_runner


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that an engine is built from.

    Attributes:
        config: of the engine, with special tokens; `kv_cache_memory` is each rank's.
        model_config: from the same folder.
        threads: of the model's arithmetic on this machine; None for PyTorch's choice, and one core for each rank.
        topology: the ranks that share the model.
        step_timeout_s: time after which a step of several ranks counts as hung.
        simulate: duration of steps without a model; None runs the model.
        takes_memory: True to take the KV cache's memory at once, not with the first requests.
    """

    config: Config
    model_config: ModelConfig
    threads: int | None = None
    topology: Topology = field(default_factory=Topology)
    step_timeout_s: float = STEP_TIMEOUT_S
    simulate: CostModel | None = None
    takes_memory: bool = False


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, loaded and warm.

    Attributes:
        core: the engine; its config has the KV cache's size.
        describe: returns what was loaded: `weights_digest`, `numerics`, `kernels`, `dtype` and `grammar_engine`; may
            run a few steps.
    """

    core: EngineCore
    describe: Callable[[], dict[str, str]]


def build_engine(
    options: EngineOptions, progress: StartProgress, clock: Callable[[], float] = time.monotonic
) -> BuiltEngine:
    """Loads the model and sizes its KV cache.

    Args:
        options: of the engine.
        progress: called at each stage.
        clock: monotonic seconds.

    Raises:
        ModelError: the checkpoint cannot be served, or the ranks' machines differ.
        InvalidFieldError: the lengths do not fit the KV memory.
        RankLostError: a rank ended while it loaded.
    """
    check_tiers(options.config.kv_tiers)
    if options.simulate is not None:
        return _simulated(options, options.simulate, clock)
    try:
        return _on_ranks(options, progress, clock) if options.topology.has_ranks else _here(options, progress, clock)
    finally:
        progress.done()


def _here(options: EngineOptions, progress: StartProgress, clock: Callable[[], float]) -> BuiltEngine:
    progress.stage("loading PyTorch")
    # Simulated workers, and workers whose ranks hold the model, run without PyTorch installed.
    from worker.model.runner_setup import describe, load_runner, make_executor  # noqa: PLC0415

    config, runner = load_runner(
        options.config, options.model_config, options.threads, progress, takes_memory=options.takes_memory
    )
    config, executor = make_executor(config, runner, clock)
    known = cache(partial(describe, runner))
    audited = [slice(runner.kv_block_bytes - runner.draft_block_bytes)]
    with _open_tiers(config, runner.kv_block_bytes, audited, known) as tiers:
        core = EngineCore(config, runner, clock, executor, runner.grammars, tiers)
        core.measure_step_costs()
    return BuiltEngine(core, known)


def _on_ranks(options: EngineOptions, progress: StartProgress, clock: Callable[[], float]) -> BuiltEngine:
    """The ranks end with the engine."""
    topology = options.topology
    threads = threads_per_rank(options.threads, topology.ranks_per_node)
    group = RankGroup(topology, options.config.model, threads, progress, options.step_timeout_s)
    config, known = load_ranks(group, options.config, options.model_config, progress)
    grammars = None
    if known["grammar_engine"]:
        grammars = grammars_to_check(model_tokenizer(config.model), config.eos_token_ids)
    with _open_tiers(config, group.kv_block_bytes, group.model_slices, lambda: known) as tiers:
        if topology.dp_size > 1:
            # An engine in lockstep needs the other engines for every step, so it learns step times while it serves.
            return BuiltEngine(DPEngineCoreProc(config, group, clock, grammars, tiers), lambda: known)
        core = EngineCore(config, group, clock, group, grammars, tiers)
        core.measure_step_costs()
    return BuiltEngine(core, lambda: known)


def _simulated(options: EngineOptions, cost: CostModel, clock: Callable[[], float]) -> BuiltEngine:
    config, runner = simulated_runner(options.config, options.model_config, cost)
    # A cost model has no logits that a grammar could mask.
    known = dict.fromkeys(("weights_digest", "numerics", "kernels", "dtype"), "simulated") | {"grammar_engine": ""}
    with _open_tiers(config, runner.kv_block_bytes, [slice(None)], lambda: known) as tiers:
        return BuiltEngine(EngineCore(config, runner, clock, tiers=tiers), lambda: known)


@contextmanager
def _open_tiers(
    config: Config, block_bytes: int, audited: Sequence[slice], describe: Callable[[], dict[str, str]]
) -> Iterator[Tiers | None]:
    """The KV tiers of an engine with these facts (BuiltEngine), None without any. Closes them if its start fails.

    Raises:
        InvalidFieldError: one cannot be opened.
    """
    if not config.kv_tiers:
        yield None
        return
    facts, num_ranks = sorted(describe().items()), config.tensor_parallel_size
    root = root_name((facts, config.kv_cache_block_size, block_bytes, num_ranks, config.speculative_config))
    store = KvTiers(open_tiers(config.kv_tiers, block_bytes), block_bytes, audited_slices=audited)
    try:
        yield Tiers(store, root)
    except BaseException:
        store.close()
        raise
