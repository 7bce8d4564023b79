"""Messages of vllm.Inference and vllm.Control from and to those of doors, and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
from fissile.peers.vllm import control_pb2 as cpb
from fissile.peers.vllm import inference_pb2 as pb

from common.errors import ApiError, InvalidFieldError
from common.rpc.unsupported_fields import field_paths
from common.wire.logprob_rows import TokenLogprobs
from worker.doors.door_request import DoorEvent, DoorFinish, DoorOutput, DoorPrompt, DoorRequest, FinishKind
from worker.doors.vllm_inference_messages import (
    DOOR,
    SERVED,
    OutputEncoder,
    check_rank,
    joined,
    model_info,
    read_request,
    server_info,
)
from worker.engine.sequence import Priority
from worker.session.worker_info import WorkerFacts

FACTS = WorkerFacts(
    worker_id="w",
    instance_id="i",
    model="demo",
    architecture="a",
    tokenizer_sha256="",
    version="1.2",
    block_size=16,
    hash_seed=0,
    vocab_size=300,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=512,
    total_blocks=32,
    tp_size=2,
)
# Fields of a request that the engine does not serve, each with a value that sets it.
UNSERVED: dict[str, dict[str, Any]] = {
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    "session_id": {"session_id": "s"},
    "media": {"media": [{"url": "http://x"}]},
    "lora_name": {"lora_name": "l"},
    "native_sampling_params_json": {"native_sampling_params_json": b"{}"},
    "decoding.structural_tag": {"decoding": {"structural_tag": "t"}},
    "kv.kv_transfer_params": {"kv": {"kv_transfer_params": {"x": 1}}},
    "kv.ec_transfer_params": {"kv": {"ec_transfer_params": {"x": 1}}},
    "response.prompt_candidates.token_ids": {
        "response": {"prompt_logprobs": True, "prompt_candidates": {"token_ids": {"ids": [1]}}}
    },
    "response.output_candidates.all": {"response": {"output_logprobs": True, "output_candidates": {"all": True}}},
    "response.prompt_candidates.all": {"response": {"prompt_logprobs": True, "prompt_candidates": {"all": True}}},
}


def asked(**fields: Any) -> pb.GenerateRequest:
    given: dict[str, Any] = {"token_ids": {"ids": [5, 6]}, **fields}
    return pb.GenerateRequest(**given)


def response_of(**fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(**fields)


def read(**fields: Any) -> DoorRequest:
    return read_request(asked(**fields))


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


def test_absent_values_are_those_of_vllm() -> None:
    wanted = read()
    assert wanted.params == {"temperature": 0.0, "max_tokens": 20}
    assert (list(wanted.prompt), wanted.request_id, wanted.cache_salt) == ([5, 6], "", "")
    assert (wanted.reads_cache, wanted.priority, wanted.returns_text) == (True, Priority.NORMAL, True)
    assert (wanted.keeps_special_tokens, wanted.keeps_stop_token) == (False, False)
    # A router sends all messages, most of them empty.
    empty: dict[str, Any] = {name: {} for name in ("sampling", "decoding", "stopping", "response", "kv")}
    assert read(**empty) == wanted


def test_every_given_value_reaches_the_engine() -> None:
    wanted = read(
        request_id="r",
        temperature=0.5,
        sampling={"num_sequences": 2, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 0},
        decoding={
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 2,
            "logit_bias": {7: 1.5},
            "allowed_token_ids": [1, 2],
            "choice": {"choices": ["a", "b"]},
        },
        stopping={
            "max_new_tokens": 9,
            "min_new_tokens": 1,
            "stop_token_ids": [4, 3, 4],
            "stop_strings": ["end"],
            "include_stop_strings": True,
            "ignore_eos": True,
        },
        response={
            "output_text": False,
            "skip_special_tokens": False,
            "output_logprobs": True,
            "output_candidates": {"top_n": 2},
            "prompt_logprobs": True,
        },
        kv={"bypass_prefix_cache": True, "cache_salt": "salt"},
        priority=-4,
    )
    constraint = wanted.params["constraint"]
    assert (constraint.form, constraint.texts) == ("choices", ("a", "b"))
    assert {name: value for name, value in wanted.params.items() if name != "constraint"} == {
        "temperature": 0.5,
        "n": 2,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 2,
        "logit_bias": {7: 1.5},
        "allowed_token_ids": (1, 2),
        "max_tokens": 9,
        "min_tokens": 1,
        "stop_token_ids": (4, 3),
        "stop_strings": ("end",),
        "include_stop_string": True,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 0,
    }
    assert (wanted.request_id, wanted.cache_salt, wanted.reads_cache) == ("r", "salt", False)
    assert (wanted.returns_text, wanted.keeps_special_tokens, wanted.keeps_stop_token) == (False, True, True)
    assert (wanted.priority, read(priority=1).priority) == (Priority.HIGH, Priority.LOW)


@pytest.mark.parametrize(
    ("decoding", "form"),
    [({"json": "{}"}, "json_schema"), ({"regex": "a"}, "regex"), ({"grammar": "g"}, "grammar")],
)
def test_constraints_have_their_forms(decoding: dict[str, Any], form: str) -> None:
    assert read(decoding=decoding).params["constraint"].form == form
    assert read(decoding={"json_object": True}).params["constraint"].form == "json_object"
    assert "constraint" not in read(decoding={"json_object": False}).params


@pytest.mark.parametrize("path", UNSERVED)
def test_unserved_fields_are_refused_by_name(path: str) -> None:
    error = refused(**UNSERVED[path])
    assert (error.code.name, error.violations[0].path) == ("UNIMPLEMENTED", path)


def test_every_field_of_a_request_is_served_or_refused() -> None:
    """A field that is neither would be refused without a test that says so."""
    paths = [path for path in field_paths(pb.GenerateRequest.DESCRIPTOR) if not path.startswith(tuple(UNSERVED))]
    assert {path for path in paths if path not in SERVED} == set()


def test_requests_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="prompt is missing"):
        read_request(pb.GenerateRequest())
    error = refused(response={"output_candidates": {"top_n": 1}})
    assert error.violations[0].path == "response.output_candidates"


def test_errors_name_fields_as_the_peer_does() -> None:
    for ours, path in {
        "sampling_params.temperature": "temperature",
        "sampling_params.max_tokens": "stopping.max_new_tokens",
        "params.stop_strings": "stopping.stop_strings",
        "sampling_params.constraint.regex": "decoding.regex",
        "token_ids[3]": "token_ids.ids[3]",
        "n": "sampling.num_sequences",
    }.items():
        renamed = DOOR.renamed(InvalidFieldError(ours, "is bad", "good"))
        assert renamed.violations[0].path == path


def test_call_for_another_rank_is_refused() -> None:
    check_rank([("x-data-parallel-rank", "1"), ("other", "2")], 1)
    check_rank([], 1)
    for value in ("2", "", b"1"):
        with pytest.raises(InvalidFieldError, match="metadata x-data-parallel-rank"):
            check_rank([("x-data-parallel-rank", value)], 1)


ROW = TokenLogprobs(logprob=-0.5, raw=-0.5, rank=2, top=((9, -0.25), (7, -0.5)), given=(-3.0, -0.5))


def test_output_has_rows_for_each_token_and_counts_them() -> None:
    named = pb.CandidateTokens(token_ids=pb.TokenIds(ids=[11, 7]))
    options = pb.ResponseOptions(output_token_ids=True, output_logprobs=True, output_candidates=named)
    encoder = OutputEncoder(options)
    first = encoder.response(DoorOutput(0, [7], "a", [ROW])).outputs
    assert (first.text, first.num_tokens, list(first.token_ids)) == ("a", 1, [7])
    assert (list(first.logprobs), list(first.ranks)) == ([-0.5], [2])
    # The generated token is not among the further ones.
    assert [(each.id, each.logprob, each.rank) for each in first.candidate_tokens[0].tokens] == [
        (9, -0.25, 1),
        (11, -3.0, 0),
    ]
    assert not first.HasField("finish_info")
    finish = DoorFinish(FinishKind.STOP, eos_token_id=2)
    last = encoder.response(DoorOutput(0, [8, 2], "", [ROW, ROW], finish)).outputs
    assert (last.finish_info.num_output_tokens, last.finish_info.eos_token_id) == (3, 2)
    assert last.finish_info.finish_reason == pb.FinishInfo.STOP


@pytest.mark.parametrize(
    ("finish", "wanted"),
    [
        (DoorFinish(FinishKind.LENGTH), {"finish_reason": 1}),
        (DoorFinish(FinishKind.ABORTED), {"finish_reason": 3}),
        (DoorFinish(FinishKind.STOP, stop_token_id=0), {"finish_reason": 2, "stop_token_id": 0}),
        (DoorFinish(FinishKind.STOP, stop_string="x"), {"finish_reason": 2, "stop_string": "x"}),
    ],
)
def test_finishes_have_their_reasons(finish: DoorFinish, wanted: dict[str, Any]) -> None:
    response = OutputEncoder(pb.ResponseOptions()).response(DoorOutput(1, [4], "t", finish=finish))
    assert response.outputs == pb.SequenceOutput(
        index=1, text="t", num_tokens=1, finish_info=pb.FinishInfo(num_output_tokens=1, **wanted)
    )


def test_prompt_has_a_row_for_each_token() -> None:
    prompt = DoorPrompt([5, 7, 9], cached_tokens=0, logprobs=(ROW, ROW))
    assert OutputEncoder(pb.ResponseOptions()).response(prompt).prompt_info == pb.PromptInfo(num_prompt_tokens=3)
    options = pb.ResponseOptions(
        prompt_token_ids=True, prompt_logprobs=True, prompt_candidates=pb.CandidateTokens(top_n=2)
    )
    info = OutputEncoder(options).response(prompt).prompt_info
    assert (list(info.token_ids), list(info.logprobs), list(info.ranks)) == ([5, 7, 9], [0, -0.5, -0.5], [0, 2, 2])
    assert [[each.id for each in row.tokens] for row in info.candidate_tokens] == [[], [9], [7]]


def test_parts_join_to_one_response() -> None:
    encoder = OutputEncoder(pb.ResponseOptions(output_token_ids=True))
    events: list[DoorEvent] = [
        DoorPrompt([5], 0),
        DoorOutput(0, [1], "a"),
        DoorOutput(0, [2], "b", finish=DoorFinish(FinishKind.LENGTH)),
    ]
    whole = joined(encoder.response(event) for event in events)
    assert whole == response_of(
        prompt_info={"num_prompt_tokens": 1},
        outputs={
            "text": "ab",
            "num_tokens": 2,
            "token_ids": [1, 2],
            "finish_info": {"num_output_tokens": 2, "finish_reason": 1},
        },
    )


def test_descriptions_are_what_a_router_checks() -> None:
    info = server_info(FACTS, 1, 4)
    assert (info.api_version, info.engine_version, info.instance_id) == ("vllm", "1.2", "i")
    assert info.parallelism == cpb.ParallelismInfo(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=4,
        data_parallel_rank=1,
        decode_context_parallel_size=1,
        world_size=2,
        data_parallel_size_local=1,
    )
    assert (info.max_model_len, info.kv_block_size, info.total_kv_blocks) == (512, 16, 32)
    assert not info.HasField("rl_capabilities")
    model = model_info(FACTS, "/folder", has_tokenizer=True)
    assert (model.model_id, model.served_model_name) == ("/folder", "demo")
    assert model.supports_text_input
    assert model.supports_token_ids_input
    assert not model_info(FACTS, "/folder", has_tokenizer=False).supports_text_input
