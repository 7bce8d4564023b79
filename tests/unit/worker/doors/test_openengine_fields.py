"""OpenEngine's messages to and from the terms of doors: every field is served or refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fissile.peers.openengine.v1 import openengine_pb2 as pb
from google.protobuf.struct_pb2 import Struct

from common.constraints.forms import Constraint
from common.errors import ApiError, DeadlineError, InvalidFieldError, QueueFullError
from common.params.names import DOORS
from common.params.sampling_params import PARAMETERS
from common.rpc.unsupported_fields import field_paths
from common.wire.logprob_rows import TokenLogprobs
from worker.doors.door_request import (
    DoorFinish,
    DoorOutput,
    DoorPrompt,
    DoorRequest,
    DoorState,
    DoorUsage,
    EngineDoor,
    FinishKind,
)
from worker.doors.openengine_requests import DOOR, GENERATE_SERVED, door_request
from worker.doors.openengine_responses import OpenEngineEncoder, engine_error, kv_events
from worker.doors.served_doors import SERVED_DOORS
from worker.engine.prefix_cache import BlockChange, StoredBlock
from worker.engine.sequence import Priority

USAGE = DoorUsage(3, 4, 2)


def read(request: pb.GenerateRequest, *metadata: tuple[str, str], dp_rank: int = 0) -> DoorRequest:
    return door_request(request, metadata, dp_rank)


def prompted(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="hi", **fields)


def extra(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made


def test_every_field_of_sampling_stopping_and_guides_is_read() -> None:
    request = pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            repetition_penalty=1.1,
            seed=2**64 - 1,
            num_sequences=3,
        ),
        stopping=pb.StoppingOptions(
            max_tokens=9,
            min_tokens=2,
            ignore_eos=False,
            include_stop_in_output=True,
            conditions=[
                pb.StopCondition(stop_text="a"),
                pb.StopCondition(stop_token_id=5),
                pb.StopCondition(stop_text="b"),
                pb.StopCondition(stop_text="a"),
            ],
        ),
        kv=pb.KvOptions(bypass_prefix_cache=True, cache_salt="s"),
        guided=pb.GuidedDecoding(regex="a+", backend="auto"),
        extra=extra(detokenize=False, conversation_id="other engines read it"),
    )
    wanted = read(request, ("openengine-priority", "-3"), ("openengine-routing-key", "k"), ("x-own", "y"))
    assert list(wanted.prompt) == [1, 2]
    assert wanted.params == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 2**64 - 1,
        "n": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": False,
        "include_stop_string": True,
        "stop_strings": ("a", "b"),
        "stop_token_ids": (5,),
        "constraint": {"regex": "a+"},
    }
    assert wanted.params.keys() <= PARAMETERS.keys()
    assert (wanted.request_id, wanted.cache_salt, wanted.reads_cache) == ("r", "s", False)
    assert (wanted.priority, wanted.returns_text, wanted.keeps_stop_token) == (Priority.LOW, False, True)


def test_absent_fields_leave_the_models_defaults() -> None:
    wanted = read(prompted())
    assert wanted == DoorRequest("hi", {"stop_strings": (), "stop_token_ids": ()})


@pytest.mark.parametrize(
    ("guide", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint("json_schema", ("{}",))),
        ({"ebnf_grammar": "g"}, Constraint("grammar", ("g",))),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, Constraint("choices", ("a", "b"))),
        ({"json_object": pb.JsonObjectConstraint()}, Constraint("json_object")),
    ],
)
def test_guide_becomes_a_constraint(guide: dict[str, Any], constraint: Constraint) -> None:
    assert Constraint.of(read(prompted(guided=pb.GuidedDecoding(**guide))).params["constraint"]) == constraint


def test_candidates_of_prompt_and_output_share_one_list_of_ids() -> None:
    response = pb.ResponseOptions(
        return_prompt_logprobs=True,
        prompt_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[8, 9])),
        return_output_logprobs=True,
        output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[9, 7])),
        prompt_logprob_start=0,
    )
    params = read(prompted(response=response)).params
    assert params["logprob_token_ids"] == (9, 7, 8)
    assert (params["logprobs"], params["prompt_logprobs"], params["prompt_logprobs_start"]) == (0, 0, 1)
    encoder = OpenEngineEncoder("r", response, str)
    row = TokenLogprobs(-1.0, -1.0, 2, given=(-0.9, -0.7, -0.8))
    (prompt,) = encoder.responses(DoorPrompt([4, 5], 0, (row,), 1))
    assert not prompt.prompt.tokens[0].HasField("logprob")
    assert not prompt.prompt.tokens[0].candidates
    assert [(c.token_id, c.logprob) for c in prompt.prompt.tokens[1].candidates] == [(8, -0.8), (9, -0.9)]
    (output,) = encoder.responses(DoorOutput(0, [6], "x", [row]))
    assert [(c.token_id, c.logprob, c.HasField("rank")) for c in output.token.tokens[0].candidates] == [
        (9, -0.9, False),
        (7, -0.7, False),
    ]


def unserved_requests() -> Iterator[tuple[str, pb.GenerateRequest]]:
    """Requests with one field that is not served, by the paths that an error has to name."""
    yield "media", prompted(media=[pb.MediaItem(url="u")])
    yield "lora_name", prompted(lora_name="l")
    yield "guided.structural_tag", prompted(guided=pb.GuidedDecoding(structural_tag="t"))
    everything = pb.CandidateTokenSelection(all=pb.AllCandidates())
    for kind in ("prompt", "output"):
        given: dict[str, Any] = {f"return_{kind}_logprobs": True, f"{kind}_candidates": everything}
        yield f"response.{kind}_candidates.all", prompted(response=pb.ResponseOptions(**given))


UNSERVED = dict(unserved_requests())


@pytest.mark.parametrize("path", UNSERVED)
def test_unserved_field_is_refused_by_name(path: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(UNSERVED[path])
    assert raised.value.code is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.violations[0].path == path


def test_every_field_of_a_request_is_served_or_refused() -> None:
    paths = set(field_paths(pb.GenerateRequest.DESCRIPTOR))
    assert paths >= GENERATE_SERVED
    left = {path for path in paths - GENERATE_SERVED if not any(path.startswith(f"{name}.") for name in UNSERVED)}
    assert left == set(UNSERVED)


def test_unknown_field_is_refused_by_number() -> None:
    request = pb.GenerateRequest.FromString(prompted().SerializeToString() + b"\xf8\x07\x01")
    with pytest.raises(ApiError, match="127"):
        read(request)


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (pb.GenerateRequest(), "input"),
        (prompted(guided=pb.GuidedDecoding(regex="a", backend="xgrammar")), "guided.backend"),
        (prompted(stopping=pb.StoppingOptions(conditions=[pb.StopCondition()])), "stopping.conditions[0]"),
        (prompted(stopping=pb.StoppingOptions(conditions=[pb.StopCondition(stop_text="")])), "stopping.conditions[0]"),
        (
            prompted(stopping=pb.StoppingOptions(conditions=[pb.StopCondition(stop_token_id=i) for i in range(999)])),
            "stopping.conditions",
        ),
        (
            prompted(response=pb.ResponseOptions(output_candidates=pb.CandidateTokenSelection(top_n=1))),
            "response.output_candidates",
        ),
        (prompted(response=pb.ResponseOptions(prompt_logprob_start=3)), "response.prompt_logprob_start"),
    ],
)
def test_bad_request_names_the_field(request_: pb.GenerateRequest, path: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        read(request_)
    assert raised.value.violations[0].path == path


@pytest.mark.parametrize(
    "metadata",
    [
        [("openengine-priority", "high")],
        [("openengine-priority", str(2**31))],
        [("openengine-priority", "1"), ("openengine-priority", "1")],
        [("openengine-target-dp-rank", "-1")],
        [("openengine-target-dp-rank", "1")],
        [("openengine-routing-key", "")],
        [("openengine-unheard-of", "1")],
    ],
)
def test_bad_metadata_is_refused(metadata: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidFieldError, match=metadata[0][0]):
        read(prompted(), *metadata)


def test_priority_and_rank_of_metadata() -> None:
    wanted = read(prompted(), ("openengine-priority", "9"), ("openengine-target-dp-rank", "2"), dp_rank=2)
    assert wanted.priority is Priority.HIGH


@pytest.mark.parametrize(
    ("path", "theirs"),
    [
        ("sampling_params.temperature", "sampling.temperature"),
        ("sampling_params.n", "sampling.num_sequences"),
        ("sampling_params.stop_token_ids[3]", "stopping.conditions[3]"),
        ("sampling_params.constraint.grammar", "guided.ebnf_grammar"),
        ("params.max_tokens", "stopping.max_tokens"),
        ("text", "prompt"),
        ("token_ids[4]", "token_ids.ids[4]"),
        ("request_id", "request_id"),
    ],
)
def test_errors_name_the_peers_fields(path: str, theirs: str) -> None:
    renamed = DOOR.renamed(InvalidFieldError(path, "is bad", "good"))
    assert renamed.violations[0].path == theirs
    assert renamed.message == f"{theirs} is bad; valid: good"


def test_outputs_carry_their_index_and_finishes_their_match() -> None:
    encoder = OpenEngineEncoder("r", pb.ResponseOptions(), str)
    assert list(encoder.responses(DoorPrompt([1, 2], 0))) == []
    token, finished = encoder.responses(
        DoorOutput(0, [5, 6], "ab", finish=DoorFinish(FinishKind.STOP, stop_string="b"))
    )
    assert token.request_id == finished.request_id == "r"
    assert token.token.HasField("output_index")
    assert finished.finished.HasField("output_index")
    assert [each.token_id for each in token.token.tokens] == [5, 6]
    assert not token.token.tokens[0].HasField("logprob")
    assert finished.finished.reason == pb.FINISH_REASON_STOP
    assert finished.finished.stop_match.stop_text == "b"
    for finish, field in (
        (DoorFinish(FinishKind.STOP, eos_token_id=0), "eos_token_id"),
        (DoorFinish(FinishKind.STOP, stop_token_id=0), "stop_token_id"),
        (DoorFinish(FinishKind.STOP), None),
        (DoorFinish(FinishKind.LENGTH), None),
    ):
        (made,) = encoder.responses(DoorOutput(1, finish=finish))
        assert made.finished.stop_match.WhichOneof("match") == field
    (made,) = encoder.responses(DoorOutput(1, finish=DoorFinish(FinishKind.ABORTED)))
    assert made.finished.reason == pb.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("error", "state", "code", "is_retryable"),
    [
        (InvalidFieldError("a", "b", "c"), DoorState.READY, pb.ERROR_CODE_INVALID_ARGUMENT, False),
        (QueueFullError(3, retry_after_s=1.0), DoorState.READY, pb.ERROR_CODE_OVERLOADED, True),
        (DeadlineError("x"), DoorState.READY, pb.ERROR_CODE_CANCELLED, False),
        (ApiError(grpc.StatusCode.ABORTED, "lost"), DoorState.FAILED, pb.ERROR_CODE_INTERNAL, True),
        (ApiError(grpc.StatusCode.ABORTED, "lost"), DoorState.DRAINING, pb.ERROR_CODE_DRAINING, True),
        (ApiError(grpc.StatusCode.INTERNAL, "bug"), DoorState.READY, pb.ERROR_CODE_INTERNAL, False),
    ],
)
def test_failure_becomes_one_engine_error(error: ApiError, state: DoorState, code: int, is_retryable: bool) -> None:
    made = OpenEngineEncoder("r", pb.ResponseOptions(), str).error(error, state, USAGE)
    assert (made.error.code, made.error.retryable, made.error.message) == (code, is_retryable, error.message)
    assert made.usage == pb.Usage(prompt_tokens=3, completion_tokens=4, total_tokens=7, cached_prompt_tokens=2)
    assert engine_error(error, state) == made.error


def test_blocks_that_follow_each_other_share_an_event() -> None:
    def tokens(*ids: int) -> bytes:
        return b"".join(each.to_bytes(4, "little") for each in ids)

    changes: list[BlockChange] = [
        StoredBlock(1, None, tokens(5, 6)),
        StoredBlock(2, 1, tokens(7, 8)),
        StoredBlock(4, 3, tokens(9, 9)),
        2,
        4,
        StoredBlock(9, 2**64 - 1, tokens(1, 1)),
    ]
    events = list(kv_events(changes, 2))
    assert [each.WhichOneof("event") for each in events] == [
        "block_stored",
        "block_stored",
        "block_removed",
        "block_stored",
    ]
    first, second, removed, last = events
    assert list(first.block_stored.token_ids) == [5, 6, 7, 8]
    assert [int.from_bytes(each.value, "big") for each in first.block_stored.block_hashes] == [1, 2]
    assert not first.block_stored.HasField("parent_block_hash")
    assert int.from_bytes(second.block_stored.parent_block_hash.value, "big") == 3
    assert [int.from_bytes(each.value, "big") for each in removed.block_removed.block_hashes] == [2, 4]
    assert last.block_stored.parent_block_hash.value == b"\xff" * 8
    assert list(kv_events([], 2)) == []


def test_option_names_are_the_served_doors() -> None:
    assert tuple(SERVED_DOORS) == DOORS


def test_name_without_a_peers_name_stays() -> None:
    assert EngineDoor("d").renamed(InvalidFieldError("sampling_params.n", "x", "y")).violations[0].path == "n"
