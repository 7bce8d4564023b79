"""Every bad value is refused with its code, its path and the valid range."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from functools import partial

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from common.errors import ApiError, InvalidFieldError
from common.limits import MAX_CHAT_MESSAGES, MAX_PROMPT_TEXT_BYTES
from common.params.sampling_checks import float32
from common.params.sampling_params import SamplingParams, model_defaults
from router import validation
from router.validation import (
    check_chat,
    check_generate,
    check_prompt_length,
    check_request_id,
    check_token_ids,
    clip_to_length,
    sampling_params,
    template_arguments,
)

VOCAB = 300


def params(**fields: object) -> SamplingParams:
    return sampling_params(pb.SamplingParams(**fields), SamplingParams(), VOCAB)  # type: ignore[arg-type]


def refused(code: str, path: str, act: Callable[[], object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        act()
    error = caught.value
    assert error.code.name == code
    assert error.violations[0].path == path
    assert error.violations[0].valid
    return error


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": -0.5}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.5}),
        ("min_p", {"min_p": -1.0}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": math.nan}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -math.inf}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 65, "max_tokens": 64}),
        ("n", {"n": 0}),
        ("stop_strings", {"stop_strings": ["x"] * 17}),
        ("stop_strings[1]", {"stop_strings": ["x", ""]}),
        ("stop_strings[0]", {"stop_strings": ["x" * 257]}),
        ("stop_token_ids", {"stop_token_ids": [1] * 65}),
        ("stop_token_ids[1]", {"stop_token_ids": [1, VOCAB]}),
        ("stop_token_sequences[0].ids", {"stop_token_sequences": [pb.TokenIds()]}),
        ("stop_token_sequences[0].ids", {"stop_token_sequences": [pb.TokenIds(ids=[1] * 65)]}),
        ("stop_token_sequences[1].ids[0]", {"stop_token_sequences": [pb.TokenIds(ids=[1]), pb.TokenIds(ids=[999])]}),
        ("stop_token_sequences", {"stop_token_sequences": [pb.TokenIds(ids=[1])] * 17}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("logit_bias[7]", {"logit_bias": {7: 100.5}}),
        ("logit_bias[7]", {"logit_bias": {7: math.nan}}),
        ("logit_bias[7]", {"logit_bias": {7: -math.inf}}),
        (f"logit_bias[{VOCAB}]", {"logit_bias": {VOCAB: 1.0}}),
        ("bad_words", {"bad_words": ["x"] * 65}),
        ("bad_words[1]", {"bad_words": ["x", ""]}),
        ("bad_words[0]", {"bad_words": ["é" * 129]}),
        ("allowed_token_ids", {"allowed_token_ids": [1] * 4097}),
        ("allowed_token_ids[1]", {"allowed_token_ids": [1, VOCAB]}),
    ],
)
def test_bad_sampling_params(path: str, fields: dict[str, object]) -> None:
    refused("INVALID_ARGUMENT", f"sampling_params.{path}", lambda: params(**fields))


def test_masks_and_biases_are_canonical() -> None:
    given = params(logit_bias={9: 0.1, 2: -100.0}, allowed_token_ids=[5, 1], bad_words=["a", "é" * 128])
    assert given.logit_bias == ((2, -100.0), (9, float32(0.1)))
    assert (given.allowed_token_ids, given.bad_words) == ((5, 1), ("a", "é" * 128))
    assert given.steers
    assert not params().steers
    assert SamplingParams(logit_bias={1: 0.5}) == SamplingParams(logit_bias=((1, 0.5),))


def test_several_answers() -> None:
    assert [params(n=n).n for n in (1, 64)] == [1, 64]
    refused("INVALID_ARGUMENT", "sampling_params.n", lambda: params(n=0))
    refused("INVALID_ARGUMENT", "sampling_params.n", lambda: params(n=65))


def test_penalties_are_canonical() -> None:
    given = params(repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.7)
    penalties = (given.repetition_penalty, given.presence_penalty, given.frequency_penalty)
    assert penalties == (float32(1.1), float32(-0.3), float32(0.7))
    assert given.penalized
    assert not params(repetition_penalty=1.0, presence_penalty=0.0).penalized
    assert params() == params(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def test_absent_sampling_values_use_model_defaults() -> None:
    own = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    defaults = model_defaults({**own, "do_sample": False, "max_new_tokens": 7, "presence_penalty": 1.0})
    absent = sampling_params(pb.SamplingParams(), defaults, VOCAB)
    assert absent == SamplingParams(**own)  # type: ignore[arg-type]
    assert absent == sampling_params(pb.SamplingParams(**own), defaults, VOCAB)  # type: ignore[arg-type]
    given = sampling_params(pb.SamplingParams(**neutral), defaults, VOCAB)  # type: ignore[arg-type]
    assert given == SamplingParams()


@settings(max_examples=200)
@given(
    prompt=st.integers(1, 200), length=st.integers(2, 200), most=st.integers(1, 2**32 - 1), fewest=st.integers(0, 50)
)
def test_clip_leaves_room_for_at_least_one_token(prompt: int, length: int, most: int, fewest: int) -> None:
    if prompt >= length:
        refused("OUT_OF_RANGE", "text", lambda: check_prompt_length("text", prompt, length))
        return
    check_prompt_length("text", prompt, length)
    clipped = clip_to_length(SamplingParams(max_tokens=most, min_tokens=min(fewest, most)), prompt, length)
    assert 1 <= clipped.max_tokens == min(most, length - prompt)
    assert clipped.min_tokens <= clipped.max_tokens


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("prompt", pb.GenerateRequest()),
        ("text", pb.GenerateRequest(text="")),
        ("token_ids.ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
        ("priority", pb.GenerateRequest(text="x", priority=9)),  # type: ignore[arg-type]
    ],
)
def test_bad_generate(path: str, request_: pb.GenerateRequest) -> None:
    refused("INVALID_ARGUMENT", path, lambda: check_generate(request_))


def message(role: str = "user", content: str = "x") -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content)


@pytest.mark.parametrize(
    ("code", "path", "messages"),
    [
        ("INVALID_ARGUMENT", "messages", []),
        ("INVALID_ARGUMENT", "messages", [message()] * (MAX_CHAT_MESSAGES + 1)),
        ("INVALID_ARGUMENT", "messages[1].role", [message(), message(role="")]),
        ("OUT_OF_RANGE", "messages", [message(content="é" * (MAX_PROMPT_TEXT_BYTES // 4))] * 3),
    ],
)
def test_bad_chat(code: str, path: str, messages: list[pb.ChatMessage]) -> None:
    refused(code, path, lambda: check_chat(pb.ChatRequest(messages=messages)))


def test_text_is_measured_in_bytes_before_it_is_tokenized() -> None:
    text = "é" * (MAX_PROMPT_TEXT_BYTES // 2)
    check_generate(pb.GenerateRequest(text=text))
    refused("OUT_OF_RANGE", "text", lambda: check_generate(pb.GenerateRequest(text=text + "e")))


def test_request_id_is_measured_in_bytes() -> None:
    check_request_id("é" * 64)
    refused("INVALID_ARGUMENT", "request_id", lambda: check_request_id("é" * 65))


@pytest.mark.parametrize("priority", pb.Priority.values())
def test_every_priority_is_accepted(priority: pb.Priority.ValueType) -> None:
    check_generate(pb.GenerateRequest(text="x", priority=priority))


def test_cache_salt_is_measured_in_bytes() -> None:
    check_generate(pb.GenerateRequest(text="x", cache_salt="é" * 64))
    refused("INVALID_ARGUMENT", "cache_salt", lambda: check_generate(pb.GenerateRequest(text="x", cache_salt="é" * 65)))
    chat = pb.ChatRequest(messages=[message()], cache_salt="e" * 129)
    refused("INVALID_ARGUMENT", "cache_salt", lambda: check_chat(chat))


@pytest.mark.parametrize("count", [1, validation._FEW_IDS, validation._FEW_IDS + 1])
def test_token_ids_of_few_and_of_many_are_checked_alike(count: int) -> None:
    ids = [VOCAB - 1] * count
    check_token_ids("ids", ids, VOCAB)
    refused("INVALID_ARGUMENT", f"ids[{count - 1}]", lambda: check_token_ids("ids", [*ids[1:], VOCAB], VOCAB))


def test_token_ids() -> None:
    check_token_ids("token_ids.ids", [0, VOCAB - 1], VOCAB)
    error = refused("INVALID_ARGUMENT", "ids[2]", lambda: check_token_ids("ids", [0, 5, VOCAB, 2**32 - 1], VOCAB))
    assert "from 0 to 299" in str(error)


def test_template_arguments() -> None:
    assert template_arguments(pb.ChatRequest()) == {}
    request = pb.ChatRequest(template_arguments_json='{"k": 3, "x": 1.0, "deep": {"b": [1, null, true], "a": 0}}')
    # Keys keep their order, and integers stay distinct from floats: a template prints both.
    assert repr(template_arguments(request)) == "{'k': 3, 'x': 1.0, 'deep': {'b': [1, None, True], 'a': 0}}"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"messages": 1}', "template_arguments_json.messages"),
        ('{"continue_final_message": true}', "template_arguments_json.continue_final_message"),
        ('{"x": NaN}', "template_arguments_json"),
        ('{"x": 1, "x": 2}', "template_arguments_json"),
        ("[1]", "template_arguments_json"),
        ("{", "template_arguments_json"),
        ('{"x": ' + "[" * 100_000, "template_arguments_json"),
    ],
)
def test_invalid_template_arguments_are_refused(text: str, path: str) -> None:
    request = pb.ChatRequest(template_arguments_json=text)
    refused("INVALID_ARGUMENT", path, lambda: template_arguments(request))


def test_parameters_of_apply_chat_template_are_refused() -> None:
    """Regression: the router accepted `continue_final_message` and ignored it."""
    known = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    for name in known - {"tools", "documents", "add_generation_prompt"}:
        request = pb.ChatRequest(template_arguments_json=json.dumps({name: True}))
        refused("INVALID_ARGUMENT", f"template_arguments_json.{name}", partial(template_arguments, request))


def test_codes_are_grpc_codes() -> None:
    assert InvalidFieldError("a", "b", "c").code is grpc.StatusCode.INVALID_ARGUMENT


def test_every_part_of_a_message_counts() -> None:
    """Regression: a role of 4 MB was not counted."""
    part = "x" * (MAX_PROMPT_TEXT_BYTES // 2)
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role=part, content=part)])
    refused("OUT_OF_RANGE", "messages", lambda: check_chat(chat))
