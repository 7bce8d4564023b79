"""LLMEngine on a small random checkpoint: transformers' greedy tokens, stops on text, seeds, errors without traces."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fissile.seed import derive_seed
from hypothesis import given, settings
from structlog.testing import capture_logs

from common.config import Config
from common.constraints.forms import Constraint
from common.errors import DuplicateRequestError, InvalidFieldError, NoTokenizerError, PromptTooLongError
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import Tokenizer
from tests.checkpoints import IM_END_ID, make_checkpoint, write_tokenizer
from tests.unit.common.text.continuations import TOKENIZERS, Continuation, continuations
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineDeadError
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import Sequence
from worker.llm_engine import InputOutputProcessor, LLMEngine, StreamOutput, default_config
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

PROMPTS = [[7 + i, 300, 40 + i] * (1 + 3 * i) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generation = {"temperature": 0.5, "top_k": 40, "repetition_penalty": 1.25, "top_p": 0.0, "do_sample": True}
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


def test_greedy_tokens_equal_transformers(folder: Path, engine: LLMEngine, greedy: list[dict[str, Any]]) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    # Both take the repetition penalty of the checkpoint's generation_config.json by default.
    own = engine.generate(PROMPTS, {"temperature": 0, "max_tokens": 12, "ignore_eos": True})
    for answers, changes in [(greedy, {"repetition_penalty": 1.0}), (own, {})]:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, **changes)
            assert answer["token_ids"] == out[0, len(prompt) :].tolist()
    assert [answer["token_ids"] for answer in own] != [answer["token_ids"] for answer in greedy]
    assert len({tuple(answer["token_ids"]) for answer in greedy}) == len(PROMPTS)


def test_answers_are_equal_alone_and_repeated(engine: LLMEngine, greedy: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(PROMPTS, greedy, strict=True):
        assert engine.generate([prompt], GREEDY)[0]["token_ids"] == answer["token_ids"]
    assert engine.core.load().free_blocks == 8
    engine.core.scheduler.check_integrity()


def test_answer_has_text_and_times(engine: LLMEngine, greedy: list[dict[str, Any]]) -> None:
    answer = greedy[1]
    assert json.loads(json.dumps(answer)) == answer
    assert answer["finish_reason"] == "max_tokens"
    assert (answer["num_tokens_input"], answer["num_tokens_output"], answer["index"]) == (12, 12, 0)
    assert engine.io.tokenizer is not None
    assert answer["text"] == engine.io.tokenizer.decode(answer["token_ids"])
    assert 0 < answer["ttft"] < answer["latency"]
    assert answer["tpot"] == pytest.approx((answer["latency"] - answer["ttft"]) / 11)


def test_seed_derives_from_request_id(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=8, n=2, ignore_eos=True)
    answers = engine.generate(["abc", "abc"], params, request_ids=["x", "y"])
    assert [(a["request_id"], a["index"]) for a in answers] == [("x", 0), ("x", 1), ("y", 0), ("y", 1)]
    assert [a["seed"] for a in answers] == [derive_seed("x")] * 2 + [derive_seed("y")] * 2
    assert len({tuple(a["token_ids"]) for a in answers}) == 4
    again = engine.generate(["other", "abc"], params, request_ids=["z", "x"])
    assert [a["token_ids"] for a in again[2:]] == [a["token_ids"] for a in answers[:2]]


def test_sampling_defaults_come_from_checkpoint(engine: LLMEngine) -> None:
    params = engine.io.sampling_params(None)
    # top_p 0 is not valid: left out
    assert params == SamplingParams(temperature=0.5, top_k=40, top_p=1.0, repetition_penalty=1.25)
    given = engine.io.sampling_params({"temperature": 0, "max_tokens": 3})
    assert (given.temperature, given.top_k, given.max_tokens) == (0.0, 40, 3)
    assert engine.io.sampling_params(GREEDY) is GREEDY
    one, two = engine.generate([[5], [6]], [GREEDY, {"max_tokens": 2, "ignore_eos": True}])
    assert (one["num_tokens_output"], two["num_tokens_output"]) == (12, 2)


@pytest.mark.parametrize("deferred", [False, True])
def test_answers_to_one_prompt_compute_prompt_once(
    folder: Path, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the others computes the last token, and is the answer that it is alone."""
    size, prompt = 16, [7, 300, 40] * 17
    config = Config(
        model=str(folder), num_kvcache_blocks=64, enable_prefix_caching=True, max_model_len=96, deferred_output=deferred
    )
    engine = LLMEngine(config)
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, n=5)
    runner: Any = engine.core.runner
    launch, computed = runner.launch, []

    def counted(batch: ScheduledBatch) -> Any:
        computed.append(sum(batch.num_scheduled_tokens))
        return launch(batch)

    monkeypatch.setattr(runner, "launch", counted)
    together = engine.generate([prompt], params)
    # A token more for each after the first, but the last.
    assert sum(computed) == len(prompt) + 4 * 1 + 5 * (8 - 1)
    alone = LLMEngine(config)
    for choice, answer in enumerate(together):
        seq = Sequence(prompt, size, replace(params, n=1), seed=3, choice=choice)
        alone.core.add_request(seq)
        while alone.core.has_unfinished():
            alone.core.step()
        assert seq.completion_token_ids == answer["token_ids"]
    assert len({tuple(answer["token_ids"]) for answer in together}) == 5


