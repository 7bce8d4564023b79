"""Logits that are NaN or infinite: refused when a model starts; at run time they end the sequence that has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from common.cli.core.errors import CommandError
from common.config import Config
from common.params.sampling_params import SamplingParams
from common.telemetry.tracing import setup_tracing
from common.wire.block_hash import GRANULE_BLOCKS
from kernels.no_token import NO_TOKEN
from kernels.select import CPU_BACKENDS
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from tests.unit.worker.engine.test_deferred import land, launch, scheduler
from tests.unit.worker.engine.test_deferred import prompt as prompt_of
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.core import EngineCore
from worker.engine.sequence import EndReason, Sequence
from worker.engine.turns import EngineTurns, Submit
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest
from worker.server import WorkerOptions, run_worker
from worker.session.request_trace import RequestTrace
from worker.session.sequence_span import sequence_span
from worker.simulation.runner import SimulatedRunner

pytestmark = pytest.mark.each_value

GREEDY: Final = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
DRAWN: Final = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 12, "ignore_eos": True}
PENALIZED: Final = {**DRAWN, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 3}


def spoiled(folder: Path, to: Path, name: str, rows: slice | int, value: float = float("nan")) -> Path:
    """A copy of a checkpoint of one file, with some rows of a tensor set to a value."""
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name][rows] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2, tie_word_embeddings=False)


def engine(folder: Path, kernels: str, **options: Any) -> LLMEngine:
    config = Config(
        model=str(folder), kernels=kernels, num_kvcache_blocks=64, max_model_len=256, enable_prefix_caching=True
    )
    return LLMEngine(replace(config, **options))


PROMPTS: Final = [list(range(20, 60)), list(range(70, 90)), [5, 6, 7]]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"])
@pytest.mark.parametrize("deferred", [False, True], ids=["inline", "deferred"])
@pytest.mark.parametrize("kernels", CPU_BACKENDS)
def test_nan_answer_ends_and_others_continue(
    folder: Path, tmp_path: Path, kernels: str, deferred: bool, params: dict[str, Any]
) -> None:
    """A token whose embedding is NaN comes on the way; with deferred output the next step has begun with it."""
    backend_or_skip(kernels)
    clean = engine(folder, kernels, deferred_output=deferred)
    expected = [answer["token_ids"] for answer in clean.generate(PROMPTS, params)]
    elsewhere = {token for ids in [*PROMPTS, *expected[1:]] for token in ids}
    at, bad = next((i, t) for i, t in enumerate(expected[0]) if t not in elsewhere and t not in expected[0][:i])
    broken = engine(
        spoiled(folder, tmp_path / "bad", "model.embed_tokens.weight", bad), kernels, deferred_output=deferred
    )
    answers = broken.generate(PROMPTS, params)
    assert [answer["token_ids"] for answer in answers] == [expected[0][: at + 1], *expected[1:]]
    assert [answer["finish_reason"] for answer in answers] == ["not_a_number", "max_tokens", "max_tokens"]
    assert broken.core.scheduler.postprocessor.num_nan_rows == 1
    broken.core.scheduler.check_integrity()


def test_blocks_of_nan_step_are_not_shared(folder: Path, tmp_path: Path) -> None:
    """Blocks of a step with a NaN output are in no cache."""
    bad = engine(spoiled(folder, tmp_path / "bad", "model.embed_tokens.weight", 9), "torch")
    answers = bad.generate([[9, *range(100, 140)], list(range(100, 140))], GREEDY)
    assert [answer["finish_reason"] for answer in answers] == ["not_a_number", "max_tokens"]
    assert bad.core.scheduler.block_manager.prefixes.cached_granules() == []
    assert bad.core.scheduler.block_manager.prefixes.cached_blocks(Sequence([9, *range(100, 140)], 16)) == []
    assert len(bad.core.scheduler.block_manager.prefixes.cached_blocks(Sequence(list(range(100, 140)), 16))) == 2


def test_chunks_before_nan_are_not_shared(folder: Path, tmp_path: Path) -> None:
    """Chunks sample no token, so chunks with NaN stayed in the cache for all later sequences."""
    bad = engine(spoiled(folder, tmp_path / "bad", "model.embed_tokens.weight", 9), "torch", max_num_batched_tokens=16)
    shared = list(range(100, 132))
    ill = [*shared, 9, *range(200, 240)]
    manager = bad.core.scheduler.block_manager
    assert bad.generate([[*shared, 5]], GREEDY)[0]["finish_reason"] == "max_tokens"
    before = len(manager.hash_to_block_id)
    assert bad.generate([ill], GREEDY)[0]["finish_reason"] == "not_a_number"
    # Blocks that gave another answer stay cached.
    assert len(manager.prefixes.cached_blocks(Sequence(ill, 16))) == 2
    assert len(manager.hash_to_block_id) == before
    bad.core.scheduler.check_integrity()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_startup_probe_refuses_nan_model(folder: Path, tmp_path: Path, name: str, value: float) -> None:
    """Former fault: such a model served id 0 for ever, with status OK."""
    bad = spoiled(folder, tmp_path / "bad", name, slice(None), value)
    runner = ModelRunner(Config(model=str(bad), max_model_len=128), ModelConfig.from_folder(bad))
    with pytest.raises(ModelError, match=f"^{bad} gives no numbers: its weights or its config.json make NaN or inf"):
        numerics_digest(runner)
    good = ModelRunner(Config(model=str(folder), max_model_len=128), ModelConfig.from_folder(folder))
    assert numerics_digest(good)


class TestLanding:
    def test_nan_prompt_ends_without_token(self) -> None:
        sched = scheduler()
        bad, good = prompt_of(33), prompt_of(33, 300)
        sched.add_group([bad, good])
        land(sched, launch(sched), NO_TOKEN, 7)
        outputs = {out.request_id: out for out in sched.take_outputs()}
        assert (outputs[bad.id].end_reason, outputs[bad.id].output_tokens) == (EndReason.NOT_A_NUMBER, [])
        assert (outputs[good.id].finished, outputs[good.id].output_tokens) == (False, [7])
        assert (bad.num_tokens, bad.first_token_time, sched.postprocessor.num_nan_rows) == (33, None, 1)
        assert sched.block_manager.prefixes.cached_blocks(prompt_of(40)) == []
        assert len(sched.block_manager.prefixes.cached_blocks(prompt_of(40, 300))) == 2

    def test_eviction_of_nan_chunks_is_sent_to_routers(self) -> None:
        """Else they would go on to send what shares the prompt's beginning."""
        sched = scheduler(max_num_batched_tokens=16 * GRANULE_BLOCKS)
        manager = sched.block_manager
        manager.prefixes.watch_granules()
        bad = prompt_of(16 * GRANULE_BLOCKS + 5)
        sched.add(bad)
        land(sched, launch(sched))
        came = manager.prefixes.take_granule_changes()
        assert (len(came), came) == (1, manager.prefixes.cached_granules())
        land(sched, launch(sched), NO_TOKEN)
        assert manager.prefixes.take_granule_changes() == [~came[0]]
        assert manager.hash_to_block_id == {}
        sched.check_integrity()

    def test_holder_of_forgotten_block_continues_without_publishing(self) -> None:
        sched = scheduler(max_num_batched_tokens=16)
        manager = sched.block_manager
        bad, other = prompt_of(33), prompt_of(50)
        sched.add(bad)
        land(sched, launch(sched))
        sched.add(other)
        while not bad.is_finished:
            flight = launch(sched)
            land(sched, flight, *[NO_TOKEN] * sum(flight[0].is_final))
        assert other.num_cached_tokens == 32
        assert manager.hash_to_block_id == {}
        while not other.num_completion_tokens:
            flight = launch(sched)
            land(sched, flight, *[7] * sum(flight[0].is_final))
        assert manager.hash_to_block_id == {}

    def test_step_after_nan_is_discarded(self) -> None:
        sched = scheduler()
        bad, good = prompt_of(3), prompt_of(3, 300)
        sched.add_group([bad, good])
        first, second = launch(sched), launch(sched)
        land(sched, first, NO_TOKEN, 7)
        land(sched, second, NO_TOKEN, 8)
        outputs = sched.take_outputs()
        assert [out.request_id for out in outputs if out.finished] == [bad.id]
        assert (good.completion_token_ids, sched.postprocessor.num_nan_rows) == ([7, 8], 1)
        assert sched.block_manager.num_free_blocks == 15

    def test_preempted_sequence_can_end_while_waiting(self) -> None:
        sched = scheduler()
        seq = prompt_of(3)
        sched.add(seq)
        flight = launch(sched)
        sched.preempt(seq)
        land(sched, flight, NO_TOKEN)
        assert [out.end_reason for out in sched.take_outputs()] == [EndReason.NOT_A_NUMBER]
        assert not sched.lifecycle.live

    def test_accepted_drafts_before_nan_count(self) -> None:
        sched = scheduler(k=2)
        seq = prompt_of(3)
        sched.add(seq)
        land(sched, launch(sched), 50, drafts=[51, 52])
        land(sched, launch(sched), (51, NO_TOKEN))
        (_, last) = sched.take_outputs()
        assert (last.output_tokens, last.end_reason) == ([51], EndReason.NOT_A_NUMBER)


