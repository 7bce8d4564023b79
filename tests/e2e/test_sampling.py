"""Sampling parameters through router and worker: greedy streams are those of transformers, all in one batch."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fissile.v1 import inference_pb2 as pb
from tokenizers import Tokenizer

from tests.checkpoints import make_checkpoint
from tests.e2e.service import Answer, Service, generate, running_service

NEW_TOKENS = 24
EARLY = 3
# Tokens that a client has got of a stream that broke.
RECEIVED = 2
FEW = [100, 101, 102, 103, 200, 300]


def prompt(length: int) -> list[int]:
    rnd = random.Random(length)
    return [rnd.randrange(5, 384) for _ in range(length)]


class OutputPenalties:
    """Presence and frequency penalty as a LogitsProcessor of transformers, which has none."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token] = scores[0, token] - self.presence - self.frequency * count
        return scores


class Only:
    """Masks all ids but these, as a LogitsProcessor."""

    def __init__(self, ids: set[int]) -> None:
        self.ids = sorted(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.ids] = scores[:, self.ids]
        return masked


class Reference:
    """The model in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def token_ids(self, *texts: str) -> list[list[int]]:
        """Token ids of each text."""
        return [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def stream(self, length: int, **options: Any) -> list[int]:
        """Greedy continuation of `prompt(length)`."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt(length)]), **{"max_new_tokens": NEW_TOKENS, **options}, do_sample=False
            )
        stream: list[int] = out[0, length:].tolist()
        return stream


def cases(reference: Reference) -> list[tuple[int, dict[str, Any], list[int]]]:
    """Prompt length, parameters and the expected tokens."""
    plain = reference.stream(50)
    stopper = plain[EARLY]
    bias = {plain[0]: -100.0, plain[EARLY]: 0.5, FEW[0]: 5.5}
    ending: dict[str, Any] = {"eos_token_id": stopper, "pad_token_id": 0}
    return [
        (50, {}, plain),
        (50, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}, plain),
        (30, {"repetition_penalty": 1.5}, reference.stream(30, repetition_penalty=1.5)),
        (200, {"repetition_penalty": 0.75}, reference.stream(200, repetition_penalty=0.75)),
        (
            30,
            {"presence_penalty": 2.0, "frequency_penalty": 0.5},
            reference.stream(30, logits_processor=[OutputPenalties(30, 2.0, 0.5)]),
        ),
        (
            17,
            {"frequency_penalty": -2.0},
            reference.stream(17, logits_processor=[OutputPenalties(17, 0.0, -2.0)]),
        ),
        (50, {"stop_token_ids": [stopper]}, plain[: plain.index(stopper) + 1]),
        (
            50,
            {"logit_bias": bias},
            reference.stream(50, sequence_bias=[[[token], value] for token, value in bias.items()]),
        ),
        (
            60,
            {"bad_words": ["Jy", "G"]},
            reference.stream(60, bad_words_ids=reference.token_ids("Jy", " Jy", "G", " G")),
        ),
        (50, {"allowed_token_ids": FEW}, reference.stream(50, logits_processor=[Only({2, *FEW})])),
        (50, {"stop_token_ids": [stopper], "min_tokens": 9}, reference.stream(50, min_new_tokens=9, **ending)),
    ]


def request_of(length: int, fields: dict[str, Any], output: pb.OutputOptions) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt(length)),
        sampling_params=pb.SamplingParams(**{"temperature": 0, "max_tokens": NEW_TOKENS, **fields}),
        output_options=output,
    )


def ask(service: Service, length: int, fields: dict[str, Any], output: pb.OutputOptions | None = None) -> Answer:
    return generate(service.stub, request_of(length, fields, output or pb.OutputOptions(return_token_ids=True)))


def resumed(service: Service, length: int, fields: dict[str, Any], received: list[int]) -> list[int]:
    """Tokens behind those that a client has got, as another worker gives them after the first one is lost."""
    asked = request_of(length, fields, pb.OutputOptions(return_token_ids=True))
    asked.request_id = uuid.uuid4().hex
    asked.resume.answers.add(index=0).token_ids.ids.extend(received)
    return generate(service.stub, asked).token_ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder, checkpoint, worker_options=["--dtype", "float32"]) as running:
        yield running


def test_streams_equal_transformers(checkpoint: Path, service: Service) -> None:
    """Also for streams that resume after delivered tokens."""
    expected = cases(Reference(checkpoint))
    assert len({tuple(stream) for _, _, stream in expected}) == len(expected) - 1, "every field must have an effect"
    with ThreadPoolExecutor(len(expected)) as pool:
        answers = list(pool.map(lambda case: ask(service, case[0], case[1]), expected))
        rests = list(pool.map(lambda case: resumed(service, case[0], case[1], case[2][:RECEIVED]), expected))
    for (length, fields, stream), answer in zip(expected, answers, strict=True):
        assert answer.token_ids == stream, f"prompt of {length} tokens with {fields}"
    assert rests == [stream[RECEIVED:] for _, _, stream in expected]
    for answer in answers[-2:]:
        assert answer.finish is not None
        ended = answer.finish.reason == pb.FINISH_REASON_STOP
        assert ended == (len(answer.token_ids) < NEW_TOKENS)