def test_bad_words_are_avoided(engine: LLMEngine) -> None:
    """Words of the text that comes without them; as token ids too."""
    tokenizer = engine.io.tokenizer
    assert tokenizer is not None
    plain = engine.generate([[60]], replace(GREEDY, max_tokens=40))[0]
    words = [
        text for token in plain["token_ids"] if len(text := tokenizer.decode([token]).strip()) == 1 and text.isascii()
    ]
    assert len(words) > 3
    given = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "repetition_penalty": 1, "bad_words": words}
    (answer,) = engine.generate([[60]], given)
    ids = tuple(tuple(tokenizer.encode(text)) for word in words for text in (word, f" {word}"))
    (spelled,) = engine.generate([[60]], replace(GREEDY, max_tokens=40, bad_words_token_ids=ids))
    assert answer["token_ids"] == spelled["token_ids"] != plain["token_ids"]
    assert not {*words, *(f" {word}" for word in words)} & {tokenizer.decode([token]) for token in answer["token_ids"]}


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

    def test_stop_waits_for_min_tokens(self, folder: Path) -> None:
        whole = self.stopped(folder)
        stop = whole["text"][3:6]
        late = self.stopped(folder, stop_strings=(stop,), min_tokens=40)
        assert late["text"].startswith(whole["text"][:8])

    def test_stop_token_is_not_text(self, folder: Path) -> None:
        whole = self.stopped(folder)
        token = whole["token_ids"][9]
        answer = self.stopped(folder, stop_token_ids=(token,))
        count = whole["token_ids"].index(token) + 1
        assert (answer["token_ids"], answer["finish_reason"]) == (whole["token_ids"][:count], f"stop_{token}")
        assert whole["text"].startswith(answer["text"])
        tokenizer = simulated(folder).io.tokenizer
        assert tokenizer is not None
        assert answer["text"] == tokenizer.decode(whole["token_ids"][: count - 1])


@settings(max_examples=200)
@given(asked=continuations())
def test_answer_text_continues_prompt(folder: Path, asked: Continuation) -> None:
    """The text equals Generate's, however many tokens a step returns."""
    io = InputOutputProcessor(asked.tokenizer, ModelConfig.from_folder(folder), block_size=16)
    params = SamplingParams(max_tokens=100, stop_strings=asked.stops)
    (answer,) = io.preprocess(asked.prompt, params, "id", arrive_time=0.0)
    for run in asked.runs:
        answer.take(RequestOutput(answer.seq.id, run))
    answer.take(RequestOutput(answer.seq.id, [], finished=True, finish_reason="max_tokens"))

    assert answer.text == asked.stopped


def test_text_prompt_is_continued_like_token_prompt(folder: Path) -> None:
    """Former fault: the space before the first word of an answer was lost."""
    tokenizer = TOKENIZERS["sentencepiece"]
    io = InputOutputProcessor(tokenizer, ModelConfig.from_folder(folder), block_size=16)
    first_token, *ids = tokenizer.encode("cat")
    for prompt in ("the", tokenizer.encode("the")):
        (answer,) = io.preprocess(prompt, SamplingParams(), "id", arrive_time=0.0)
        answer.take(RequestOutput(answer.seq.id, ids))
        assert answer.text == " cat"
    assert first_token in tokenizer.special_ids


class TestErrors:
    def test_invalid_prompts_leave_no_state(self, folder: Path) -> None:
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

    def test_interrupted_generate_does_not_leak_into_next_call(self, folder: Path) -> None:
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


