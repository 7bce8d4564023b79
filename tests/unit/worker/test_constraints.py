"""Constrained answers of an engine: the same alone and among others, and wherever they go on."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.config import Config, SpeculativeConfig
from common.errors import InvalidFieldError
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import Tokenizer
from tests.covering import slow_but
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.core import EngineCore
from worker.engine.executor import PipelinedExecutor
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import EndReason, Sequence
from worker.engine.speculation.draft_controller import DraftController
from worker.grammars import GrammarError
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "checkpoint"
CONFIG = Config(
    model=str(DEMO),
    kernels="torch",
    num_kvcache_blocks=128,
    max_model_len=512,
    max_num_batched_tokens=64,
    enable_prefix_caching=True,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CONSTRAINTS: dict[str, Any] = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "[a-z]{3,8}(-[0-9]{2}){1,3}"},
    "grammar": {"grammar": 'start: "once" (" " word){2,6} "."\nword: /[a-z]{2,6}/'},
    "choices": {"choices": ["yes", "no", "maybe"]},
}
PROMPT = "Tell me a story."


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_of(CONFIG)


def runner_of(config: Config) -> ModelRunner:
    model_config = ModelConfig.from_folder(DEMO)
    return ModelRunner(with_special_tokens(config, model_config), model_config)


@pytest.fixture
def engine(runner: ModelRunner) -> LLMEngine:
    return engine_of(runner)


def engine_of(runner: ModelRunner, **options: Any) -> LLMEngine:
    config = replace(CONFIG, **options)
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    return LLMEngine(config, runner=runner)


def asked(**others: Any) -> list[dict[str, Any]]:
    return [{"constraint": one, "max_tokens": 60, "temperature": 0.8, **others} for one in CONSTRAINTS.values()]


def generate(engine: LLMEngine, params: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Generates answers, then ends all steps: one in flight would share the runner with the next engine."""
    answers = engine.generate([PROMPT] * len(params), params, request_ids=[f"r{i}" for i in range(len(params))])
    while engine.core.has_unfinished():
        engine.core.step()
    return answers


def test_finished_answers_satisfy_their_constraints(engine: LLMEngine) -> None:
    for temperature in (0.0, 0.8):
        schema, regex, _, choice = generate(engine, asked(temperature=temperature))
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(schema["text"]))
        assert schema["finish_reason"] == choice["finish_reason"] == "constraint"
        assert re.fullmatch(CONSTRAINTS["regex"]["regex"], regex["text"])
        assert choice["text"] in ("yes", "no", "maybe")


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_kvcache_blocks": 8, "max_model_len": 128},
    "mixed": {"scheduling_policy": "mixed"},
}
MIXTURE = [*asked(), *asked(temperature=0.0), *asked(seed=9, n=2)]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[dict[str, Any]]:
    """Answers of each request of the mixture alone."""
    answers = (engine_of(runner).generate([PROMPT], one, request_ids=[f"r{i}"]) for i, one in enumerate(MIXTURE))
    return list(itertools.chain.from_iterable(answers))


@pytest.mark.parametrize("setting", slow_but({"chunked"}, list(SETTINGS)))
def test_constrained_answer_is_equal_alone_and_batched(
    runner: ModelRunner, alone: list[dict[str, Any]], setting: str
) -> None:
    engine = engine_of(runner, **SETTINGS[setting])
    # Long ones, so that there are too few blocks for all, however long grammars take to compile.
    longest = 110 if setting == "preempted" else 30
    plain = [{"max_tokens": longest, "seed": i, "ignore_eos": True} for i in range(4)]
    found = generate(engine, [*MIXTURE, *plain])[: len(alone)]
    assert [(a["token_ids"], a["finish_reason"]) for a in found] == [
        (a["token_ids"], a["finish_reason"]) for a in alone
    ]
    if setting == "preempted":
        assert engine.core.scheduler.lifecycle.num_preemptions > 0


