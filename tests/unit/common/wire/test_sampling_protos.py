"""A worker reads the same sampling parameters that a router sends, field by field."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import InvalidFieldError
from common.params.sampling_params import SamplingParams
from common.wire.sampling_protos import SAMPLING_FIELDS, sampling_from_proto, sampling_to_proto

# All parameters that a worker needs, each with a value other than its default.
PARAMS = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    max_tokens=9,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=(1, 5),
    stop_token_sequences=((1, 2), (3,)),
    logit_bias={7: -1.5, 3: 100.0},
    bad_words_token_ids=((4, 5), (6,)),
    allowed_token_ids=(8, 2),
    logprobs=2,
    logprob_token_ids=(7,),
    logprobs_kind="processed",
    prompt_logprobs=1,
    prompt_logprobs_start=4,
    num_drafts=3,
    grammar='start: "a"',
)
# Fields that stay in the router or are sent beside the parameters.
_ROUTERS_OWN = {"seed", "n", "stop_strings", "include_stop_string", "bad_words", "constraint"}


def test_sampling_params_round_trip_through_proto() -> None:
    assert sampling_from_proto(sampling_to_proto(PARAMS)) == PARAMS
    assert sampling_from_proto(sampling_to_proto(SamplingParams())) == SamplingParams()


@pytest.mark.parametrize("name", sorted({field.name for field in fields(SamplingParams)} - _ROUTERS_OWN))
def test_each_sampling_field_changes_only_its_proto_field(name: str) -> None:
    """Changing a parameter changes exactly its own field of the message."""
    other = replace(PARAMS, **{name: getattr(SamplingParams(), name)})
    sent, usual = sampling_to_proto(PARAMS), sampling_to_proto(other)
    differing = [
        field.name for field in sent.DESCRIPTOR.fields if getattr(sent, field.name) != getattr(usual, field.name)
    ]
    assert differing == [name]


def test_every_field_of_the_message_is_listed() -> None:
    names = {field.name for field in wpb.SamplingParams.DESCRIPTOR.fields}
    assert {path.partition(".")[0] for path in SAMPLING_FIELDS} == names


def test_impossible_sampling_proto_value_is_named() -> None:
    sent = sampling_to_proto(PARAMS)
    sent.top_p = 2.0
    with pytest.raises(InvalidFieldError, match=r"sampling_params\.top_p"):
        sampling_from_proto(sent)
