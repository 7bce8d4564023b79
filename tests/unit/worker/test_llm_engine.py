"""LLMEngine on a small random checkpoint: transformers' greedy tokens, stops on text, seeds, errors without traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import InvalidFieldError, NoTokenizerError, PromptTooLongError
from common.sampling_params import SamplingParams
from common.seed import derive_seed
from tests.checkpoints import make_checkpoint
from worker.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine_core import EngineDeadError
from worker.llm_engine import LLMEngine, default_config
from worker.simulated import SimulatedRunner

PROMPTS = [[7 + i, 300, 40 + i] * (1 + 3 * i) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generation = {"temperature": 0.5, "top_k": 40, "top_p": 0.0, "do_sample": True}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", generation=generation, num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLMEngine:
    # Blocks for two or three of the six prompts, so that sequences are preempted; 16 tokens a step, so chunks too.
    return LLMEngine(
        Config(
            model=str(folder),
            enable_prefix_caching=True,
            num_kvcache_blocks=8,
            max_model_len=96,
            max_num_batched_tokens=16,
        )
    )


@pytest.fixture(scope="module")
def greedy(engine: LLMEngine) -> list[dict[str, Any]]:
    return engine.generate(PROMPTS, GREEDY)


def simulated(folder: Path, **options: Any) -> LLMEngine:
    config = Config(model=str(folder), num_kvcache_blocks=64, enable_prefix_caching=True, **options)
    return LLMEngine(config, runner=SimulatedRunner(400, None, block_size=16, num_blocks=64))


def test_greedy_tokens_are_those_of_transformers(folder: Path, greedy: list[dict[str, Any]]) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert answer["token_ids"] == out[0, len(prompt) :].tolist()
    assert len({tuple(answer["token_ids"]) for answer in greedy}) == len(PROMPTS)


def test_alone_and_again_gives_the_same(engine: LLMEngine, greedy: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        assert engine.generate([prompt], GREEDY)[0]["token_ids"] == answer["token_ids"]
    assert engine.core.load().free_blocks == 8
    engine.core.scheduler.check_integrity()


def test_an_answer(engine: LLMEngine, greedy: list[dict[str, Any]]) -> None:
    answer = greedy[1]
    assert json.loads(json.dumps(answer)) == answer
    assert answer["finish_reason"] == "max_tokens"
    assert (answer["num_tokens_input"], answer["num_tokens_output"], answer["index"]) == (12, 12, 0)
    assert engine.io.tokenizer is not None
    assert answer["text"] == engine.io.tokenizer.decode(answer["token_ids"])
    assert 0 < answer["ttft"] < answer["latency"]
    assert answer["tpot"] == pytest.approx((answer["latency"] - answer["ttft"]) / 11)


def test_a_seed_comes_from_the_request_id(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=8, n=2, ignore_eos=True)
    answers = engine.generate(["abc", "abc"], params, request_ids=["x", "y"])
    assert [(a["request_id"], a["index"]) for a in answers] == [("x", 0), ("x", 1), ("y", 0), ("y", 1)]
    assert [a["seed"] for a in answers] == [derive_seed("x")] * 2 + [derive_seed("y")] * 2
    assert len({tuple(a["token_ids"]) for a in answers}) == 4
    again = engine.generate(["other", "abc"], params, request_ids=["z", "x"])
    assert [a["token_ids"] for a in again[2:]] == [a["token_ids"] for a in answers[:2]]


def test_defaults_come_from_the_checkpoint(engine: LLMEngine) -> None:
    params = engine.io.sampling_params(None)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 40, 1.0)  # top_p 0 is not valid: left out
    given = engine.io.sampling_params({"temperature": 0, "max_tokens": 3})
    assert (given.temperature, given.top_k, given.max_tokens) == (0.0, 40, 3)
    assert engine.io.sampling_params(GREEDY) is GREEDY
    one, two = engine.generate([[5], [6]], [GREEDY, {"max_tokens": 2, "ignore_eos": True}])
    assert (one["num_tokens_output"], two["num_tokens_output"]) == (12, 2)


class TestStopsOnText:
    def stopped(self, folder: Path, **params: Any) -> dict[str, Any]:
        engine = simulated(folder)
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=40, seed=1, **params))
        assert engine.core.load().free_blocks == 64
        return answer

    def test_text_ends_before_the_stop_string(self, folder: Path) -> None:
        whole = self.stopped(folder)
        stop = whole["text"][20:23]
        answer = self.stopped(folder, stop_strings=(stop,))
        end = whole["text"].index(stop)
        assert (answer["text"], answer["finish_reason"]) == (whole["text"][:end], "stop_string")
        assert answer["token_ids"] == whole["token_ids"][: len(answer["token_ids"])]
        assert len(answer["token_ids"]) < 40
        included = self.stopped(folder, stop_strings=(stop,), include_stop_string=True)
        assert included["text"] == whole["text"][:end] + stop

    def test_not_before_min_tokens(self, folder: Path) -> None:
        whole = self.stopped(folder)
        stop = whole["text"][3:6]
        late = self.stopped(folder, stop_strings=(stop,), min_tokens=40)
        assert late["text"].startswith(whole["text"][:8])

    def test_a_stop_token_is_not_text(self, folder: Path) -> None:
        whole = self.stopped(folder)
        token = whole["token_ids"][9]
        answer = self.stopped(folder, stop_token_ids=(token,))
        count = whole["token_ids"].index(token) + 1
        assert (answer["token_ids"], answer["finish_reason"]) == (whole["token_ids"][:count], f"stop_{token}")
        assert whole["text"].startswith(answer["text"])
        tokenizer = simulated(folder).io.tokenizer
        assert tokenizer is not None
        assert answer["text"] == tokenizer.decode(whole["token_ids"][: count - 1])


class TestErrors:
    def test_bad_input_leaves_nothing(self, folder: Path) -> None:
        engine = simulated(folder, max_model_len=64)
        for bad, error in [
            ([5, 10_000], InvalidFieldError),
            ([-1], InvalidFieldError),
            ([], InvalidFieldError),
            ([5] * 64, PromptTooLongError),
        ]:
            with pytest.raises(error, match="token_ids"):
                engine.generate([[1, 2], bad], GREEDY)
        assert not engine.core.has_unfinished()
        with pytest.raises(InvalidFieldError, match="temperature"):
            engine.generate([[1]], {"temperature": -1})
        assert engine.generate([[5] * 63], GREEDY)[0]["finish_reason"] == "max_tokens"

    def test_without_a_tokenizer_ids_still_serve(self, folder: Path, tmp_path: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        engine = simulated(tmp_path)
        (answer,) = engine.generate([[1, 2]], GREEDY)
        assert (answer["text"], answer["num_tokens_output"]) == ("", 12)
        with pytest.raises(NoTokenizerError):
            engine.generate(["text"])
        with pytest.raises(NoTokenizerError):
            engine.generate([[1]], SamplingParams(stop_strings=("x",)))

    def test_an_interrupted_call_does_not_go_on_in_the_next(self, folder: Path) -> None:
        engine = simulated(folder)
        runner = engine.core.runner
        engine.core.runner = Interrupts(3)
        with pytest.raises(EngineDeadError):
            engine.generate([[1, 2]], GREEDY)
        assert engine.core.load().free_blocks == 64
        engine = simulated(folder)
        engine.core.runner = Interrupts(3, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2]], GREEDY)
        engine.core.runner = runner
        assert engine.core.load().free_blocks == 64
        (answer,) = engine.generate([[3, 4]], GREEDY)
        assert answer["num_tokens_output"] == 12


class Interrupts:
    """A simulated runner that raises in its nth step."""

    def __init__(self, steps: int, error: type[BaseException] = RuntimeError) -> None:
        self.runner = SimulatedRunner(400, None, block_size=16)
        self.steps, self.error = steps, error

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.steps -= 1
        if self.steps == 0:
            raise self.error
        return self.runner.forward(batch)


def test_the_pool_and_the_length_come_from_the_memory(folder: Path) -> None:
    config = default_config(folder)
    assert (config.enable_prefix_caching, config.max_num_batched_tokens) == (True, 2048)
    block_bytes = 2 * 2 * 2 * 24 * 4 * 16  # K and V, layers, heads, head_dim, float32, tokens
    engine = LLMEngine(replace(config, kv_cache_memory=5 * block_bytes))
    assert (engine.config.num_kvcache_blocks, engine.config.max_model_len) == (5, 80)
    (answer,) = engine.generate(["hello"], GREEDY)
    assert answer["num_tokens_output"] == 12