def test_neighbours_of_constrained_answer_are_unchanged(runner: ModelRunner) -> None:
    plain: list[dict[str, Any]] = [{"max_tokens": 40, "seed": i, "temperature": i % 2} for i in range(4)]
    expected = [answer["token_ids"] for answer in generate(engine_of(runner), plain)]
    beside = generate(engine_of(runner), [*plain, *asked()])
    assert [answer["token_ids"] for answer in beside[:4]] == expected


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constrained_answer_resumes_from_every_position(runner: ModelRunner, name: str) -> None:
    """As after a move: prompt and tokens arrive together at a fresh engine."""
    (asking,) = [one for one in asked(seed=3) if one["constraint"] is CONSTRAINTS[name]]
    engine = engine_of(runner)
    (answer,) = engine.generate([PROMPT], asking)
    params = engine.io.sampling_params(asking)
    prompt, tokens = Tokenizer.from_folder(DEMO).encode(PROMPT), answer["token_ids"]
    core = engine_of(runner).core
    seqs = [
        Sequence([*prompt, *tokens[:have]], CONFIG.kv_cache_block_size, params, num_prompt_tokens=len(prompt), seed=3)
        for have in range(len(tokens))
    ]
    core.add_group(seqs)
    ends: dict[int, EndReason | None] = {}
    while core.has_unfinished():
        ends |= {out.request_id: out.end_reason for out in core.step().outputs if out.finished}
    assert [seq.completion_token_ids for seq in seqs] == [tokens] * len(seqs)
    assert set(ends.values()) <= {EndReason.CONSTRAINT, EndReason.EOS}
    assert len(set(ends.values())) == 1