def test_pool_and_length_follow_memory(folder: Path) -> None:
    config = default_config(folder)
    assert (config.enable_prefix_caching, config.max_num_batched_tokens) == (True, 1024)
    assert config.scheduling_policy == "mixed"
    block_bytes = 2 * 2 * 2 * 24 * 4 * 16  # K and V, layers, heads, head_dim, float32, tokens
    engine = LLMEngine(replace(config, kv_cache_memory=5 * block_bytes))
    assert (engine.config.num_kvcache_blocks, engine.config.max_model_len) == (5, 80)
    (answer,) = engine.generate(["hello"], GREEDY)
    assert answer["num_tokens_output"] == 12


def run_to_the_end(engine: LLMEngine) -> dict[tuple[str, int], dict[str, Any]]:
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    while engine.has_unfinished():
        for answer in engine.step():
            assert (answer["request_id"], answer["index"]) not in answers
            answers[answer["request_id"], answer["index"]] = answer
    return answers


class TestRequestsAndSteps:
    def test_added_requests_equal_generate(self, folder: Path) -> None:
        params = {"temperature": 1, "max_tokens": 9, "n": 2, "ignore_eos": True}
        ids = [f"r{i}" for i in range(len(PROMPTS))]
        expected = simulated(folder).generate(PROMPTS, params, request_ids=ids)
        engine, answers = simulated(folder), dict[tuple[str, int], dict[str, Any]]()
        for prompt, request_id in zip(PROMPTS, ids, strict=True):
            assert engine.add_request(prompt, params, request_id=request_id) == request_id
            answers |= {(answer["request_id"], answer["index"]): answer for answer in engine.step()}
        answers |= run_to_the_end(engine)
        assert len(answers) == len(expected)
        for wanted in expected:
            got = answers[wanted["request_id"], wanted["index"]]
            assert (got["token_ids"], got["text"]) == (wanted["token_ids"], wanted["text"])
        assert engine.core.load().free_blocks == 64
        assert engine.step() == []

    def test_deferred_output_and_mixed_steps_keep_tokens(self, folder: Path) -> None:
        params, ids = {"max_tokens": 9, "n": 2, "ignore_eos": True}, [f"r{i}" for i in range(len(PROMPTS))]
        expected = simulated(folder).generate(PROMPTS, params, request_ids=ids)
        for options in ({"deferred_output": True}, {"scheduling_policy": "mixed", "max_num_batched_tokens": 16}):
            engine = simulated(folder, **options)
            for prompt, request_id in zip(PROMPTS, ids, strict=True):
                engine.add_request(prompt, params, request_id=request_id)
            answers = run_to_the_end(engine)
            for wanted in expected:
                assert answers[wanted["request_id"], wanted["index"]]["token_ids"] == wanted["token_ids"]

    def test_streamed_parts_equal_answer(self, folder: Path) -> None:
        engine = simulated(folder)
        whole = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=40, seed=1))[0]["text"]
        parts: list[StreamOutput] = []
        params = SamplingParams(max_tokens=40, seed=1, n=2, stop_strings=(whole[20:23],))
        request_id = engine.add_request([5, 6, 7], params, stream_callback=parts.append)
        silent = engine.add_request([5, 6, 7], params)
        answers = run_to_the_end(engine)
        for index in range(2):
            mine = [part for part in parts if part.index == index]
            answer = answers[request_id, index]
            assert {part.request_id for part in mine} == {request_id}
            assert "".join(part.text for part in mine) == answer["text"] == answers[silent, index]["text"]
            assert [token for part in mine for token in part.output_tokens] == answer["token_ids"]
            assert [part.finished for part in mine] == [False] * (len(mine) - 1) + [True]
            assert [part.finish_reason for part in mine][-2:] == [None, answer["finish_reason"]]
        assert answers[request_id, 0]["finish_reason"] == "stop_string"

    def test_generate_keeps_streams_of_other_requests(self, folder: Path) -> None:
        engine, parts = simulated(folder), list[StreamOutput]()
        before = engine.add_request([1, 2], GREEDY)
        (answer,) = engine.generate([[3, 4] * 9], {"max_tokens": 20, "ignore_eos": True}, stream_callback=parts.append)
        assert "".join(part.text for part in parts) == answer["text"]
        assert run_to_the_end(engine).keys() == {(before, 0)}

    def test_ttft_and_tpot_of_each_request(self, folder: Path) -> None:
        now = [10.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        runner = SimulatedRunner(400, None, FixedCost(0.5), num_blocks=64, clock=lambda: now[0], sleep=sleep)
        config = Config(model=str(folder), num_kvcache_blocks=64)
        engine = LLMEngine(config, runner=runner, clock=lambda: now[0])
        first = engine.add_request([1, 2], {"max_tokens": 5, "ignore_eos": True})
        engine.step()
        now[0] += 0.25
        second = engine.add_request([1, 2], {"max_tokens": 2, "ignore_eos": True})
        now[0] += 0.25
        answers = run_to_the_end(engine)
        # Steps: first's prompt; a pause of 0.5; second's prompt, which first waits for; decodes.
        times = ("ttft", "tpot", "latency")
        assert [answers[first, 0][name] for name in times] == [0.5, (0.5 + 0.5 + 4 * 0.5) / 4, 3.5]
        assert [answers[second, 0][name] for name in times] == [0.75, 0.5, 1.25]

    def test_abort(self, folder: Path) -> None:
        engine, parts = simulated(folder), list[StreamOutput]()
        aborted = engine.add_request([1, 2], GREEDY, stream_callback=parts.append)
        other = engine.add_request([3, 4], GREEDY)
        engine.step()
        assert engine.abort(aborted)
        assert not engine.abort(aborted)
        answers = run_to_the_end(engine)
        assert (answers[aborted, 0]["finish_reason"], answers[aborted, 0]["num_tokens_output"]) == ("aborted", 1)
        assert parts[-1].finish_reason == "aborted"
        assert answers[other, 0]["num_tokens_output"] == 12
        assert not engine.abort("unknown")

    def test_live_request_id_is_refused(self, folder: Path) -> None:
        engine = simulated(folder)
        engine.add_request([1, 2], GREEDY, request_id="x")
        with pytest.raises(DuplicateRequestError):
            engine.add_request([1, 2], GREEDY, request_id="x")
        with pytest.raises(DuplicateRequestError):
            engine.generate([[1], [2]], GREEDY, request_ids=["y", "x"])
        with pytest.raises(DuplicateRequestError):
            engine.generate([[1], [2]], GREEDY, request_ids=["y", "y"])
        assert run_to_the_end(engine).keys() == {("x", 0)}
        engine.add_request([1, 2], GREEDY, request_id="x")

    def test_refused_request_leaves_no_state(self, folder: Path) -> None:
        engine = simulated(folder, max_model_len=64)
        for prompt in ([5] * 64, [], [10_000]):
            with pytest.raises((InvalidFieldError, PromptTooLongError)):
                engine.add_request(prompt, {"n": 3})
        assert not engine.has_unfinished()

    def test_raising_callback_ends_only_its_request(self, folder: Path) -> None:
        engine, parts = simulated(folder), list[StreamOutput]()

        def fails(part: StreamOutput) -> None:
            raise ValueError("from the callback")

        failing = engine.add_request([1, 2], GREEDY, stream_callback=fails)
        other = engine.add_request([3, 4], GREEDY, stream_callback=parts.append)
        with pytest.raises(ValueError, match="from the callback"):
            engine.step()
        answers = run_to_the_end(engine)
        assert answers[failing, 0]["finish_reason"] == "aborted"
        assert answers[other, 0]["token_ids"] == [token for part in parts for token in part.output_tokens]
        assert len(answers[other, 0]["token_ids"]) == 12
        with pytest.raises(ValueError, match="from the callback"):
            engine.generate([[1, 2], [3, 4]], GREEDY, stream_callback=fails)
        assert not engine.has_unfinished()
        assert engine.core.load().free_blocks == 64

    def test_stream_callback_may_add_and_abort_requests(self, folder: Path) -> None:
        engine = simulated(folder)

        def on_part(part: StreamOutput) -> None:
            if not part.finished:
                engine.add_request([9, 9], GREEDY, request_id="added")
                assert engine.abort(part.request_id)

        first = engine.add_request([1, 2], GREEDY, stream_callback=on_part)
        answers = run_to_the_end(engine)
        assert answers[first, 0]["finish_reason"] == "aborted"
        assert answers["added", 0]["num_tokens_output"] == 12

    def test_dead_engine_holds_no_request(self, folder: Path) -> None:
        engine = simulated(folder)
        engine.core.runner = Interrupts(2)
        engine.add_request([1, 2], GREEDY)
        engine.step()
        with pytest.raises(EngineDeadError):
            engine.step()
        assert not engine.has_unfinished()


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLMEngine, Tokenizer]:
    """A model of 400 ids whose tokenizer has 450."""
    folder = make_checkpoint(tmp_path_factory.mktemp("beyond"), "llama", vocab_size=400, num_hidden_layers=1)
    write_tokenizer(folder, 450)
    return LLMEngine(Config(model=str(folder), num_kvcache_blocks=16, max_model_len=96)), Tokenizer.from_folder(folder)


