"""`best_of`: more answers than are sent, of which the likeliest ones are, by a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from tests.checkpoints import make_checkpoint
from tests.e2e.service import Service, running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("best")
    checkpoint = make_checkpoint(folder / "model", num_hidden_layers=1)
    with running_service(folder, checkpoint, worker_options=["--dtype", "float32"]) as running:
        yield running


def asking(params: dict[str, Any], **options: Any) -> pb.GenerateRequest:
    # Stop strings end answers at different lengths.
    sampling = {"max_tokens": 24, "seed": 5, "stop_strings": ["e", "1"], **params}
    output = pb.OutputOptions(return_token_ids=True, **options)
    return pb.GenerateRequest(text="Once upon", sampling_params=pb.SamplingParams(**sampling), output_options=output)


def likeliest(answers: list[Any]) -> list[Any]:
    """By mean logprob, from the logprobs of each token."""
    return sorted(answers, key=lambda one: -sum(each.logprob for each in one.logprobs) / len(one.logprobs))


@pytest.mark.proto_field("SamplingParams.best_of")
def test_the_likeliest_answers_are_sent_the_best_one_first(service: Service) -> None:
    whole = service.stub.GenerateOnce(asking({"n": 9}, logprobs=0), timeout=120)
    expected = likeliest(list(whole.answers))
    assert len({len(one.token_ids) for one in expected}) > 1
    assert [one.index for one in expected] != sorted(one.index for one in expected)
    for n in (1, 3, 9):
        best = service.stub.GenerateOnce(asking({"n": n, "best_of": 9}), timeout=120)
        assert [(one.index, one.text, one.token_ids) for one in best.answers] == [
            (one.index, one.text, one.token_ids) for one in expected[:n]
        ]
        # Nobody has asked for logprobs.
        assert not any(one.logprobs or one.finish.HasField("logprob") for one in best.answers)
    (asked,) = service.stub.GenerateOnce(asking({"best_of": 9}, logprobs=2), timeout=120).answers
    assert [each.logprob for each in asked.logprobs] == [each.logprob for each in expected[0].logprobs]
    assert all(len(each.top) == 2 for each in asked.logprobs)
    assert asked.finish.logprob == pytest.approx(sum(each.logprob for each in asked.logprobs), rel=1e-5)


def test_a_conversation_has_a_best_answer(service: Service) -> None:
    asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    asked.sampling_params.MergeFrom(pb.SamplingParams(max_tokens=12, seed=3, n=6))
    asked.output_options.logprobs = 0
    expected = likeliest(list(service.stub.ChatOnce(asked, timeout=120).answers))
    asked.sampling_params.n, asked.sampling_params.best_of = 2, 6
    best = service.stub.ChatOnce(asked, timeout=120).answers
    assert [(one.index, one.message) for one in best] == [(one.index, one.message) for one in expected[:2]]


@pytest.mark.parametrize("params", [{"n": 3, "best_of": 2}, {"best_of": 65}, {"best_of": 0}])
def test_a_choice_that_can_not_be_made_is_refused(service: Service, params: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError, match=r"sampling_params\.best_of") as refused:
        service.stub.GenerateOnce(asking(params), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_streams_do_not_choose(service: Service) -> None:
    with pytest.raises(grpc.RpcError, match=r"sampling_params\.best_of is set") as refused:
        list(service.stub.Generate(asking({"best_of": 2}), timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
