"""Digests of logits: of the model's own rows, whatever the sampling, the batch, the chunks and the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

PROMPT, TOKENS, EVERY = 21, 12, 3


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    config = Config(model=str(folder), dtype="float32", max_model_len=128, kernels="torch")
    return ModelRunner(config, ModelConfig.from_folder(folder))


def asked(temperature: float, every: int, *, given: list[int] | None = None, **params: Any) -> Sequence:
    prompt = list(range(40, 40 + PROMPT))
    sampling = SamplingParams(temperature=temperature, max_tokens=TOKENS, ignore_eos=True, **params)
    return Sequence(prompt + (given or []), 16, sampling, num_prompt_tokens=PROMPT, seed=3, logits_every=every)


def run(runner: ModelRunner, *seqs: Sequence, budget: int = 64, num_blocks: int = 24) -> dict[int, dict[int, int]]:
    """The digests that an engine gives of each sequence, by position."""
    config = Config(
        model=runner.config.model,
        max_model_len=128,
        max_num_batched_tokens=budget,
        num_kvcache_blocks=num_blocks,
        enable_prefix_caching=False,
        deferred_output=False,
    )
    runner.allocate_kv_cache(num_blocks)
    core = EngineCore(config, runner)
    core.enter(seqs, is_gated=False)
    digests: dict[int, dict[int, int]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            for position, digest in (output.logit_digests or {}).items():
                assert output.first_pos <= position < output.first_pos + len(output.output_tokens)
                assert position not in digests.setdefault(output.request_id, {})
                digests[output.request_id][position] = digest
    return digests


def expected(runner: ModelRunner, seq: Sequence, every: int) -> dict[int, int]:
    """Digests of the logits that prefills of prompt and answer give, one by one."""
    found = {}
    for end in range(PROMPT, PROMPT + TOKENS, every):
        again = Sequence(seq.token_ids[:end], 16)
        runner.allocate_kv_cache(again.num_blocks)
        again.block_table = list(range(again.num_blocks))
        logits = runner.run_model(runner.prepare_model(ScheduledBatch({again.id: again}, [end], end)))
        assert logits.dtype == torch.float32
        found[end] = xxhash.xxh3_64(b"".join(row.numpy().astype("<f4").tobytes() for row in logits)).intdigest()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_digests_cover_raw_logits_at_requested_positions(runner: ModelRunner, temperature: float) -> None:
    """Penalties and masks are written into the rows after the digest."""
    steered: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "min_tokens": 4}
    for params in ({}, steered):
        seq = asked(temperature, EVERY, **params)
        assert run(runner, seq) == {seq.id: expected(runner, seq, EVERY)}


def test_logit_digests_are_batch_invariant_and_change_no_token(runner: ModelRunner) -> None:
    alone = asked(0.0, 1)
    (digests,) = run(runner, alone).values()
    plain = asked(0.0, 0)
    assert run(runner, plain) == {}
    assert plain.token_ids == alone.token_ids
    crowd = [asked(0.0, 1), asked(0.7, EVERY), asked(0.0, 0), asked(0.0, 5)]
    # Chunks of seven tokens, and few blocks, so that sequences are preempted.
    together = run(runner, *crowd, budget=7, num_blocks=8)
    assert together[crowd[0].id] == digests
    assert together[crowd[3].id] == {at: digest for at, digest in digests.items() if (at - PROMPT) % 5 == 0}
    assert sorted(together) == sorted(seq.id for seq in (crowd[0], crowd[1], crowd[3]))


def test_rows_hashed_later_are_unadjusted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the tokens of a step arrive during the next step."""
    steered: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "min_tokens": 4}
    at_once, later = asked(0.9, 1, **steered), asked(0.9, 1, **steered)
    (digests,) = run(runner, at_once).values()
    monkeypatch.setattr(runner.sampler, "waits_for_tokens", True)
    assert run(runner, later) == {later.id: digests}


def test_resumed_attempt_gives_digests_of_remaining_tokens(runner: ModelRunner) -> None:
    whole = asked(0.8, EVERY)
    (digests,) = run(runner, whole).values()
    for count in (1, 3, 4):
        rest = asked(0.8, EVERY, given=whole.token_ids[PROMPT : PROMPT + count])
        assert run(runner, rest)[rest.id] == {at: d for at, d in digests.items() if at >= PROMPT + count}
