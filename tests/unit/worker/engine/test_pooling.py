"""A vector comes once for each sequence that is embedded, whatever the engine does with it, and is no other's."""

from __future__ import annotations

import numpy as np
import pytest

from common.config import SCHEDULING_POLICIES, Config
from common.params.pooling import EMBED_PARAMS, LAST, MEAN, Pooling
from common.params.sampling_params import SamplingParams
from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.outputs import RequestOutput
from worker.engine.pooling import MEAN_SCALE, PooledStates
from worker.engine.sequence import EndReason, Sequence
from worker.simulation.runner import SimulatedRunner


def embedded(prompt: list[int], pooling: Pooling) -> Sequence:
    return Sequence(prompt, BLOCK, EMBED_PARAMS, pooling=pooling)


def run(core: EngineCore, seqs: list[Sequence]) -> dict[int, list[RequestOutput]]:
    """The outputs of sequences that come together."""
    taken: dict[int, list[RequestOutput]] = {seq.id: [] for seq in seqs}
    core.add_group(seqs)
    while core.has_unfinished():
        for output in core.step().outputs:
            taken[output.request_id].append(output)
    core.scheduler.check_integrity()
    return taken


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("budget", [9, 40, 512])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_vectors_equal_each_prompt_alone(policy: str, budget: int, deferred: bool, num_drafts: int) -> None:
    core = engine(
        scheduling_policy=policy, max_num_batched_tokens=budget, deferred_output=deferred, num_drafts=num_drafts
    )
    runner, vectors = core.runner, 0
    assert isinstance(runner, SimulatedRunner)
    answered = [Sequence(prompt, BLOCK, SamplingParams(max_tokens=9), seed=7) for prompt in prompts(17)]
    mixed = [seq for prompt in prompts(17) for seq in (embedded(prompt, MEAN), embedded(prompt, LAST))]
    found = run(core, [*answered[:2], *mixed, *answered[2:]])
    core.close()
    for seq in [*answered, *mixed]:
        outputs = found[seq.id]
        if seq.pooling is None:
            assert not any(output.pooled for output in outputs)
            tokens = [token for output in outputs for token in output.output_tokens]
            assert tokens == runner.reference(seq.prompt_token_ids, 9, seed=7)
            continue
        (output,) = outputs
        assert (output.output_tokens, output.end_reason) == ([0], EndReason.LENGTH)
        assert output.pooled == runner.embedding(seq.prompt_token_ids, seq.pooling)
        vectors += 1
    assert vectors == 10


def test_last_pooling_uses_cache_and_mean_does_not() -> None:
    core, prompt = engine(), prompts(17)[2]
    run(core, [embedded(prompt, MEAN)])
    expected: list[tuple[Pooling, int]] = [(MEAN, 0), (LAST, 32)]
    for pooling, cached in expected:
        seq = embedded(prompt, pooling)
        run(core, [seq])
        assert seq.num_cached_tokens == cached


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_recomputed_prompt_gives_equal_vector(pooling: Pooling) -> None:
    core, prompt = engine(max_num_batched_tokens=9), prompts(17)[2]
    (expected,) = run(core, [seq := embedded(prompt, pooling)])[seq.id]
    core = engine(max_num_batched_tokens=7)
    core.add_group([seq := embedded(prompt, pooling)])
    outputs: list[RequestOutput] = []
    for number in range(100):
        if number in (2, 5):
            core.scheduler.preempt(seq)
        outputs += core.step().outputs
        if seq.is_finished:
            break
    assert len(seq.preempted_at) == 2
    assert [output.pooled for output in outputs] == [expected.pooled]


@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_nan_states_end_sequence(pooling: Pooling) -> None:
    """States of an earlier chunk count too; no computed block of the sequence is shared."""

    class Broken(SimulatedRunner):
        def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
            output = super().forward(batch)
            if output.pooled and (pooling == LAST or batch.num_computed_tokens[0] == 9):
                output.pooled = dict.fromkeys(output.pooled, b"")
            return output

    config = Config(max_model_len=80, num_kvcache_blocks=5, kv_cache_block_size=BLOCK, max_num_batched_tokens=9)
    core = EngineCore(config, Broken(50, None, block_size=BLOCK, num_blocks=5))
    (output,) = run(core, [seq := embedded(prompts(17)[2], pooling)])[seq.id]
    assert (output.output_tokens, output.pooled, output.end_reason) == ([], b"", EndReason.NOT_A_NUMBER)


def sums(rows: np.ndarray) -> bytes:
    return bytes(np.rint(rows * MEAN_SCALE).astype(np.int64).sum(0).tobytes())


def test_mean_counts_each_row_once_after_preemption() -> None:
    rows = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32).astype(np.float64)
    expected = PooledStates(MEAN)
    expected.take(0, 40, sums(rows))
    vector = np.frombuffer(expected.finish(), np.float32)
    np.testing.assert_allclose(vector, rows.mean(0), rtol=0, atol=1e-8)
    again = PooledStates(MEAN)
    # The step of [13, 20) was in flight at the preemption.
    for start, end in ((0, 13), (13, 20), (0, 9), (13, 20), (9, 40)):
        again.take(start, end, sums(rows[start:end]))
    assert again.finish() == expected.finish()