def test_token_beyond_model_vocabulary_is_refused_alone(
    beyond: tuple[LLMEngine, Tokenizer],
) -> None:
    """Former fault: a text with such a token killed the engine, and every other request in it."""
    engine, tokenizer = beyond
    engine.add_request("hello", {"max_tokens": 3})
    with pytest.raises(InvalidFieldError, match="prompt has a part that the model's tokenizer makes token 401 of"):
        engine.generate([tokenizer.decode([401])], {"max_tokens": 2})
    while engine.has_unfinished():
        finished = engine.step()
    assert finished[0]["num_tokens_output"] == 3


@pytest.mark.parametrize(
    ("prompt", "params", "path"),
    [
        ([5.5], {}, "token_ids[0]"),
        (["a"], {}, "token_ids[0]"),
        ([True], {}, "token_ids[0]"),
        ([-1], {}, "token_ids[0]"),
        ("\ud800", {}, "prompt"),
        (5, {}, "prompt"),
        (None, {}, "prompt"),
        ([5], 5, "sampling_params"),
        ([5], {"min_tokens": 3, "max_tokens": 2}, "sampling_params.min_tokens"),
        ([5], {"stop_token_ids": [400], "min_tokens": 1}, "sampling_params.stop_token_ids[0]"),
        ([5], {"stop_token_ids": [-1], "min_tokens": 1}, "sampling_params.stop_token_ids[0]"),
        ([5], {"stop_token_sequences": [[]]}, "sampling_params.stop_token_sequences[0]"),
        ([5], {"stop_token_sequences": [[1, 400]]}, "sampling_params.stop_token_sequences[0].ids[1]"),
        ([5], {"stop_token_sequences": 5}, "sampling_params.stop_token_sequences"),
        ([5], {"stop_strings": [5]}, "sampling_params.stop_strings[0]"),
        ([5], {"max_tokens": 2.5}, "sampling_params.max_tokens"),
        ([5], {"max_tokens": "3"}, "sampling_params.max_tokens"),
        ([5], {"max_tokens": None}, "sampling_params.max_tokens"),
        ([5], {"top_k": 1.5}, "sampling_params.top_k"),
        ([5], {"temperature": None}, "sampling_params.temperature"),
        ([5], {"temperature": "hot"}, "sampling_params.temperature"),
        ([5], {"ignore_eos": "no"}, "sampling_params.ignore_eos"),
        ([5], {"seed": 1.5}, "sampling_params.seed"),
        ([5], {"temprature": 1.0}, "sampling_params.temprature"),
    ],
)
def test_engine_refuses_fields_refused_by_service(
    beyond: tuple[LLMEngine, Tokenizer], prompt: Any, params: Any, path: str
) -> None:
    """Former fault: some of these requests ran, others raised undocumented errors or failed inside a step."""
    engine, _ = beyond
    with pytest.raises(InvalidFieldError) as refused:
        engine.generate([prompt], params)
    assert refused.value.violations[0].path == path
    assert engine.generate([[5]], {"max_tokens": 1})[0]["num_tokens_output"] == 1


