"""Requests of the client library from plain arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import numpy as np
import pytest
from fissile.client import AsyncClient, Client, Delta, Embeddings, Finished, Result, Verification, tool
from fissile.client.calls import chat_request, generate_request
from fissile.client.connections import sendable
from fissile.client.progress import Answer
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"choices": ["yes", "no"]}, pb.Constraint(choices=pb.Choices(texts=["yes", "no"]))),
        ({"choices": {"texts": ["yes"]}}, pb.Constraint(choices=pb.Choices(texts=["yes"]))),
        ({"json_schema": {"b": "é", "a": 1}}, pb.Constraint(json_schema='{"b": "é", "a": 1}')),
        ({"json_schema": "{}"}, pb.Constraint(json_schema="{}")),
        (pb.Constraint(json_object=True), pb.Constraint(json_object=True)),
    ],
)
def test_constraint_argument_becomes_its_proto(given: object, expected: pb.Constraint) -> None:
    assert generate_request("p", {"constraint": given}).sampling_params.constraint == expected
    assert not generate_request("p", {}).sampling_params.HasField("constraint")


def test_another_constraint_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"constraint\.other: Constraint has no such field"):
        generate_request("p", {"constraint": {"other": 1}})


CLIENT = Client("127.0.0.1:1")
# Pairs of a call and a part of its ValueError's message.
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda c: c.chat("hi", temprature=1), "temprature: ChatRequest has no such field; did you mean temperature"),
    (lambda c: c.chat(None), "messages is None; give a text, or a list of messages"),
    (lambda c: c.chat(5), "messages is 5"),
    (lambda c: c.chat({"role": "user"}), "messages is a list: give ["),
    (lambda c: c.chat(["hi"]), "messages[0] is 'hi': give a mapping"),
    (lambda c: c.chat([{"role": "user", "text": "hi"}]), "messages[0].text: ChatMessage has no such field"),
    (lambda c: c.chat([{"role": 5}]), "messages[0].role is 5; give a text"),
    (lambda c: c.chat("a\ud800"), "messages[0].content is not valid Unicode"),
    (lambda c: c.chat(b"hi"), "messages is a list"),
    (
        lambda c: c.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages[0].content[0].type is 'image_url'",
    ),
    (lambda c: c.chat([{"role": "user", "content": [5]}]), "messages[0].parts[0] is 5"),
    (lambda c: c.chat([{"role": "user", "content": ["a"], "parts": []}]), "are both given"),
    (lambda c: c.generate(None), "prompt is None; give a text, or a list of token ids"),
    (lambda c: c.generate(5), "prompt is 5"),
    (lambda c: c.generate(["a"]), "prompt is a list of texts"),
    (lambda c: c.generate([1.5]), "token_ids.ids[0] is 1.5"),
    (lambda c: c.generate([-1]), "token_ids.ids[0] is -1; give an integer from 0 to 4294967295"),
    (lambda c: c.generate("a", text="b"), "text is not an argument"),
    (lambda c: c.chat("a", resume={}), "resume is not an argument"),
    (lambda c: c.chat("a", max_tokens=True), "max_tokens is True; give an integer"),
    (lambda c: c.chat("a", seed=1 << 64), "seed is 18446744073709551616"),
    (lambda c: c.chat("a", temperature="0.5"), "temperature is '0.5'; give a number"),
    (lambda c: c.chat("a", temperature=True), "temperature is True"),
    (lambda c: c.chat("a", ignore_eos=1), "ignore_eos is 1; give True or False"),
    (lambda c: c.chat("a", model=5), "model is 5; give a text"),
    (lambda c: c.chat("a", model=b"m"), "model is b'm'; give a text"),
    (lambda c: c.chat("a", stop_strings="."), "stop_strings is a list: give ['.'] for one"),
    (lambda c: c.chat("a", stop_strings=[5]), "stop_strings[0] is 5"),
    (lambda c: c.chat("a", allowed_token_ids=5), "allowed_token_ids is 5; give a list"),
    (lambda c: c.chat("a", logit_bias={"5": 1}), "a key of logit_bias is '5'"),
    (lambda c: c.chat("a", logit_bias={5: "1"}), "logit_bias[5] is '1'"),
    (lambda c: c.chat("a", logit_bias=[1]), "logit_bias is [1]; give a mapping"),
    (lambda c: c.chat("a", priority="urgent"), "priority is 'urgent'; give one of 'low', 'normal', 'high'"),
    (lambda c: c.chat("a", priority=9), "priority is 9"),
    (lambda c: c.chat("a", constraint="a+"), "constraint is 'a+'; give a mapping, or a Constraint"),
    (lambda c: c.chat("a", constraint={"regex": "a", "json_object": True}), "both given; give one of them"),
    (lambda c: c.chat("a", constraint={"json_schema": True}), "constraint.json_schema is True; give a JSON Schema"),
    (lambda c: c.chat("a", constraint={"json_schema": {"a": {5}}}), "constraint.json_schema cannot be written as JSON"),
    (lambda c: c.chat("a", constraint={"choices": "yes"}), "constraint.choices is a list: give ['yes'] for one"),
    (lambda c: c.chat("a", tool_choice={"mode": "auto", "name": "f"}), "tool_choice.mode and tool_choice.name"),
    (lambda c: c.chat("a", tools=[{"type": "function"}]), "tools[0].type: Tool has no such field"),
    (lambda c: c.chat("a", tools=[pb.TokenIds()]), "tools[0] is a TokenIds; give a Tool"),
    (lambda c: c.chat("a", template_arguments_json={"a": float("nan")}), "template_arguments_json cannot be written"),
    (lambda c: c.chat("a", template_arguments_json=[1]), "template_arguments_json is [1]"),
    (lambda c: c.chat("a", reasoning=True), "reasoning is True; give a mapping"),
    (lambda c: c.chat("a", logprobs=3, output_options={"logprobs": 1}), "logprobs is given twice"),
    (lambda c: c.chat("a", n=2, sampling_params=pb.SamplingParams(n=3)), "n is given twice"),
    (lambda c: c.chat("a", receipt="yes"), "receipt is 'yes'"),
    (lambda c: c.chat("a", receipt={"every": 1}), "receipt.every: ReceiptOptions has no such field"),
    (lambda c: c.chat("a", timeout_s="5"), "timeout_s is '5'; give a number of seconds"),
    (lambda c: c.chat("a", timeout_s=float("nan")), "timeout_s is nan"),
    (lambda c: c.embed("a"), "inputs is a list: give ['a'] for one"),
    (lambda c: c.embed(None), "inputs is None"),
    (lambda c: c.embed([None]), "inputs[0] is None"),
    (lambda c: c.embed(["a"], dimension=5), "did you mean dimensions?"),
    (lambda c: c.rerank("q", "d"), "documents is a list"),
    (lambda c: c.rerank(None, ["d"], top_n=1.5), "top_n is 1.5"),
    (lambda c: c.score([" a"], 5), "context is 5"),
    (lambda c: c.verify(None), "receipt is None"),
    (lambda c: c.model(5), "model is 5"),
    (lambda c: c.models(timeout_s="1"), "timeout_s is '1'"),
    (lambda c: c.count_tokens(None), "messages is None"),
    (lambda _: Client(cast(Any, 5)), "targets is 5"),
    (lambda _: Client(cast(Any, [5])), "targets is [5]"),
    (lambda _: Client("a:1", give_up_s=cast(Any, "1")), "give_up_s is '1'"),
    (lambda _: Client("a:1", metadata=[("A", "b")]), "metadata[0] has the name 'A'"),
    (lambda c: tool("f", parameters={"a": {5}}), "parameters_json cannot be written as JSON"),
    (lambda c: tool(cast(Any, 5)), "name is 5"),
    *(
        (lambda c, pair=pair: c.chat("a", metadata=[pair]), "metadata[0]")
        for pair in [
            ("X-Foo", "b"),
            ("x", "é"),
            ("x", "a\nb"),
            ("x", " a"),
            ("x", b"a"),
            ("x", 5),
            ("x", None),
            ("x-bin", "a"),
            ("", "a"),
            ("a b", "c"),
            (":path", "/"),
            ("grpc-timeout", "1S"),
            ("te", "x"),
            (5, "a"),
            ("a", "b", "c"),
            "ab",
        ]
    ),
    (lambda c: c.chat("a", metadata="traceparent"), "metadata is 'traceparent'"),
    (lambda c: c.chat("a", metadata=5), "metadata is 5"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_unsendable_argument_raises_value_error_before_sending(call: Callable[[Any], Any], said: str) -> None:
    """No server listens at the address, so a call that is sent fails later with another error."""
    with pytest.raises(ValueError, match=re.escape(said)):
        call(CLIENT)


def test_content_lists_and_json_values_are_converted_to_protos() -> None:
    content = [{"type": "text", "text": "a"}, "b", {"text": "c"}, pb.ContentPart(text="d")]
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments_json": {"x": 1}}]}
    made = chat_request([{"role": "user", "content": content}, called], {"template_arguments_json": {"é": [True]}})
    assert [part.text for part in made.messages[0].parts] == ["a", "b", "c", "d"]
    assert made.messages[1].tool_calls[0].arguments_json == '{"x": 1}'
    assert made.template_arguments_json == '{"é": [true]}'


def test_numpy_numbers_are_accepted() -> None:
    named = {"temperature": np.float32(0.5), "max_tokens": np.int64(3), "logit_bias": {np.int32(5): np.float64(1)}}
    made = generate_request(cast(Any, np.array([1, 2])), named)
    assert (list(made.token_ids.ids), made.sampling_params.temperature) == ([1, 2], 0.5)
    assert (made.sampling_params.max_tokens, dict(made.sampling_params.logit_bias)) == (3, {5: 1.0})


def test_output_options_as_arguments_reach_the_request() -> None:
    whole = {"output_options": {"return_token_ids": True}, "sampling_params": pb.SamplingParams(n=2)}
    made = chat_request("hi", {"logprobs": 0, "logprobs_kind": "processed", "seed": 7, "echo": None, **whole})
    expected = pb.OutputOptions(return_token_ids=True, logprobs=0, logprobs_kind=pb.LOGPROBS_KIND_PROCESSED)
    assert made.output_options == expected
    assert made.sampling_params == pb.SamplingParams(n=2, seed=7)
    assert not chat_request("hi", {"echo": None}).HasField("output_options")


class EchoedMetadata(grpc.GenericRpcHandler):
    """A service whose methods all return the metadata that they received."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        came = [(name, value) for name, value in details.invocation_metadata if not name.startswith("user-agent")]
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: repr(came).encode())


