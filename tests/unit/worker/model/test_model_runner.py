from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.config import CompilationConfig, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from kernels.cpu.instruction_sets import AUTO
from kernels.select import CPU_BACKENDS, select_backend
from kernels.torch_backend.backend import TorchBackend
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from worker.config.model_config import SUPPORTED_ARCHITECTURES, ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence, SequenceType
from worker.model.dtypes import resolve_dtype
from worker.model.forward_context import Context, get_forward_context
from worker.model.model_runner import ModelRunner, support_model_arch_dict
from worker.model.numerics import numerics_digest
from worker.model.runner_setup import warm_up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2, dtype="bfloat16")


def make_runner(
    folder: Path,
    dtype: str = "float32",
    max_model_len: int = 512,
    kv_cache_dtype: str = "auto",
    kernels: str = AUTO,
) -> ModelRunner:
    config = Config(
        model=str(folder), dtype=dtype, max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype, kernels=kernels
    )
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


@pytest.mark.parametrize("kernels", list(CPU_BACKENDS))
def test_greedy_steps_without_logits_have_equal_tokens(folder: Path, kernels: str) -> None:
    backend_or_skip(kernels)
    runner = make_runner(folder, "bfloat16", kernels=kernels)
    runner.allocate_kv_cache(8)
    seqs = [sequence(list(range(50 + 9 * i, 90)), [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(2)]
    chunk = sequence(list(range(40)), [6, 7])
    for count in (1, 2):
        batch = batch_of(*((seq, seq.num_tokens) for seq in seqs[:count]), (chunk, 16))
        assert batch.is_greedy
        by_logits = runner.postprocess(batch, runner.run_model(runner.prepare_model(batch)))
        assert runner.forward(batch).token_ids == by_logits.token_ids
        assert by_logits.req_ids == [seq.id for seq in seqs[:count]]
    warm = sequence([5, 6], [7], temperature=0.5)
    assert not batch_of((seqs[0], 1), (warm, 2)).is_greedy
    steered = Sequence([5, 6], 16, SamplingParams(temperature=0.0, min_tokens=4, max_tokens=5))
    assert not batch_of((steered, 2)).is_greedy


def test_sampling_follows_seed_and_position_not_batch(runner: ModelRunner) -> None:
    tokens = list(range(50, 90))
    seqs = [sequence(tokens, [4 * i + j for j in range(3)], temperature=1.0, seed=i) for i in range(6)]
    together = runner.forward(batch_of(*((seq, 40) for seq in seqs))).token_ids
    alone = {seq.id: runner.forward(batch_of((seq, 40))).token_ids[seq.id] for seq in reversed(seqs)}
    assert together == alone
    assert len(set(together.values())) > 1


class Watching:
    """A runner that notes of each step what its sequences compute, and what its context says."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.core = EngineCore(MIXED_CONFIG, self)
        self.steps: list[tuple[set[SequenceType], bool]] = []

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        live = {seq.id: seq for seq in self.core.scheduler.running}
        kinds = {live[seq_id].type for seq_id in batch.req_ids}
        self.steps.append((kinds, self.runner.prepare_model(batch).context.is_prefill))
        return self.runner.forward(batch)


MIXED_CONFIG = Config(num_kvcache_blocks=32, scheduling_policy="mixed", max_num_batched_tokens=24)


def run_mixed(watching: Watching) -> dict[int, list[int]]:
    """Prompts that come while others decode: one of a single token, one that is computed in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [[7], list(range(40)), [9, 8, 7], [5]]
    seqs = [Sequence(prompt, 16, params, id=i) for i, prompt in enumerate(prompts, 1)]
    streams: dict[int, list[int]] = {seq.id: [] for seq in seqs}
    while seqs or watching.core.has_unfinished():
        if seqs:
            watching.core.add_request(seqs.pop(0))
        for seq_id, tokens in watching.core.step().new_tokens.items():
            streams[seq_id] += tokens
    return streams


def test_is_prefill_means_all_rows_prefill(runner: ModelRunner) -> None:
    watching = Watching(runner)
    run_mixed(watching)
    prefill, decode = {SequenceType.PREFILL}, {SequenceType.DECODE}
    assert watching.steps[0] == (prefill, True), "a prompt of one token is a prefill"
    assert [kinds for kinds, _ in watching.steps].count(prefill | decode) > 2
    assert [kinds for kinds, _ in watching.steps].count(decode) > 0
    assert all(said == (kinds == prefill) for kinds, said in watching.steps)


def test_no_layer_and_no_kernel_branches_on_is_prefill(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_mixed(Watching(runner))

    class Plain:
        def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
            return runner.forward(batch)

    def asked(context: Context) -> bool:
        raise AssertionError("is_prefill was asked for")

    monkeypatch.setattr(Context, "is_prefill", property(asked))
    watching = Watching(runner)
    watching.core = EngineCore(MIXED_CONFIG, Plain())
    assert run_mixed(watching) == expected
    root = Path(__file__).resolve().parents[4]
    sources = [
        path
        for room in ("kernels", "worker/model/layers", "worker/model/models")
        for path in (root / room).rglob("*.py")
    ]
    assert len(sources) > 10
    assert [str(path) for path in sources if "is_prefill" in path.read_text()] == []


def test_empty_batch_gives_no_tokens(runner: ModelRunner) -> None:
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
    warm_up(runner)
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
def test_block_bytes_equal_block_size(folder: Path, dtype: str, kv_cache_dtype: str, itemsize: int) -> None:
    runner = make_runner(folder, dtype, kv_cache_dtype=kv_cache_dtype)
    runner.allocate_kv_cache(10)
    size = runner.kv_block_bytes
    assert runner._kv_cache.data[:, :, :10].nbytes == 10 * size
    values_per_token = 2 * 2 * 2 * 24
    assert size == values_per_token * 16 * itemsize


# How far logits may be from those of a float32 cache, as a share of their size: a few times the rounding of one number
# (2**-9, 2**-12, 2**-4), which random weights enlarge.
KV_ERROR = {"bfloat16": 2**-6, "float16": 2**-9, "fp8": 2**-2}


@pytest.mark.parametrize("kv_cache_dtype", KV_ERROR)
def test_narrow_kv_cache_error_is_its_rounding(folder: Path, kv_cache_dtype: str) -> None:
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


def test_unknown_option_value_error_is_one_line(folder: Path) -> None:
    model_config = ModelConfig.from_folder(folder)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM has no layers that draft \(MTP\)"):
        ModelRunner(Config(model=str(folder), speculative_config=SpeculativeConfig()), model_config)
    with pytest.raises(ModelError, match="kernels 'x' is not known; choose one of: auto, torch, cpu"):
        ModelRunner(Config(model=str(folder), kernels="x"), model_config)


class SeesItsNeighbours(ModelRunner):
    """A bit of its logits depends on how many rows a step has."""

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = super()._logits(states)
        if len(logits) > 2:
            logits.view(torch.int32)[-1, 7] ^= 1
        return logits


def test_kernels_dependent_on_row_count_verify_no_drafts(folder: Path) -> None:
    config = Config(model=str(folder), max_model_len=64, speculative_config=SpeculativeConfig(2, NGRAM))
    warm_up(ModelRunner(config, ModelConfig.from_folder(folder)))
    faulty = SeesItsNeighbours(config, ModelConfig.from_folder(folder))
    with pytest.raises(ModelError, match="several rows of a sequence have other bits than one at a time"):
        warm_up(faulty)


@pytest.mark.parametrize(("fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_of_pytorch_depends_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast})
    model_config = ModelConfig.from_folder(folder)
    kernels = select_backend("torch")
    with capture_logs() as logs:
        assert resolve_dtype("auto", model_config, kernels) == expected
    assert [line["dtype"] for line in logs] == ([] if fast else ["bfloat16"])
    assert resolve_dtype("float16", model_config, kernels) == torch.float16


def test_auto_dtype_of_native_kernels_is_checkpoint_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels widen bfloat16 in registers; float16 uses PyTorch's kernels."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    kernels = backend_or_skip("cpu")
    model_config = ModelConfig.from_folder(folder)
    assert resolve_dtype("auto", model_config, kernels) == torch.bfloat16
    assert resolve_dtype("auto", replace(model_config, dtype="float16"), kernels) == torch.float32
    runner = ModelRunner(Config(model=str(folder), kernels="cpu"), model_config)
    assert (runner.dtype, runner.kv_dtype) == (torch.bfloat16, torch.bfloat16)


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


def test_graphs_are_for_gpus(folder: Path) -> None:
    config = Config(model=str(folder), kernels="torch", compilation_config=CompilationConfig(0, (1, 2)))
    with pytest.raises(ModelError, match="cudagraph_capture_sizes: kernels torch capture no graphs; leave it empty"):
        ModelRunner(config, ModelConfig.from_folder(folder))
    eager = Config(model=str(folder), kernels="torch")
    assert not ModelRunner(eager, ModelConfig.from_folder(folder)).captures_graphs


def test_empty_token_tensor_is_on_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without sampled rows: a GPU's streams cannot use tensors on the host."""
    runner = make_runner(folder, kernels="torch")
    runner.allocate_kv_cache(8)
    nothing = runner.sampler.no_ids()
    monkeypatch.setattr(runner.sampler, "no_ids", lambda: nothing)
    chunk = Sequence(list(range(40)), 16, SamplingParams(temperature=0.5))
    chunk.block_table = [0, 1, 2]
    assert runner.forward(batch_of((chunk, 16))).token_ids == {}
    assert runner.sampler.last.ids is nothing
    monkeypatch.undo()
    monkeypatch.setattr(TorchBackend, "device", torch.device("meta"))
    assert runner.sampler.no_ids().device.type == "meta"


def test_dummy_steps_share_a_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: each dummy step made a KV pool, once per round of the other engines."""
    runner = make_runner(folder)
    runner.allocate_kv_cache(8)
    pool, made, allocate = runner._kv_cache, [], runner.kernels.kv_cache.allocate

    def counted(*given: Any) -> Any:
        made.append(given)
        return allocate(*given)

    monkeypatch.setattr(runner.kernels.kv_cache, "allocate", counted)
    for _ in range(3):
        runner.dummy_run()
    assert len(made) == 1
    assert runner._kv_cache is pool


def test_oversized_model_length_error_is_one_line(folder: Path) -> None:
    """PyTorch's allocator raised a bare RuntimeError, for lack of memory for the position tables."""
    with pytest.raises(ModelError, match=r"a length of 1000000000 tokens is beyond 16777216, .* give --max-model-len"):
        make_runner(folder, max_model_len=10**9)
