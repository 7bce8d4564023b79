from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import Config, SpeculativeConfig
from common.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from worker import dtype as dtypes
from worker.batch import ScheduledBatch
from worker.dtype import resolve_dtype
from worker.forward_context import get_forward_context
from worker.model_config import SUPPORTED_ARCHITECTURES, ModelConfig, ModelError
from worker.model_runner import ModelRunner, kv_block_bytes, support_model_arch_dict
from worker.numerics import numerics_digest
from worker.sequence import Sequence


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2, dtype="bfloat16")


def make_runner(
    folder: Path, dtype: str = "float32", max_model_len: int = 512, kv_cache_dtype: str = "auto"
) -> ModelRunner:
    config = Config(model=str(folder), dtype=dtype, max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype)
    return ModelRunner(config, ModelConfig.from_folder(folder))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    runner = make_runner(folder)
    runner.allocate_kv_cache(32)
    return runner


def sequence(
    tokens: list[int], blocks: list[int], computed: int = 0, temperature: float = 0.0, seed: int = 0
) -> Sequence:
    seq = Sequence(tokens, 16, SamplingParams(temperature=temperature), seed=seed)
    seq.block_table = blocks
    seq.num_computed_tokens = computed
    return seq


def batch_of(*work: tuple[Sequence, int]) -> ScheduledBatch:
    return ScheduledBatch({seq.id: seq for seq, _ in work}, [n for _, n in work], sum(n for _, n in work))


def test_every_supported_architecture_has_a_class() -> None:
    assert set(support_model_arch_dict) == set(SUPPORTED_ARCHITECTURES)


def test_only_final_rows_are_sampled(runner: ModelRunner) -> None:
    chunk = sequence(list(range(40)), [0, 1, 2])
    final = sequence(list(range(20)), [3, 4])
    output = runner.forward(batch_of((chunk, 30), (final, 20)))
    assert output.req_ids == [final.id]
    assert len(output.token_ids[final.id]) == 1
    assert runner.forward(batch_of((chunk, 30))).token_ids == {}


def test_sampling_follows_seed_and_position_not_batch(runner: ModelRunner) -> None:
    tokens = list(range(50, 90))
    seqs = [sequence(tokens, [4 * i + j for j in range(3)], temperature=1.0, seed=i) for i in range(6)]
    together = runner.forward(batch_of(*((seq, 40) for seq in seqs))).token_ids
    alone = {seq.id: runner.forward(batch_of((seq, 40))).token_ids[seq.id] for seq in reversed(seqs)}
    assert together == alone
    assert len(set(together.values())) > 1


def test_an_empty_batch_is_no_work(runner: ModelRunner) -> None:
    assert runner.forward(ScheduledBatch({}, [], 0)).token_ids == {}


def test_short_block_table_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="does not cover"):
        runner.forward(batch_of((sequence(list(range(17)), [0]), 17)))


def test_context_ends_with_the_step(runner: ModelRunner) -> None:
    runner.forward(batch_of((sequence([1], [0]), 1)))
    with pytest.raises(RuntimeError, match="no forward pass"):
        get_forward_context()


def test_probe_and_warmup_leave_the_pool_alone(runner: ModelRunner) -> None:
    before = runner._kv_cache.data.clone()
    runner.warmup()
    numerics_digest(runner)
    assert torch.equal(runner._kv_cache.data, before)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "itemsize"),
    [
        ("float32", "auto", 4),
        ("bfloat16", "auto", 2),
        ("float32", "float16", 2),
        ("float32", "fp8", 1),
        ("bfloat16", "fp8", 1),
    ],
)
def test_block_bytes_are_what_a_block_takes(folder: Path, dtype: str, kv_cache_dtype: str, itemsize: int) -> None:
    runner = make_runner(folder, dtype, kv_cache_dtype=kv_cache_dtype)
    runner.allocate_kv_cache(10)
    size = kv_block_bytes(runner.model_config, runner.config)
    assert runner._kv_cache.data[:, :, :10].nbytes == 10 * size
    assert runner.num_blocks_for(10 * size + size - 1) == 10
    values_per_token = 2 * 2 * 2 * 24
    assert size == values_per_token * 16 * itemsize


# How far logits may be from those of a float32 cache, as a share of their size: a few times the rounding of one number
# (2**-9, 2**-12, 2**-4), which random weights enlarge.
KV_ERROR = {"bfloat16": 2**-6, "float16": 2**-9, "fp8": 2**-2}


@pytest.mark.parametrize("kv_cache_dtype", KV_ERROR)
def test_a_narrow_kv_cache_costs_what_its_rounding_does(folder: Path, kv_cache_dtype: str) -> None:
    tokens = list(range(5, 305))
    results = []
    for name in ("auto", kv_cache_dtype):
        runner = make_runner(folder, kv_cache_dtype=name)
        runner.allocate_kv_cache(20)
        blocks = list(range(19))
        logits = [runner.run_model(runner.prepare_model(batch_of((sequence(tokens[:290], blocks), 290))))]
        for length in range(291, 301):
            seq = sequence(tokens[:length], blocks, computed=length - 1)
            logits.append(runner.run_model(runner.prepare_model(batch_of((seq, 1)))))
        results.append(torch.cat(logits))
    exact, narrow = results
    errors = (narrow - exact).norm(dim=1) / exact.norm(dim=1)
    assert (errors > 0).all()
    assert (errors < KV_ERROR[kv_cache_dtype]).all()


def test_ids_beyond_the_tokenizer_are_masked(tmp_path: Path) -> None:
    from tests.checkpoints import write_tokenizer

    make_checkpoint(tmp_path, num_hidden_layers=1, tokenizer=False)
    write_tokenizer(tmp_path, 300)
    runner = make_runner(tmp_path)
    runner.allocate_kv_cache(4)
    logits = runner.run_model(runner.prepare_model(batch_of((sequence([5, 6], [0]), 2))))
    assert logits.shape == (1, 384)
    assert torch.isinf(logits[:, 300:]).all()
    assert torch.isfinite(logits[:, :300]).all()


def test_progress_reaches_the_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = Config(model=str(folder), dtype="float32")
    ModelRunner(config, ModelConfig.from_folder(folder), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_bad_names_are_one_line(folder: Path) -> None:
    model_config = ModelConfig.from_folder(folder)
    with pytest.raises(ModelError, match="speculative_config: no draft model is built yet"):
        ModelRunner(Config(model=str(folder), speculative_config=SpeculativeConfig()), model_config)
    with pytest.raises(ModelError, match="kernels 'x' is not known; choose one of: auto, torch"):
        ModelRunner(Config(model=str(folder), kernels="x"), model_config)


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_depends_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast})
    model_config = ModelConfig.from_folder(folder)
    assert resolve_dtype("auto", model_config) == expected
    assert resolve_dtype("float16", model_config) == torch.float16
    assert dtypes.AUTO == "auto"


def test_digest_is_stable_and_tells_classes_apart(folder: Path, tmp_path: Path) -> None:
    digests = [numerics_digest(make_runner(folder)) for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 16
    other = make_checkpoint(tmp_path, num_hidden_layers=2, dtype="bfloat16", seed=1)
    assert numerics_digest(make_runner(other)) != digests[0]
    assert numerics_digest(make_runner(folder, "bfloat16")) != digests[0]
    assert numerics_digest(make_runner(folder, kv_cache_dtype="fp8")) != digests[0]


@pytest.mark.parametrize("max_model_len", [2, 40, 64])
def test_digest_of_short_models(folder: Path, max_model_len: int) -> None:
    assert len(numerics_digest(make_runner(folder, max_model_len=max_model_len))) == 16