class Broken(SimulatedRunner):
    """A simulated model without a number for prompts that begin with 9."""

    def forward(self, batch: Any) -> Any:
        output = super().forward(batch)
        rows = zip(batch.req_ids, batch.scheduled_tokens, strict=True)
        bad = {seq_id for seq_id, tokens in rows if tokens[:1] == [9]}
        output.token_ids = {i: (NO_TOKEN,) if i in bad else tokens for i, tokens in output.token_ids.items()}
        return output


def test_nan_end_has_metric_and_log_line() -> None:
    """Neither client nor operator learned of the NaN."""
    config = Config(num_kvcache_blocks=16, max_model_len=96)
    turns = EngineTurns(EngineCore(config, Broken(50, 0, num_blocks=16), clock=lambda: 0.0), lambda: 0.0)
    seq = Sequence([9, 8], 16, SamplingParams(max_tokens=4))
    turn = turns.run([Submit(None, [seq])])
    (output,) = turn.outputs
    assert output.end is not None
    assert (output.end.reason, output.end.end_pos) == (EndReason.NOT_A_NUMBER, 2)
    assert (turn.figures.nan_rows, turn.figures.ended) == (1, {"not_a_number": 1})
    tracing = setup_tracing("test", "i")
    span = sequence_span(tracing, "", "", arrived=0.0, model="m", request_id="2a", worker_id="w")
    with capture_logs() as logs:
        RequestTrace(42, 2, span, "abc", seq.id, turns.core).note(output)
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert (line["event"], line["rid"], line["trace_id"]) == ("the model's output is not a number", "2a", "abc")


def test_masks_without_allowed_ids_give_no_token() -> None:
    """Former fault: a row without allowed ids gave id 0."""
    from kernels.torch_backend.backend import TorchBackend

    assert TorchBackend().sampling.argmax(torch.full((1, 5), -torch.inf), 5).tolist() == [NO_TOKEN]


async def test_worker_of_nan_model_exits_with_2(folder: Path, tmp_path: Path) -> None:
    """By one line that names the folder."""
    bad = spoiled(folder, tmp_path / "bad", "model.norm.weight", slice(None))
    config = Config(model=str(bad), max_model_len=128, kv_cache_memory=1 << 22, weights_cache="")
    with pytest.raises(CommandError, match=f"^{bad} gives no numbers") as raised:
        await run_worker(WorkerOptions(config, "m", port=0, worker_id="w0"))
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