def test_several_answers_compute_their_prompt_once(service: Service) -> None:
    """Only the prompt's last token is computed for each answer."""
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt(150)), sampling_params=pb.SamplingParams(max_tokens=5, n=4)
    )
    usages = [answer.finish.usage for answer in service.stub.GenerateOnce(asked, timeout=60).answers]
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert computed == 150 + 3


def test_echo_with_special_tokens_is_decoded_prompt(checkpoint: Path, service: Service) -> None:
    plain = ask(service, 50, {})
    echoed = ask(service, 50, {}, pb.OutputOptions(echo=True, keep_special_tokens=True, return_token_ids=True))
    assert echoed.token_ids == [*prompt(50), *plain.token_ids]
    assert echoed.text == Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(prompt(50)) + plain.text


def whole_answers(params: dict[str, Any], **options: Any) -> pb.GenerateRequest:
    # Stop strings end answers at different lengths.
    sampling = {"max_tokens": 24, "seed": 5, "stop_strings": ["e", "1"], **params}
    output = pb.OutputOptions(return_token_ids=True, **options)
    return pb.GenerateRequest(text="Once upon", sampling_params=pb.SamplingParams(**sampling), output_options=output)


def likeliest(answers: list[Any]) -> list[Any]:
    """By mean logprob, from the logprobs of each token."""
    return sorted(answers, key=lambda one: -sum(each.logprob for each in one.logprobs) / len(one.logprobs))


@pytest.mark.proto_field("SamplingParams.best_of")
def test_best_of_returns_likeliest_answers_first(service: Service) -> None:
    whole = service.stub.GenerateOnce(whole_answers({"n": 9}, logprobs=0), timeout=120)
    expected = likeliest(list(whole.answers))
    assert len({len(one.token_ids) for one in expected}) > 1
    assert [one.index for one in expected] != sorted(one.index for one in expected)
    for n in (1, 3, 9):
        best = service.stub.GenerateOnce(whole_answers({"n": n, "best_of": 9}), timeout=120)
        assert [(one.index, one.text, one.token_ids) for one in best.answers] == [
            (one.index, one.text, one.token_ids) for one in expected[:n]
        ]
        # Nobody has asked for logprobs.
        assert not any(one.logprobs or one.finish.HasField("logprob") for one in best.answers)
    (asked,) = service.stub.GenerateOnce(whole_answers({"best_of": 9}, logprobs=2), timeout=120).answers
    assert [each.logprob for each in asked.logprobs] == [each.logprob for each in expected[0].logprobs]
    assert all(len(each.top) == 2 for each in asked.logprobs)
    assert asked.finish.logprob == pytest.approx(sum(each.logprob for each in asked.logprobs), rel=1e-5)


def test_best_of_applies_to_chat(service: Service) -> None:
    asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    asked.sampling_params.MergeFrom(pb.SamplingParams(max_tokens=12, seed=3, n=6))
    asked.output_options.logprobs = 0
    expected = likeliest(list(service.stub.ChatOnce(asked, timeout=120).answers))
    asked.sampling_params.n, asked.sampling_params.best_of = 2, 6
    best = service.stub.ChatOnce(asked, timeout=120).answers
    assert [(one.index, one.message) for one in best] == [(one.index, one.message) for one in expected[:2]]


@pytest.mark.parametrize("params", [{"n": 3, "best_of": 2}, {"best_of": 65}, {"best_of": 0}])
def test_impossible_tool_choice_is_refused(service: Service, params: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError, match=r"sampling_params\.best_of") as refused:
        service.stub.GenerateOnce(whole_answers(params), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_streams_do_not_choose(service: Service) -> None:
    with pytest.raises(grpc.RpcError, match=r"sampling_params\.best_of is set") as refused:
        list(service.stub.Generate(whole_answers({"best_of": 2}), timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_masks_that_leave_no_token_are_refused(service: Service) -> None:
    """The router knows the model's end-of-sequence ids, which count as tokens to generate."""
    ends = list(service.stub.GetModel(pb.GetModelRequest()).model.eos_token_ids)
    assert 2 in ends
    for ids in (ends, FEW[:1]):
        masks = {"allowed_token_ids": ids, "stop_token_ids": FEW[:1], "min_tokens": 3}
        with pytest.raises(grpc.RpcError) as refused:
            ask(service, 20, masks)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert set(ask(service, 20, {**masks, "ignore_eos": True, "max_tokens": 3}).token_ids) <= set(ends)
