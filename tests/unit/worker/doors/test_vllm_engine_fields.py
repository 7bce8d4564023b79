"""Field table of `vllm.grpc.engine`: every field is served or refused by name, and messages add up to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.errors import ApiError, InvalidFieldError, UnservedFieldError
from common.params.sampling_params import SamplingParams
from common.rpc.unsupported_fields import field_paths
from common.wire.logprob_rows import TokenLogprobs
from worker.doors.door_request import DoorFinish, DoorOutput, DoorPrompt, FinishKind
from worker.doors.vllm_engine_fields import DOOR, GENERATE, AnswerMessages, door_request, embedding_request

# What smg sends beside the fields that a client gave.
SMG = {"top_p": 1.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "n": 1}
CHOICE = pb.ChoiceConstraint(choices=["yes", "no"])
# A value of every field of SamplingParams, and our parameter of it; None for those without one.
VALUES: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (7, {"top_k": 7}),
    "min_p": (0.25, {"min_p": 0.25}),
    "frequency_penalty": (1.5, {"frequency_penalty": 1.5}),
    "presence_penalty": (-1.5, {"presence_penalty": -1.5}),
    "repetition_penalty": (2.0, {"repetition_penalty": 2.0}),
    "max_tokens": (9, {"max_tokens": 9}),
    "min_tokens": (3, {"min_tokens": 3}),
    "stop": (["END", "."], {"stop_strings": ("END", ".")}),
    "stop_token_ids": ([4, 5], {"stop_token_ids": (4, 5)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "n": (3, {"n": 3}),
    "logprobs": (2, {"logprobs": 2}),
    "prompt_logprobs": (0, {"prompt_logprobs": 0}),
    "seed": (0, {"seed": 0}),
    "include_stop_str_in_output": (True, {"include_stop_string": True}),
    "logit_bias": ({6: 1.5}, {"logit_bias": {6: 1.5}}),
    "json_schema": ("{}", {"constraint": {"json_schema": "{}"}}),
    "regex": ("a+", {"constraint": {"regex": "a+"}}),
    "grammar": ('start: "a"', {"constraint": {"grammar": 'start: "a"'}}),
    "json_object": (True, {"constraint": {"json_object": True}}),
    "choice": (CHOICE, {"constraint": {"choices": ("yes", "no")}}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (True, {}),
    "grammar_from_first_token": (True, {}),
}


def asked(**given: Any) -> pb.GenerateRequest:
    """A request as smg writes it, with some fields of SamplingParams."""
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(original_text="hi", input_ids=[1, 2]),
        sampling_params=pb.SamplingParams(**{**SMG, **given}),
    )


def refused(request: pb.GenerateRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        door_request(request)
    return caught.value


@pytest.mark.parametrize("name", VALUES)
def test_field_reaches_its_parameter(name: str) -> None:
    value, ours = VALUES[name]
    made = door_request(asked(**{name: value}))
    assert {key: made.params[key] for key in ours} == ours
    assert (list(made.prompt), made.request_id) == ([1, 2], "r")
    params = SamplingParams(**{"max_tokens": 64, **made.params})
    assert params.top_p == (0.5 if name == "top_p" else 1.0)


def test_every_field_of_sampling_is_tried_or_refused() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names - set(VALUES) == {"structural_tag", "truncate_prompt_tokens"}


def test_absent_optionals_are_left_to_the_model() -> None:
    absent = {"temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed", "constraint"}
    assert absent.isdisjoint(door_request(asked()).params)
    bare = pb.GenerateRequest(text="hello")
    assert (door_request(bare).prompt, door_request(bare).params) == ("hello", {})


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty", "n"])
def test_zero_is_a_given_value(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        SamplingParams(**door_request(asked(**{name: 0})).params)
    assert DOOR.renamed(caught.value).violations[0].path == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sampling_params.stop_strings[1]", "sampling_params.stop[1]"),
        ("sampling_params.constraint.choices.texts", "sampling_params.choice.choices"),
        ("sampling_params.constraint.regex", "sampling_params.regex"),
        ("sampling_params.include_stop_string", "sampling_params.include_stop_str_in_output"),
        ("token_ids[3]", "tokenized.input_ids[3]"),
    ],
)
def test_errors_name_the_peers_field(ours: str, theirs: str) -> None:
    assert DOOR.renamed(InvalidFieldError(ours, "is bad", "good")).violations[0].path == theirs


def _set(message: Any, path: str) -> None:
    """Sets the field at a path, to its default if that is visible there, else to another value."""
    first, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[first]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, first)
        if field.message_type.fields_by_name["value"].message_type is None:
            entries["a"] = "b"
        else:
            entries["a"].SetInParent()
    elif field.is_repeated:
        items = getattr(message, first)
        if field.message_type is None:
            items.append("x" if field.type == field.TYPE_STRING else 1)
        else:
            items.add()
            if rest:
                _set(items[0], rest)
    elif field.message_type is not None:
        getattr(message, first).SetInParent()
        if rest:
            _set(getattr(message, first), rest)
    else:
        texts = {field.TYPE_STRING: "x", field.TYPE_BYTES: b"x"}
        setattr(message, first, texts.get(field.type, 1))


DESCRIPTOR: Any = pb.GenerateRequest.DESCRIPTOR
UNSERVED = sorted(set(field_paths(DESCRIPTOR)) - GENERATE)


@pytest.mark.parametrize("path", UNSERVED)
def test_unserved_field_is_refused_by_name(path: str) -> None:
    request = asked()
    _set(request, path)
    error = refused(request)
    assert isinstance(error, UnservedFieldError)
    assert path.startswith(error.violations[0].path)


def test_unserved_fields_are_those_without_a_meaning_here() -> None:
    assert {path.split(".")[0] for path in UNSERVED} == {
        "kv_transfer_params",
        "kv_transfer_params_json",
        "mm_inputs",
        "extra_mm_inputs",
        "media_refs",
        "sampling_params",
    }


def test_rank_other_than_the_only_one_is_refused() -> None:
    request = asked()
    request.data_parallel_rank = 0
    assert door_request(request).request_id == "r"
    request.data_parallel_rank = 1
    error = refused(request)
    assert (error.code, error.violations[0].path) == (grpc.StatusCode.INVALID_ARGUMENT, "data_parallel_rank")


def test_missing_prompt_is_refused() -> None:
    assert refused(pb.GenerateRequest(request_id="r")).violations[0].path == "input"


def test_embedding_request_keeps_prompt_and_id() -> None:
    made = embedding_request(pb.EmbedRequest(request_id="e", tokenized=pb.TokenizedInput(input_ids=[3])))
    assert (list(made.prompt), made.request_id, made.normalize) == ([3], "e", True)


# Responses.

ROW = TokenLogprobs(-1.0, -1.0, 2, ((7, -0.5), (8, -2.0)))
FINISHES = [
    DoorFinish(FinishKind.STOP, eos_token_id=2),
    DoorFinish(FinishKind.STOP, stop_token_id=0),
    DoorFinish(FinishKind.STOP, stop_string="END"),
    DoorFinish(FinishKind.LENGTH),
    DoorFinish(FinishKind.ABORTED),
]
RUNS = st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=5)


def events(answers: Sequence[tuple[list[list[int]], DoorFinish]]) -> list[DoorPrompt | DoorOutput]:
    """The runs of all answers in turns, each with its finish at its end."""
    made: list[DoorPrompt | DoorOutput] = [DoorPrompt((1, 2, 3), 2, (ROW, ROW))]
    for turn in range(6):
        for index, (runs, finish) in enumerate(answers):
            if turn < len(runs):
                made.append(DoorOutput(index, runs[turn], logprobs=[ROW] * len(runs[turn])))
            elif turn == len(runs):
                made.append(DoorOutput(index, finish=finish))
    return made


@settings(max_examples=100)
@given(st.lists(st.tuples(RUNS, st.sampled_from(FINISHES)), min_size=1, max_size=3), st.booleans(), st.integers(0, 2))
def test_messages_add_up_to_the_answers(
    answers: list[tuple[list[list[int]], DoorFinish]], streams: bool, top: int
) -> None:
    request = asked(logprobs=top, prompt_logprobs=top, n=len(answers))
    request.stream = streams
    messages = AnswerMessages(request)
    made = [response for event in events(answers) for response in messages.responses(event)]
    chunks = [each.chunk for each in made if each.WhichOneof("response") == "chunk"]
    last = {each.complete.index: each.complete for each in made if each.WhichOneof("response") == "complete"}
    assert sorted(last) == list(range(len(answers)))
    assert bool(chunks) == (streams and any(run for runs, _ in answers for run in runs))
    for index, (runs, finish) in enumerate(answers):
        tokens, complete = [token for run in runs for token in run], last[index]
        own = [chunk for chunk in chunks if chunk.index == index]
        assert (list(complete.output_ids), complete.completion_tokens) == (tokens, len(tokens))
        assert (complete.prompt_tokens, complete.cached_tokens) == (3, 2)
        assert complete.finish_reason == {"STOP": "stop", "LENGTH": "length", "ABORTED": "abort"}[finish.kind.name]
        assert complete.HasField("matched_token_id") == (finish.stop_token_id is not None)
        assert complete.matched_stop_str == (finish.stop_string or "")
        holders: list[Any] = own if streams else [complete]
        if streams:
            assert [token for chunk in own for token in chunk.token_ids] == tokens
            assert sum(chunk.completion_tokens for chunk in own) == len(tokens)
            assert not complete.HasField("output_logprobs")
        logprobs = [each.output_logprobs for each in holders]
        assert [value for each in logprobs for value in each.token_logprobs] == [-1.0] * len(tokens)
        assert [value for each in logprobs for value in each.token_ids] == tokens
        assert [list(value.token_ids) for each in logprobs for value in each.top_logprobs] == (
            [[7, 8]] * len(tokens) if top else []
        )
        with_prompt = [each for each in holders if each.HasField("input_logprobs")]
        assert with_prompt == holders[:1]
        for each in with_prompt:
            given_rows = each.input_logprobs
            assert [row.HasField("value") for row in given_rows.token_logprobs] == [False, True, True]
            assert (list(given_rows.token_ids), len(given_rows.top_logprobs)) == ([1, 2, 3], 3 if top else 0)
