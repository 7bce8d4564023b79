"""Steps launched after drafts in flight give the tokens of plain decodes (docs/explanation/determinism.md)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.cpu.instruction_sets import AUTO
from kernels.no_token import NO_TOKEN
from tests.checkpoints import make_checkpoint
from tests.covering import covering
from tests.parity.late_steps import Ahead, answers
from tests.parity.test_equality import poisoned
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner
from worker.model.sampled_rows import SampledRows
from worker.model.sampler import SampledTokens, Sampler
from worker.model.speculation.draft_proposer import SampledStep

GREEDY: Final[list[dict[str, Any]]] = [{"temperature": 0.0}] * 4
# A token's noise follows its position; logprobs are of accepted rows; penalties wait for their tokens.
DRAWN: Final[list[dict[str, Any]]] = [
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 40, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.9, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.9},
]
KINDS: Final = {"greedy": GREEDY, "drawn": DRAWN}
NUM_TOKENS, NUM_BLOCKS = 60, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def runner_of(folder: Path, kernels: str = AUTO, **options: Any) -> ModelRunner:
    config = Config(model=str(folder), dtype="float32", kernels=kernels, max_model_len=128, **options)
    runner = ModelRunner(config, ModelConfig.from_folder(str(folder)))
    runner.kernels = poisoned(runner.kernels)
    runner.allocate_kv_cache(NUM_BLOCKS)
    return runner


def check(runner: ModelRunner, kind: str, seeds: Iterable[int], *, on_host: bool, stays: bool) -> Counter[str]:
    """Runs answers of a kind once for each seed.

    Args:
        runner: to be used.
        kind: of the parameters.
        seeds: of prompts, drafts, and who takes part.
        on_host: as of `Ahead`.
        stays: whether tokens stay on the device, as they do on a GPU.
    """
    seen = Counter[str]()
    for seed in seeds:
        runner.draft_proposer = None
        runner.sampler.waits_for_tokens = False
        runner.allocate_kv_cache(NUM_BLOCKS)
        found = answers(runner, KINDS[kind], NUM_TOKENS, seed)
        runner.sampler.waits_for_tokens = stays
        ahead = Ahead(runner, found, random.Random(seed), on_host=on_host)
        runner.allocate_kv_cache(NUM_BLOCKS)
        seen += ahead.run(60)
    return seen


@pytest.mark.parametrize(
    ("kernels", "kind", "on_host", "stays"), covering([AUTO, "torch"], list(KINDS), [False, True], [False, True])
)
def test_tokens_equal_plain_decodes(folder: Path, kernels: str, kind: str, on_host: bool, stays: bool) -> None:
    seen = check(runner_of(folder, kernels), kind, range(3), on_host=on_host, stays=stays)
    for name in (
        "known drafts",
        "late drafts",
        "late without drafts",
        "missing drafts",
        "rejected in flight",
        "right in flight",
    ):
        assert seen[name] > 10, name


def test_invalid_token_ids_have_an_embedding(folder: Path) -> None:
    """Invalid ids occur as newest token and as draft: their sequences end, and the step in flight is discarded."""
    runner = runner_of(folder)
    seqs = [Sequence([5, 6, 7], 16, SamplingParams()) for _ in range(2)]
    runner.sampler.keep(
        SampledRows.of(batch_of(seqs, [3, 3])), torch.tensor([NO_TOKEN, 9]), torch.tensor([5, 6, 7] * 2)
    )
    for i, seq in enumerate(seqs):
        seq.block_table = [i]
        seq.num_inflight_tokens, seq.num_placeholder = 3, 1
    runner.sampler.last.drafts = torch.tensor([[20, NO_TOKEN, 21], [30, 31, 32]])
    drafts = {seqs[0].id: [NO_TOKEN] * 2, seqs[1].id: [NO_TOKEN]}
    step = runner.prepare_model(batch_of(seqs, [3, 2], drafts))
    assert step.token_ids[:5].tolist() == [0, 20, 0, 9, 30]


def batch_of(seqs: list[Sequence], counts: list[int], drafts: dict[int, list[int]] | None = None) -> ScheduledBatch:
    return ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts), scheduled_spec_decode_tokens=drafts)


MUTANTS = [
    Mutant("nothing is wrong", Sampler, "num_rejected", "self.last.num_rejected.", "0 * self.last.num_rejected."),
    Mutant("noise of another position", SampledRows, "moved", "num_rejected=of_rows", "num_rejected=0 * of_rows"),
    Mutant("angles of another position", SampledRows, "moved", "positions -= ", "positions - "),
    Mutant("slots of other positions", ModelRunner, "prepare_model", "if batch.drafts_in_flight", "if False"),
    Mutant("the first row's token", SampledTokens, "newest", "self._verified.newest", "self.ids"),
    Mutant("drafts of another row", Sampler, "_write_late_drafts", "places[own] * drafts", "own * drafts"),
    Mutant("the first draft again", Sampler, "_write_late_drafts", "shape[1] + offsets", "shape[1]"),
    Mutant("no drafts", Sampler, "_write_late_drafts", "if not wanted.any()", "if True"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant, folder: Path) -> None:
    runner = runner_of(folder)
    with mutant.applied(), pytest.raises((*OBJECTIONS, IndexError)):
        check(runner, "drawn", range(3), on_host=False, stays=True)


@pytest.mark.slow
def test_wrong_draft_positions_are_detected(folder: Path) -> None:
    mutant = Mutant("starts by the batch", SampledStep, "starts", "if self.num_rejected is None", "if True")
    runner = runner_of(folder)
    with mutant.applied(), pytest.raises(OBJECTIONS):
        check(runner, "greedy", range(3), on_host=True, stays=True)