def test_lists_of_different_length_are_refused(beyond: tuple[LLMEngine, Tokenizer]) -> None:
    """Former fault: a string was taken as a list of its characters."""
    engine, _ = beyond
    for arguments, path in [
        ({"prompts": "Tell me"}, "prompts"),
        ({"prompts": 5}, "prompts"),
        ({"prompts": None}, "prompts"),
        ({"prompts": [[5]], "sampling_params": 5}, "sampling_params"),
        ({"prompts": [[5]], "request_ids": "a"}, "request_ids"),
        ({"prompts": [[5]], "request_ids": [1]}, "request_id"),
        ({"prompts": [[5]], "request_ids": [[]]}, "request_id"),
        ({"prompts": [[5]], "request_ids": ["\ud800"]}, "request_id"),
        ({"prompts": [[5]], "sampling_params": [None, None]}, "sampling_params"),
        ({"prompts": [[5]], "request_ids": ["a", "b"]}, "request_ids"),
    ]:
        with pytest.raises(InvalidFieldError) as refused:
            engine.generate(**arguments)  # type: ignore[arg-type]
        assert refused.value.violations[0].path == path


def test_integers_of_numpy_are_integers(folder: Path, greedy: list[dict[str, Any]]) -> None:
    """Former fault: a `max_tokens` of that type was accepted, and failed inside the step of all requests."""
    engine = LLMEngine(Config(model=str(folder), num_kvcache_blocks=8, max_model_len=96))
    own, count, prompt = greedy[0]["token_ids"], np.int64(3), np.array(PROMPTS[0])
    params = {**asdict(GREEDY), "max_tokens": count, "top_k": count, "seed": np.uint64(7), "stop_token_ids": [count]}
    assert engine.generate([prompt], params)[0]["token_ids"] == own[:3]  # type: ignore[list-item]