@pytest.mark.parametrize("way", ["together", "launched ahead", "beside lookup", "deferred"])
def test_constraint_complete_at_max_tokens_ends_as_complete(
    runner: ModelRunner, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token fewer ends the sequence by its length. The same holds for a sequence that arrives full."""
    answered = zip(asked(seed=3), generate(engine_of(runner), asked(seed=3)), strict=True)
    kept, whole = zip(*((params, one) for params, one in answered if one["finish_reason"] == "constraint"), strict=True)
    assert len(whole) > 2

    def engine_of_way() -> LLMEngine:
        engine = engine_of(
            runner,
            deferred_output=way in ("launched ahead", "deferred"),
            speculative_config=SpeculativeConfig(4, NGRAM, adaptive=False) if way == "beside lookup" else None,
        )
        if way == "launched ahead":
            monkeypatch.setattr(runner.sampler, "waits_for_tokens", True)
            engine.core.executor = PipelinedExecutor(runner.launch, time.monotonic)
        return engine

    prompt = Tokenizer.from_folder(DEMO).encode(PROMPT)
    for fewer, reason, end in ((0, "constraint", EndReason.CONSTRAINT), (1, "max_tokens", EndReason.LENGTH)):
        lengths = [len(one["token_ids"]) - fewer for one in whole]
        given = [{**one, "max_tokens": length} for one, length in zip(kept, lengths, strict=True)]
        engine = engine_of_way()
        answers = generate(engine, given)
        tokens = [one["token_ids"][:length] for one, length in zip(whole, lengths, strict=True)]
        assert [one["token_ids"] for one in answers] == tokens
        assert [one["finish_reason"] for one in answers] == [reason] * len(answers)
        core = engine_of_way().core
        core.add_group(
            Sequence(
                prompt + own,
                CONFIG.kv_cache_block_size,
                engine.io.sampling_params(one),
                num_prompt_tokens=len(prompt),
                seed=3,
            )
            for own, one in zip(tokens, given, strict=True)
        )
        ends = list[tuple[list[int], EndReason | None]]()
        while core.has_unfinished():
            ends += [(out.output_tokens, out.end_reason) for out in core.step().outputs]
        assert ends == [([], end)] * len(answers)


def test_constrained_steps_launched_ahead(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a mask waits for the token before it, and the rows of other sequences take their tokens on the
    device."""
    params = [*asked(), *[{"max_tokens": 30, "seed": i, "repetition_penalty": 1.2} for i in range(2)]]
    expected = [answer["token_ids"] for answer in generate(engine_of(runner), params)]
    monkeypatch.setattr(runner.sampler, "waits_for_tokens", True)
    engine = engine_of(runner, deferred_output=True)
    engine.core.executor = PipelinedExecutor(runner.launch, time.monotonic)
    assert [answer["token_ids"] for answer in generate(engine, params)] == expected


@pytest.mark.parametrize("n", [1, 3])
def test_no_step_is_computed_after_finished_answer(runner: ModelRunner, n: int, monkeypatch: Any) -> None:
    computed, launch = list[int](), runner.launch

    def counted(batch: ScheduledBatch) -> Any:
        computed.extend(batch.context_lens)
        return launch(batch)

    monkeypatch.setattr(runner, "launch", counted)
    for constraint in CONSTRAINTS.values():
        computed.clear()
        params = {"constraint": constraint, "max_tokens": 200, "temperature": 0.8, "seed": 3, "n": n, "num_drafts": 0}
        answers = engine_of(runner).generate([PROMPT], params)
        # No step computes the last token of the longest answer.
        prompt = len(Tokenizer.from_folder(DEMO).encode(PROMPT))
        assert {answer["finish_reason"] for answer in answers} <= {"constraint", "eos"}
        if any(answer["finish_reason"] == "constraint" for answer in answers):
            longest = max(len(answer["token_ids"]) for answer in answers)
            assert max(computed) == prompt + longest - 1


def test_unconstrained_rows_do_no_constraint_work(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: masks that are made and applied, tokens that grammars are given, searches for forced text."""
    masks, sampling = runner.sampler._grammars, runner.sampler._sampling
    assert masks is not None
    calls, confined, steps = list[tuple[str, int]](), set[int](), list[tuple[int, int]]()

    def watch(name: str) -> None:
        original = getattr(masks, name)

        def watched(history: Any, *others: Any) -> Any:
            calls.append((name, history.seq_id))
            return original(history, *others)

        monkeypatch.setattr(masks, name, watched)

    for name in ("_fill", "completes", "forced"):
        watch(name)
    sample, confine = sampling.sample, masks.confined

    def made_of(histories: Any) -> Any:
        calls.append(("confined", -1))
        return confine(histories)

    def sampled(logits: Any, params: Any, seeds: Any, **others: Any) -> Any:
        rows = [] if params.confined is None else params.confined.rows
        confined.update(seeds[rows].tolist())
        steps.append((len(seeds), len(rows)))
        return sample(logits, params, seeds=seeds, **others)

    monkeypatch.setattr(sampling, "sample", sampled)
    monkeypatch.setattr(masks, "confined", made_of)
    plain = [{"max_tokens": 20, "seed": 50 + i, "ignore_eos": True, "temperature": 0.8} for i in range(3)]
    penalized = [{**plain[0], "seed": 60, "repetition_penalty": 1.3}]
    # Seeds of constrained answers are below 50.
    params = [{**one, "seed": i, "num_drafts": 0} for i, one in enumerate(asked())] + plain + penalized
    engine = engine_of(runner)
    assert runner.grammars is not None
    for one in params[:4]:
        # Plain answers are over soon: constrained ones that wait for their grammars would have no step with them.
        runner.grammars.begin(engine.io.sampling_params(one).grammar).result()
    add, constrained = engine.core.add_group, set[int]()

    def added(seqs: Any) -> None:
        group = list(seqs)
        constrained.update(seq.id for seq in group if seq.sampling_params.grammar)
        add(group)

    monkeypatch.setattr(engine.core, "add_group", added)
    answers = generate(engine, params)
    assert confined == set(range(4))
    assert {seq_id for name, seq_id in calls if name != "confined"} == constrained
    assert any(0 < masked < rows for rows, masked in steps)
    made, tokens = Counter(name for name, _ in calls), sum(len(answer["token_ids"]) for answer in answers[:4])
    # One mask and one grammar step for each token; without drafts the grammar searches no text.
    assert made["_fill"] == sum(masked for _, masked in steps) == tokens
    assert made["completes"] == tokens
    assert made["forced"] == 0
    # A batch without any constraint never comes near grammars.
    calls.clear()
    generate(engine_of(runner), plain)
    assert calls == []


def test_constraint_without_allowed_token_ends_alone(engine: LLMEngine) -> None:
    fails = {"constraint": {"regex": "[ab]{40}"}, "allowed_token_ids": (5, 6), "max_tokens": 50}
    failed, other = generate(engine, [fails, asked()[0]])
    assert (failed["finish_reason"], other["finish_reason"]) == ("constraint_failed", "constraint")
    outputs = list[RequestOutput]()
    seq = Sequence([1, 2], 16, engine.io.sampling_params(fails), stream_callback=outputs.append)
    engine.core.add_request(seq)
    while engine.core.has_unfinished():
        engine.core.step()
    end = outputs[-1].end
    assert end is not None
    assert end.reason is EndReason.CONSTRAINT_FAILED
    assert "leave no token" in end.message
    assert engine.core.scheduler.postprocessor.num_nan_rows == 0


PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "format": "date"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 16}, "city": {"enum": ["Berlin", "Hamburg"]}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "date_of_birth", "address", "is_member"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", slow_but({0.8}, [0.0, 0.8]))
def test_grammar_forced_text_takes_fewer_steps_with_same_tokens(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    constraints = [*CONSTRAINTS.values(), {"json_schema": PERSON}]
    params = [{"constraint": one, "max_tokens": 150, "temperature": temperature, "logprobs": 2} for one in constraints]
    names = ("token_ids", "logprobs", "finish_reason")

    def answered(engine: LLMEngine, asked: list[dict[str, Any]]) -> list[list[Any]]:
        return [[answer[name] for name in names] for answer in generate(engine, asked)]

    # On a busy machine drafts may not pay.
    monkeypatch.setattr(DraftController, "choose", lambda _self, drafts, *_others: dict(drafts))
    engine = engine_of(runner)
    found, stats = answered(engine, params), engine.core.scheduler.forced_stats
    assert engine.core.scheduler.spec_stats.total_draft_tokens == 0
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens
    without = engine_of(runner)
    assert answered(without, [{**one, "num_drafts": 0} for one in params]) == found
    assert without.core.scheduler.forced_stats.total_draft_tokens == 0
    # Three quarters of the tokens of such an object are text that its schema forces.
    alone = engine_of(runner)
    (person,) = alone.generate([PROMPT], params[-1:], request_ids=[f"r{len(params) - 1}"])
    assert [person[name] for name in names] == found[-1]
    assert alone.core.num_steps < 0.6 * len(person["token_ids"])
    # As on a GPU: the forced text is proposed before the tokens before it arrive.
    monkeypatch.setattr(runner.sampler, "waits_for_tokens", True)
    ahead = engine_of(runner, deferred_output=True)
    ahead.core.executor = PipelinedExecutor(runner.launch, time.monotonic)
    assert answered(ahead, params) == found
    assert ahead.core.scheduler.forced_stats.total_accepted_tokens > 0


def test_forced_text_and_drafts_work_together(runner: ModelRunner) -> None:
    params = [*asked(), *asked(temperature=0.0, num_drafts=2)]
    expected = [answer["token_ids"] for answer in generate(engine_of(runner), params)]
    spec = SpeculativeConfig(6, NGRAM, prompt_lookup_min=1, adaptive=False)
    engine = engine_of(runner, speculative_config=spec)
    assert [answer["token_ids"] for answer in generate(engine, params)] == expected
    assert engine.core.scheduler.spec_stats.total_accepted_tokens > 0
    assert engine.core.scheduler.forced_stats.total_accepted_tokens > 0


class Compiling:
    """Grammars that are compiled when a test says so."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}

    def begin(self, text: str, salt: bytes = b"") -> Future[Any]:
        return self.futures.setdefault(text, Future())


def test_grammar_compilation_delays_only_its_sequence(runner: ModelRunner) -> None:
    runner.allocate_kv_cache(128)
    grammars = Compiling()
    core = EngineCore(CONFIG, runner, grammars=grammars)
    text = '%llguidance {"no_forcing": true}\nstart: "ab"\n'
    waits, bad = (Sequence([5, 6], 16, SamplingParams(max_tokens=3, grammar=g)) for g in (text, "bad"))
    plain = Sequence([5, 6], 16, SamplingParams(max_tokens=3))
    core.add_group([waits, bad, plain])
    ended = [out.request_id for _ in range(6) for out in core.step().outputs if out.finished]
    assert ended == [plain.id]
    core.scheduler.check_integrity()
    grammars.futures["bad"].set_exception(GrammarError("the grammar does not compile: so"))
    (output,) = core.step().outputs
    assert output.end is not None
    assert (output.request_id, output.end.reason) == (bad.id, EndReason.CONSTRAINT_FAILED)
    assert output.end.message == "the grammar does not compile: so"
    grammars.futures[text].set_result(None)
    reasons = [out.end_reason for _ in range(6) for out in core.step().outputs if out.finished]
    assert reasons == [EndReason.CONSTRAINT]
    # One that is cancelled while it waits, and one whose deadline passes.
    for change in ("abort", "deadline"):
        grammars.futures.clear()
        seq = Sequence([5, 6], 16, SamplingParams(max_tokens=3, grammar=text), deadline=time.monotonic() - 1)
        if change == "abort":
            seq.deadline = None
        core.add_request(seq)
        if change == "abort":
            core.abort(seq.id)
        assert [out.request_id for out in core.step().outputs if out.finished] == [seq.id]
        assert not core.has_unfinished()


def test_engine_without_grammars_refuses_constraints(tmp_path: Path, runner: ModelRunner) -> None:
    without = runner_of(replace(CONFIG, enable_constraints=False))
    assert without.grammars is None
    engine = engine_of(without)
    with pytest.raises(InvalidFieldError, match=r"sampling_params\.constraint cannot be served"):
        engine.generate([PROMPT], asked()[0])
    seq = Sequence([1], 16, SamplingParams(grammar='start: "x"'))
    for add in (engine.core.validate, engine.core.add_request, lambda one: engine.core.add_group([one])):
        with pytest.raises(InvalidFieldError, match=r"params\.grammar is set"):
            add(seq)
    assert not engine.core.has_unfinished()
    assert runner.grammars is not None
