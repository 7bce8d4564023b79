"""Draft models of a target whose tokens stay on the device, as on a GPU: a step is launched before it is known which
drafts of the one before it were right, and its drafts are those that an independent model makes behind the right ones,
and that the same model makes on the host.

Kernels of the host compute, and a switch of the sampler says that a launch may not look at a token. Half of what is
verified are drafts that are right for a while, since those of random models hardly ever are. KV caches begin full of
NaN, so that a slot that is read before it is written shows.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from common.config import MIXED, PREFILL_FIRST
from kernels.interface import KernelBackend
from kernels.select import select_backend
from tests.covering import slow_but
from tests.parity.drafts import Streams, streams_of
from tests.parity.test_draft_proposers import CASES, MOST_SWAPPED, Case, Proposed, independent_drafts, loaded
from tests.parity.test_equality import poisoned
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.engine.batch import ScheduledBatch
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.model_runner import ModelRunner
from worker.model.speculation.draft_proposer import LaunchedDrafts, LaunchedStep, SampledStep
from worker.model.speculation.draft_runner import ChainRows, DraftRunner
from worker.model.speculation.model_proposers import LaunchedRows, ModelProposer

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "chunked": {"max_num_batched_tokens": 16, "scheduling_policy": MIXED, "kernels": "torch"},
    "preempted": {"num_kvcache_blocks": 96, "kv_cache_block_size": 1, "scheduling_policy": PREFILL_FIRST},
    "cached": {"enable_prefix_caching": True},
}
# Models with sparse attention: sums in another order may swap selected tokens, and all drafts after them.
SELECTING: Final = ("mtp deepseek_v32", "draft_model deepseek_v32")
EVENTS: Final = ("drafts in flight", "late drafts", "different numbers", "waits", "preemptions", "hits")
# Calls that copy a number to the host.
READS: Final = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__")


class Watched:
    """A runner, and what its draft model makes.

    Args:
        runner: that drafts.
        streams: tokens that its sequences will have.
        rnd: decides which drafts are put in place of its own.
        seen: counts what happens.

    Attributes:
        found: what was drafted.
    """

    def __init__(self, runner: ModelRunner, streams: Streams, rnd: random.Random, seen: Counter[str]) -> None:
        proposer: Any = runner.draft_proposer
        self.found: list[Proposed] = []
        self._launch, self._propose = proposer.launch, proposer.propose
        self._streams, self._rnd, self._seen = streams, rnd, seen
        proposer.launch, proposer.propose = self.launch, self.propose

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        made: LaunchedDrafts = self._launch(step)
        batch, token_ids = step.batch, made.token_ids.clone()
        rows = zip(batch.req_ids, batch.from_last_output, strict=True)
        late = {seq_id for seq_id, is_late in rows if is_late}
        self._seen["drafts in flight"] += bool(batch.drafts_in_flight)
        self._seen["late drafts"] += not late.isdisjoint(batch.scheduled_spec_decode_tokens)
        self._seen["different numbers"] += len(set(made.counts.values())) > 1
        for place, seq_id in enumerate(step.sampled.seq_ids):
            if count := made.counts.get(seq_id, 0):
                i, own = batch.req_ids.index(seq_id), token_ids[place, :count]
                _, num_rejected = step.stand(np.array([i]), np.zeros(1, np.int64))
                num_tokens = step.num_tokens(i) - (0 if num_rejected is None else int(num_rejected))
                own.copy_(torch.tensor(self._taken(batch, i, num_tokens, own.tolist())))
        return replace(made, token_ids=token_ids)

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        made = self._propose(step)
        self._seen["waits"] += 1
        every = ((seq_id, step.batch.req_ids.index(seq_id)) for seq_id in made)
        return {seq_id: self._taken(step.batch, i, step.num_tokens(i), made[seq_id]) for seq_id, i in every}

    def _taken(self, batch: ScheduledBatch, i: int, num_tokens: int, drafts: list[int]) -> list[int]:
        """Records drafts after `num_tokens` tokens; now and then replaces the first ones by right ones."""
        seq = batch.columns.rows[i]
        self.found.append(Proposed(seq, num_tokens, drafts))
        behind = self._streams.get((seq.seed, seq.choice), [])[num_tokens - seq.num_prompt_tokens :]
        num_right = self._rnd.choice([0, self._rnd.randint(0, min(len(drafts), len(behind)))])
        return behind[:num_right] + drafts[num_right:]


def _check(name: str, case: Case, setting: str, seen: Counter[str]) -> None:
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kvcache_blocks": 40, "deferred_output": True}
    config = replace(case.config, **{**given, **SETTINGS[setting]})
    prompts, params = _requests(random.Random(setting), steered=setting == "cached")
    plain = LLMEngine(alone := replace(config, speculative_config=None), runner=loaded(alone))
    expected = plain.generate(prompts, params)
    plain.close()
    made: list[dict[tuple[int, int], list[int]]] = []
    for waits in (True, False):
        runner, counts = loaded(config), seen if waits else Counter[str]()
        runner.sampler.waits_for_tokens = waits
        watched = Watched(runner, streams_of(expected), random.Random(setting), counts)
        engine = LLMEngine(config, runner=runner)
        answers = engine.generate(prompts, params)
        assert [one["token_ids"] for one in answers] == [one["token_ids"] for one in expected], setting
        # A step may be launched after one that ends its sequence.
        found = [each for each in watched.found if each.count <= each.seq.num_tokens]
        made.append({(each.seq.seed, each.count): each.drafts for each in found})
        if waits and name not in SELECTING:
            _compare(case, [each for each in found if each.seq.steered_until == each.seq.num_prompt_tokens], seen)
        _count(engine, found, counts)
        engine.close()
    launched, asked = made
    both = launched.keys() & asked.keys()
    assert len(both) > len(launched) // 2
    for key in both:
        # As many drafts as both had room for.
        count = min(len(launched[key]), len(asked[key]))
        assert launched[key][:count] == asked[key][:count]


def _compare(case: Case, found: list[Proposed], seen: Counter[str]) -> None:
    seen["compared"] += len(found)
    seen["swapped"] += sum(drafts != each.drafts for each, drafts in independent_drafts(case, found))
    # Among few drafts one may be swapped.
    assert seen["swapped"] <= max(1, MOST_SWAPPED * seen["compared"]), seen


def _count(engine: LLMEngine, found: list[Proposed], seen: Counter[str]) -> None:
    scheduler = engine.core.scheduler
    seen["accepted"] += scheduler.spec_stats.total_accepted_tokens
    seen["verified"] += scheduler.spec_stats.total_draft_tokens
    seen["preemptions"] += scheduler.lifecycle.num_preemptions
    seen["hits"] += sum(each.seq.num_cached_tokens > 0 for each in found)


def _requests(rnd: random.Random, *, steered: bool) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts, each twice; of some fewer drafts are wanted, and one may have a penalty, with which steps wait."""
    prompts = [[rnd.randrange(5, 300) for _ in range(rnd.randint(2, 50))] for _ in range(3)]
    kinds = ((0.0, None, 24), (2.0, 2, 24), (1.0, None, 24), (0.0, 1, 24), (1.0, None, 24), (0.5, None, 6))
    params: list[dict[str, Any]] = [
        {"temperature": temperature, "num_drafts": count, "max_tokens": most, "seed": rnd.randrange(2**64)}
        for temperature, count, most in kinds
    ]
    params[-1] |= {"repetition_penalty": 1.2} if steered else {}
    return prompts * 2, [one | {"ignore_eos": True} for one in params]