def test_end_of_sequence_ids_of_the_config_count(folder: Path, greedy: list[dict[str, Any]]) -> None:
    """Former fault: the model's ids replaced those of the config."""
    ends = greedy[0]["token_ids"][3]
    params = replace(GREEDY, ignore_eos=False)
    for ids in ({"eos_token_id": ends}, {"stop_token_ids": (ends,)}):
        config = Config(model=str(folder), num_kvcache_blocks=8, max_model_len=96, **ids)
        answer = LLMEngine(config).generate(PROMPTS[:1], params)[0]
        assert answer["token_ids"] == greedy[0]["token_ids"][: greedy[0]["token_ids"].index(ends) + 1]
    with pytest.raises(InvalidFieldError, match="eos_token_id is"):
        LLMEngine(Config(model=str(folder), num_kvcache_blocks=8, max_model_len=96, eos_token_id=1 << 20))


def test_turn_ends_at_the_tokenizers_eos_token(tmp_path: Path) -> None:
    """A fine-tune that names its end of turn only in tokenizer_config.json continued with the next turns."""
    folder = make_checkpoint(tmp_path, num_hidden_layers=1)
    (folder / "generation_config.json").unlink()
    for name, changes in (
        ("config.json", {"eos_token_id": None}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))
    engine = LLMEngine(Config(model=str(folder), num_kvcache_blocks=8, max_model_len=64))
    biased = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {IM_END_ID: 100.0}}
    (answer,) = engine.generate([[7, 300]], biased)
    assert (answer["token_ids"], answer["finish_reason"]) == ([IM_END_ID], "eos")
    confined = SamplingParams(temperature=0.0, max_tokens=30, constraint=Constraint("regex", ("[a-c]{3}",)))
    (answer,) = engine.generate([[7, 300]], confined)
    assert re.fullmatch("[a-c]{3}", answer["text"])
    engine.close()


def test_prompt_of_scaled_rope_length_is_served(tmp_path: Path) -> None:
    """The worker refused a length that the model's card allows."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = make_checkpoint(tmp_path, num_hidden_layers=1, max_position_embeddings=80, rope_parameters=yarn)
    engine = LLMEngine(Config(model=str(folder), num_kvcache_blocks=20, max_model_len=256))
    prompt = [40 + i % 200 for i in range(240)]
    (answer,) = engine.generate([prompt], {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True})
    assert len(answer["token_ids"]) == 8
    engine.close()
    with pytest.raises(InvalidFieldError, match="at most with the model's rope scaling 256"):
        LLMEngine(Config(model=str(folder), num_kvcache_blocks=20, max_model_len=257))


def test_calibrated_scales_of_the_kv_cache_log_one_warning(tmp_path: Path) -> None:
    """Former fault: the worker served the checkpoint at scale 1, without a log line."""
    folder = make_checkpoint(tmp_path, num_hidden_layers=1)
    content = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    with capture_logs() as logs:
        LLMEngine(Config(model=str(folder), num_kvcache_blocks=8, max_model_len=64, kv_cache_dtype="fp8")).close()
    told = [line for line in logs if line["event"] == "calibrated scales of the KV cache are not used"]
    assert [(line["settings"], line["log_level"]) for line in told] == [(["kv_cache_scheme"], "warning")]
