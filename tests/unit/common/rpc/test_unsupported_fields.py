"""Set fields outside the list of served fields are refused at any depth."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fissile.v1 import inference_pb2
from fissile.worker.v1 import worker_pb2
from google.protobuf.message import Message

from common.errors import InvalidFieldError, UnservedFieldError
from common.rpc import unsupported_fields
from common.rpc.unsupported_fields import field_paths, refuse_unlisted, refuse_unserved

ALL = frozenset(field_paths(worker_pb2.Submit.DESCRIPTOR))


def submit() -> worker_pb2.Submit:
    params = worker_pb2.SamplingParams(temperature=0.5, stop_token_sequences=[worker_pb2.TokenIds(ids=[1, 2])])
    return worker_pb2.Submit(seqs=[worker_pb2.SubmitSequence(rid=1), worker_pb2.SubmitSequence(rid=2, params=params)])


def test_paths_of_a_descriptor() -> None:
    assert {"seqs", "seqs.rid", "seqs.params", "seqs.params.stop_token_sequences.ids", "serial"} <= ALL
    assert len(ALL) == len(list(field_paths(worker_pb2.Submit.DESCRIPTOR)))


def test_served_fields_are_accepted() -> None:
    refuse_unserved(submit(), ALL)


@pytest.mark.parametrize(
    "path", ["seqs", "seqs.params", "seqs.params.temperature", "seqs.params.stop_token_sequences.ids"]
)
def test_unserved_field_is_named(path: str) -> None:
    with pytest.raises(UnservedFieldError, match=f"^{path} is not served"):
        refuse_unserved(submit(), ALL - {path})


def test_unset_unserved_fields_are_accepted() -> None:
    refuse_unserved(submit(), ALL - {"seqs.params.top_k", "serial", "seqs.cache_salt"})


def test_refused_field_name_includes_prefix() -> None:
    with pytest.raises(UnservedFieldError, match=r"^p\.top_k"):
        refuse_unlisted(worker_pb2.SamplingParams(top_k=2), frozenset({"p.temperature"}), prefix="p.")


def test_unknown_enum_value_is_refused() -> None:
    end = worker_pb2.SequenceEnd()
    end.MergeFromString(b"\x18\x63")  # field 3 (reason) = 99
    with pytest.raises(InvalidFieldError, match="reason is 99; valid: END_REASON_EOS, "):
        refuse_unserved(end, frozenset({"reason"}))


def test_map_values_and_well_known_types_are_skipped() -> None:
    paths = list(field_paths(inference_pb2.ChatRequest.DESCRIPTOR))
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if path.endswith((".key", ".seconds", "string_value"))]


UNKNOWN = b"\xf8\x07\x01"  # field 127 = 1
CHAT = frozenset(field_paths(inference_pb2.ChatRequest.DESCRIPTOR))


def chat() -> inference_pb2.ChatRequest:
    made = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="hi")] * 2)
    made.sampling_params.stop_token_sequences.add(ids=[1])
    made.template_arguments_json = '{"a": {"b": [1]}}'
    return made


@pytest.mark.parametrize(
    ("path", "find"),
    [
        ("127", lambda m: m),
        ("messages.127", lambda m: m.messages[1]),
        ("sampling_params.127", lambda m: m.sampling_params),
        ("sampling_params.stop_token_sequences.127", lambda m: m.sampling_params.stop_token_sequences[0]),
        ("messages.parts.127", lambda m: m.messages[0].parts.add()),
    ],
)
def test_unknown_field_is_refused_at_any_depth(path: str, find: Callable[[Any], Message]) -> None:
    """Regression: fields unknown to the protos were accepted and ignored."""
    message = chat()
    refuse_unserved(message, CHAT)
    find(message).MergeFromString(UNKNOWN)
    with pytest.raises(UnservedFieldError, match=f"^{re.escape(path)} is not served") as refused:
        refuse_unserved(message, CHAT)
    assert refused.value.violations[0].path == path


def test_many_unknown_fields_are_refused_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported_fields, "_unknown_paths", lambda _: pytest.fail("looked at"))
    with pytest.raises(UnservedFieldError, match="300000 bytes of unknown fields"):
        refuse_unserved(inference_pb2.ListModelsRequest.FromString(UNKNOWN * 100_000))


def test_frames_between_routers_and_workers_may_have_fields_of_a_later_version() -> None:
    frame = worker_pb2.SessionRequest()
    frame.cancel.MergeFromString(UNKNOWN)
    refuse_unlisted(frame, frozenset({"cancel"}))