NAMES = st.one_of(st.text(max_size=8), st.from_regex(r"[a-zA-Z0-9:_. -]{1,12}(-bin)?", fullmatch=True))
VALUES = st.one_of(st.text(max_size=8), st.binary(max_size=8), st.text("\t\n ab~\x7f", max_size=6))


@pytest.fixture(scope="module")
def echo() -> Iterator[Callable[..., bytes]]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[EchoedMetadata()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield channel.unary_unary("/echo/echo")
    server.stop(0)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=3))
def test_accepted_metadata_arrives_unchanged(echo: Callable[..., bytes], pairs: list[Any]) -> None:
    """Metadata that gRPC would change or refuse raises a ValueError."""
    try:
        metadata = sendable(pairs)
    except ValueError:
        return
    assert echo(b"", metadata=metadata, timeout=60, wait_for_ready=True) == repr([*metadata]).encode()


def test_reprs_are_one_line_with_the_main_fields() -> None:
    usage = pb.Usage(completion_tokens=12)
    finish = pb.Finish(reason=pb.FINISH_REASON_STOP, usage=usage)
    answer = Answer(0, finish=finish)
    answer.add(pb.GenerateResponse(text="Once upon a time " * 40))
    result = Result("r1", pb.PromptInfo(), [answer])
    client = Client(["a:1", "b:2"], api_key="secret")
    shown = [repr(result), repr(client), repr(client.chat_stream("hi")), repr(AsyncClient("a:1")), repr(answer)]
    shown.append(repr(Finished(0, finish)))
    entry = pb.TokenLogprobs(token_id=5, logprob=-0.5, top=[pb.TopLogprob(token_id=5, logprob=-0.5)])
    shown.append(repr(Delta(0, "a", (5,), (entry,), "b", (pb.ToolCallDelta(name="f"),))))
    assert shown[-1] == "Delta(0, 'a', reasoning='b', tool_calls=['f'], token_ids=(5,), logprobs=[-0.5])"
    shown.append(repr(Verification(pb.REPLAY_VERDICT_EQUAL, "the same")))
    assert shown[-1] == "Verification(EQUAL, 'the same', worker_id='')"
    embedded = Embeddings(pb.EmbedResponse(embeddings=[pb.Embedding(values=[1.0, 2.0])]))
    shown.append(repr(embedded))
    assert shown[1] == "Client('a:1', 'b:2')"
    client.close()
    shown.append(repr(client))
    assert shown[-1] == "Client('a:1', 'b:2', closed)"
    assert all(part in shown[0] for part in ("Once upon", "stop", "12 tokens", "r1"))
    assert not [line for line in shown if "\n" in line or len(line) > 160 or "secret" in line]
    answer.add(pb.GenerateResponse(text="<script>"))
    assert "&lt;script&gt;" in result._repr_html_()


def test_vectors_are_a_sequence_and_an_array() -> None:
    message = pb.EmbedResponse(embeddings=[pb.Embedding(values=[1.0, 2.0]), pb.Embedding(values=[3.0, 4.0])])
    vectors = Embeddings(message)
    assert (len(vectors), vectors.size, vectors[1], vectors[:1]) == (2, 2, [3.0, 4.0], [[1.0, 2.0]])
    assert [*vectors] == [[1.0, 2.0], [3.0, 4.0]]
    assert np.asarray(vectors).shape == (2, 2)
    assert [str(np.asarray(vectors, kind).dtype) for kind in (None, np.float64)] == ["float32", "float64"]
    assert Embeddings(pb.EmbedResponse()).size == 0
