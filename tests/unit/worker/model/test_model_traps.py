"""Mistakes that are easily made in model runner, sampler and text, one by one.

Each trap's test is shown to fail against the mistake (tests/unit/mutants.py, tests/unit/test_mutants.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.config import Config
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import Tokenizer
from kernels.interface import SampleParams
from kernels.sampling import sample
from tests.checkpoints import make_checkpoint
from tests.unit.common.text.support import files
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.logit_adjustments import SeenTokens
from worker.model.model_runner import ModelRunner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1))


def make_runner(folder: Path) -> ModelRunner:
    """On the back end whose steps have padding rows."""
    config = Config(model=str(folder), dtype="float32", kernels="torch", max_model_len=64)
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(8)
    return runner


def batch_of(*lengths: int, params: SamplingParams | None = None) -> ScheduledBatch:
    """Whole prompts, each in its own block, counting from 11."""
    seqs = {i: Sequence(list(range(11, length + 11)), 16, params, id=i) for i, length in enumerate(lengths)}
    for seq in seqs.values():
        seq.block_table = [seq.id]
    return ScheduledBatch(seqs, list(lengths), sum(lengths))


def test_t39_every_row_has_its_own_noise() -> None:
    seeds = np.array([3, 4, 3, 5, 6, 7], np.uint64)
    rows = len(seeds)
    ids = sample(
        np.zeros((rows, 1000), np.float32),
        SampleParams(
            temperature=np.ones(rows, np.float32),
            top_k=np.zeros(rows, np.int64),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
        ),
        seeds,
        np.full(rows, 10),
        np.zeros(rows, np.int64),
    ).tolist()
    assert ids[0] == ids[2]
    assert len(set(ids)) == rows - 1


def test_t40_a_character_is_shown_when_it_is_whole() -> None:
    tokenizer = Tokenizer.from_files(files("byte_level"))
    ids = [piece for piece in tokenizer.encode("a\U0001f680") if piece]
    stream = tokenizer.decode_stream()
    parts = [stream.push([token]) for token in ids] + [stream.flush()]
    assert len(ids) > 3
    assert [part for part in parts if part] == ["a", "\U0001f680"]


def test_t45_padding_rows_have_a_legal_token_and_no_slot(runner: ModelRunner) -> None:
    step = runner.prepare_model(batch_of(5, 1, 3))
    multiple = runner.kernels.row_multiple
    assert multiple > 1
    assert step.token_ids.tolist() == [11, 12, 13, 14, 15, 11, 11, 12, 13] + [0] * (-9 % multiple)
    assert step.metadata.slot_mapping.tolist() == [0, 1, 2, 3, 4, 16, 32, 33, 34]
    runner.allocate_kv_cache(8)
    runner.run_model(step)
    assert (
        int((runner._kv_cache.data != 0).sum())
        == 2 * 9 * runner.model_config.num_key_value_heads * runner.model_config.head_dim
    )


def test_pitfall_6_rows_of_other_lengths_need_no_padding() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    found = SeenTokens().penalties(batch_of(5, 1, 3, params=params).histories)
    assert found is not None
    assert found.rows.tolist() == [0, 1, 2]
    # No id 0, which pads in the lesson.
    assert [seen.ids.tolist() for seen in found.seen] == [[11, 12, 13, 14, 15], [11], [11, 12, 13]]


def test_pitfall_8_the_last_row_of_each_sequence_is_sampled(runner: ModelRunner) -> None:
    step = runner.prepare_model(batch_of(5, 1, 3))
    assert step.metadata.cu_seqlens_q.tolist() == [0, 5, 6, 9]
    assert step.final_rows.tolist() == [4, 5, 8]
    assert len(runner.run_model(step)) == 3