@pytest.fixture
def nan_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned_backend(*choice: Any) -> KernelBackend:
        return poisoned(select_backend(*choice))

    monkeypatch.setattr(model_runner, "select_backend", poisoned_backend)


@pytest.mark.usefixtures("nan_caches")
@pytest.mark.parametrize("name", slow_but({"eagle3 qwen3", "draft_model llama"}, list(CASES)))
def test_streams_and_drafts(name: str, tmp_path: Path) -> None:
    case, seen = CASES[name](tmp_path), Counter[str]()
    for setting in SETTINGS:
        _check(name, case, setting, seen)
    assert all(seen[event] > 0 for event in EVENTS), seen
    assert 40 < seen["accepted"] < seen["verified"]


MUTANTS = [
    Mutant("tokens behind drafts", LaunchedRows, "behind", "sources[drawn] = total", "sources[drawn] = drawn"),
    Mutant("nothing behind a chunk", LaunchedStep, "take", "known.get(seq_id, 0)", "0"),
    Mutant("the newest token stands elsewhere", LaunchedRows, "with_newest", "shifts[own] + 1)", "shifts[own])"),
    Mutant("rows of wrong drafts", LaunchedStep, "stand", "last - wrong", "last"),
    Mutant("drafts in flight", LaunchedStep, "stand", "wrong + late", "wrong + 0 * late"),
    Mutant("positions", DraftRunner, "_inputs", "-= rows.num_rejected", "-= 0 * rows.num_rejected"),
    Mutant("positions behind wrong drafts", ChainRows, "of", "- num_rejected)", ")"),
    Mutant("noise behind wrong drafts", ModelProposer, "_draw", "else num_rejected[", "else 0 * num_rejected["),
    Mutant("drafts of others", ModelProposer, "_launched", "+ borders", "+ 0 * borders"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant, tmp_path: Path) -> None:
    name = "draft_model llama" if mutant.name == "with_newest" else "eagle3 qwen3"
    case = CASES[name](tmp_path)
    with mutant.applied(), pytest.raises(OBJECTIONS):
        _check(name, case, "chunked", Counter())


@contextmanager
def _no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """No module of the model's runner reads a tensor while the first of the list is True."""
    folder, launching = str(Path(model_runner.__file__).parent), [False]

    def guarded(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            asking = Path(sys._getframe(1).f_code.co_filename)
            assert not (launching[0] and str(asking.parent) == folder), f"{asking.name} waits for a tensor ({name})"
            return read(*given, **named)

        return called

    with monkeypatch.context() as patched:
        for name in READS:
            patched.setattr(torch.Tensor, name, guarded(name, getattr(torch.Tensor, name)), raising=False)
        yield launching


@pytest.mark.parametrize("name", ["eagle3 qwen3", "mtp glm4_moe", "draft_model llama"])
def test_launches_do_not_wait_for_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CASES[name](tmp_path).config, dtype="float32", max_model_len=96, deferred_output=True)
    config = replace(config, num_kvcache_blocks=40, max_num_batched_tokens=16, scheduling_policy=MIXED)
    runner: Any = loaded(config)
    runner.sampler.waits_for_tokens = True
    engine, seen = LLMEngine(config, runner=runner), Counter[str]()
    with _no_reads(monkeypatch) as launching:
        launch = runner.launch

        def watched(batch: ScheduledBatch) -> Any:
            launching[0] = True
            seen["launches behind drafts in flight"] += bool(batch.drafts_in_flight)
            try:
                return launch(batch)
            finally:
                launching[0] = False

        monkeypatch.setattr(runner, "launch", watched)
        prompts, params = _requests(random.Random(name), steered=False)
        engine.generate(prompts, params)
    assert seen["launches behind drafts in flight"] > 10
    engine.close()
