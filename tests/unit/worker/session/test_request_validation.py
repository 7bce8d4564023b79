"""Every request field of the worker's protos is served, or refused with UNIMPLEMENTED naming it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import FieldDescriptor

from common.errors import InvalidFieldError, UnservedFieldError
from common.params.sampling_params import LOGPROB_FIELDS, SamplingParams
from common.rpc.unsupported_fields import field_paths, refuse_unlisted
from worker.session import request_validation

# What later issues will serve. A field that is new in the protos belongs here, or in `request_validation`.
NOT_SERVED = {
    "SubmitSequence": set[str](),
    "GenerateRequest": {f"params.{name}" for name in LOGPROB_FIELDS},
    "SessionRequest": set[str](),
    "DrainRequest": set[str](),
    "SetIntakeRequest": set[str](),
    "FlushCacheRequest": set[str](),
    "ListStepsRequest": set[str](),
    "GetWorkerRequest": set[str](),
    "GetTokenizerRequest": set[str](),
}
REQUESTS: dict[str, tuple[Any, frozenset[str]]] = {
    "SubmitSequence": (wpb.SubmitSequence, request_validation.SEQUENCE),
    "GenerateRequest": (wpb.GenerateRequest, request_validation.GENERATE),
    "SessionRequest": (wpb.SessionRequest, request_validation.SESSION),
    "DrainRequest": (wpb.DrainRequest, request_validation.DRAIN),
    "SetIntakeRequest": (wpb.SetIntakeRequest, request_validation.SET_INTAKE),
    "FlushCacheRequest": (wpb.FlushCacheRequest, frozenset()),
    "ListStepsRequest": (wpb.ListStepsRequest, request_validation.LIST_STEPS),
    "GetWorkerRequest": (wpb.GetWorkerRequest, frozenset()),
    "GetTokenizerRequest": (wpb.GetTokenizerRequest, frozenset()),
}


def paths(name: str) -> set[str]:
    kind, _ = REQUESTS[name]
    found = set(field_paths(kind.DESCRIPTOR))
    # Sequences are checked one by one, as SubmitSequence.
    return {path for path in found if not path.startswith("submit.seqs.")}


def set_path(message: Any, path: str) -> None:
    """Gives the field a value that is not its default, and nothing else any."""
    name, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, name)[3] = 3
        return
    if field.message_type is not None:
        inner = getattr(message, name).add() if field.is_repeated else getattr(message, name)
        if rest:
            set_path(inner, rest)
        elif not field.is_repeated:
            inner.SetInParent()
        return
    values = {
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_STRING: "x",
        FieldDescriptor.CPPTYPE_ENUM: 1,
    }
    value: object = values.get(field.cpp_type, 3)
    if field.type == FieldDescriptor.TYPE_BYTES:
        value = b"x"
    if field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)


def test_every_parameter_arrives() -> None:
    """All fields of the proto's SamplingParams, each with a distinct value."""
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "logit_bias": {3: 0.5},
        "allowed_token_ids": [1, 2],
        "num_drafts": 5,
        "grammar": 'start: "a"',
        "logprobs": 4,
        "logprob_token_ids": [9],
        "prompt_logprobs": 3,
        "prompt_logprobs_start": 11,
        "logprobs_kind": wpb.LOGPROBS_KIND_PROCESSED,
    }
    sequences: dict[str, Any] = {
        "stop_token_sequences": [wpb.TokenIds(ids=[7, 8])],
        "bad_words_token_ids": [wpb.TokenIds(ids=[9])],
    }
    assert {*values, *sequences} == set(wpb.SamplingParams.DESCRIPTOR.fields_by_name)
    message = wpb.SamplingParams(**values, **sequences)
    listed = {"stop_token_sequences": ((7, 8),), "bad_words_token_ids": ((9,),), "logprob_token_ids": (9,)}
    expected = {**values, **listed, "logprobs_kind": "processed"}
    assert request_validation.sampling_params(message, 10, frozenset()) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("params.logit_bias[10]", {"logit_bias": {10: 1.0}}),
        ("params.logit_bias[3]", {"logit_bias": {3: 101.0}}),
        ("params.allowed_token_ids[1]", {"allowed_token_ids": [1, 10]}),
        ("params.bad_words_token_ids[0].ids[1]", {"bad_words_token_ids": [wpb.TokenIds(ids=[1, 10])]}),
        ("params.bad_words_token_ids[0]", {"bad_words_token_ids": [wpb.TokenIds()]}),
        ("params.allowed_token_ids", {"allowed_token_ids": [4, 5], "stop_token_ids": [5], "min_tokens": 1}),
    ],
)
def test_invalid_masks_are_refused(path: str, fields: dict[str, Any]) -> None:
    message = wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=5, **fields)
    with pytest.raises(InvalidFieldError) as refused:
        request_validation.sampling_params(message, 10, frozenset({4}))
    assert refused.value.violations[0].path == path


def test_all_requests_are_listed() -> None:
    service = wpb.DESCRIPTOR.services_by_name["WorkerService"]
    assert {method.input_type.name for method in service.methods} | {"SubmitSequence"} == REQUESTS.keys()


@pytest.mark.parametrize("name", REQUESTS)
def test_every_field_is_served_or_listed_as_not_served(name: str) -> None:
    _, listed = REQUESTS[name]
    assert listed | NOT_SERVED[name] == paths(name)
    assert not listed & NOT_SERVED[name]


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in REQUESTS for path in sorted(paths(name))])
def test_unserved_field_is_refused_by_name(name: str, path: str) -> None:
    kind, listed = REQUESTS[name]
    message = kind()
    set_path(message, path)
    if path not in NOT_SERVED[name]:
        refuse_unlisted(message, listed)
        return
    with pytest.raises(UnservedFieldError) as raised:
        refuse_unlisted(message, listed)
    assert raised.value.code is grpc.StatusCode.UNIMPLEMENTED
    named = raised.value.violations[0].path
    assert path == named or path.startswith(f"{named}.")
