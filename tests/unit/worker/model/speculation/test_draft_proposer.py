"""The runner's inputs to a draft model: all rows of every step, the new tokens, and a KV cache of its own. No proposal
changes a token."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.config_parts import MTP, NGRAM
from common.params.sampling_params import SamplingParams
from kernels.interface import KVCache
from kernels.no_token import NO_TOKEN
from tests.checkpoints import make_checkpoint
from tests.parity.drafts import Streams, launched, sampled, streams_of
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.engine.speculation.drafter import Proposer
from worker.llm_engine import LLMEngine
from worker.model.forward_context import KVCacheTensor
from worker.model.model_runner import ModelRunner
from worker.model.speculation.draft_proposer import LaunchedDrafts, LaunchedStep, SampledStep
from worker.model.speculation.model_proposers import ModelProposer

MODEL_LEN = 96


class Knowing:
    """A draft model without weights: it knows the coming tokens and checks that it could have computed them."""

    num_layers = 1

    def __init__(self, runner: ModelRunner, rnd: random.Random) -> None:
        self.kv_spec = runner.kv_spec
        self.takes_states = True
        self.streams: Streams = {}
        self.num_asked = 0
        self._hidden = runner.model_config.hidden_size
        self._rnd = rnd

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        return {"layers.0": KVCacheTensor(0, cache)}

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        batch = step.batch
        assert step.states.shape == (len(step.token_ids), self._hidden)
        assert step.states.isfinite().all()
        assert len(step.token_ids) == batch.total_tokens_num
        assert step.kv_cache_data["layers.0"].cache is not None
        drafts = {}
        for i, seq_id in enumerate(batch.req_ids):
            most = step.num_drafts(i)
            assert (most == 0) or batch.is_final[i]
            if most == 0:
                continue
            self.num_asked += 1
            tokens, seq = step.tokens[seq_id], batch.columns.rows[i]
            known = [*seq.token_ids, *tokens]
            assert len(known) == step.num_tokens(i)
            # The last draft has no KV; the first one follows the newest token.
            assert len(known) + most - 2 <= len(batch.tables[i]) * batch.block_size
            behind = self.streams.get((seq.seed, seq.choice), [])[len(known) - seq.num_prompt_tokens :]
            right = behind[: self._rnd.randint(0, most)]
            drafts[seq_id] = right + [self._rnd.randrange(5, 300) for _ in range(most - len(right))]
        return drafts

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        return launched(step, self.propose(sampled(step)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_streams_with_runner_drafts_equal_plain_decoding(folder: Path, policy: str) -> None:
    rnd = random.Random(policy)
    given = Config(
        model=str(folder),
        dtype="float32",
        max_model_len=MODEL_LEN,
        num_kvcache_blocks=8,
        max_num_batched_tokens=32,
        scheduling_policy=policy,
        enable_prefix_caching=True,
    )
    plain = LLMEngine(given)
    runner = ModelRunner(given, ModelConfig.from_folder(folder))
    plain_bytes = runner.kv_block_bytes
    runner.draft_proposer = proposer = Knowing(runner, rnd)
    assert runner.kv_block_bytes == plain_bytes * 4 // 3, "one layer more than three"
    runner.allocate_kv_cache(given.num_kvcache_blocks)
    spec = SpeculativeConfig(4, MTP, adaptive=False)
    drafting = LLMEngine(Config(**{**vars(given), "speculative_config": spec}), runner=runner)
    for _ in range(6):
        prompts = [[rnd.randrange(5, 300) for _ in range(rnd.randint(1, 40))] for _ in range(6)]
        params = [
            SamplingParams(temperature=rnd.choice([0, 1]), max_tokens=rnd.randint(1, 40), num_drafts=n)
            for n in (None, None, 0, 2, None, 9)
        ]
        ids = [f"{rnd.random()}" for _ in prompts]
        expected = plain.generate(prompts, params, request_ids=ids)
        proposer.streams = streams_of(expected)
        found = drafting.generate(prompts, params, request_ids=ids)
        assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]
    stats = drafting.core.scheduler.spec_stats
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens
    assert drafting.core.scheduler.lifecycle.num_preemptions > 0
    assert proposer.num_asked > 0


class Counting(ModelRunner):
    """Counts how often it was asked."""

    num_forwards = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.num_forwards += 1
        return super().forward(batch)


def test_right_drafts_save_steps(folder: Path) -> None:
    config = Config(model=str(folder), dtype="float32", max_model_len=MODEL_LEN, num_kvcache_blocks=8)
    runner = Counting(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(8)
    params = {"temperature": 0.0, "max_tokens": 41, "ignore_eos": True}
    answer = LLMEngine(config, runner=runner).generate([[7, 8, 9]], params)[0]
    assert runner.num_forwards == 41
    drafting = LLMEngine(
        Config(**{**vars(config), "speculative_config": SpeculativeConfig(4, NGRAM, adaptive=False)}), runner=runner
    )

    class Right(Proposer):
        def propose(self, seq: Sequence, most: int) -> list[int]:
            return list(answer["token_ids"][len(seq.output_tokens) :][:most])

    drafting.core.scheduler.drafter.proposer = Right()
    runner.num_forwards = 0
    assert drafting.generate([[7, 8, 9]], params)[0]["token_ids"] == answer["token_ids"]
    # The prompt, and five tokens a step.
    assert runner.num_forwards == 1 + 40 // 5


def test_histories_exclude_invalid_token_ids() -> None:
    """Counts of penalties are by id: one of -1 was written outside of them, and the process fell."""
    step = cast("SampledStep", SimpleNamespace(history=lambda _i, drafts: drafts))
    drafts = [torch.tensor([7, NO_TOKEN]), torch.tensor([8, 0])]
    found: dict[int, object] = {**ModelProposer._histories(step, np.array([3, 5]), drafts)}
    assert found == {0: [7, 8], 1: []}


def test_drafts_use_slots_of_their_request_time() -> None:
    """Later blocks may be another sequence's as yet: the next step may be scheduled before this one is launched."""
    seq = Sequence(list(range(5, 12)), 4, SamplingParams())
    seq.block_table = [3, 1]
    batch = ScheduledBatch({seq.id: seq}, [7], 7)
    batch.want_drafts({seq.id: 4})
    step = SampledStep(batch, {seq.id: (9,)}, np.array(seq.token_ids), torch.zeros(7, 1), {})
    # The eighth token, the newest one, has the last slot; the second draft has none.
    assert step.num_drafts(0) == 2
    seq.block_table.append(2)
    assert step.num_drafts(0) == 2
