"""Compares request digests with an encoder that reads sizes and neutral values from docs/reference/contract.md."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any, Final

from fissile.receipts import RequestDigest, canonical_params
from fissile.v1 import inference_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams

CONTRACT: Final = (Path(__file__).parents[3] / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
APART: Final = ("seed", "n", "best_of", "num_drafts")


def row(begin: str) -> list[str]:
    """The cells of the first table row in the contract that begins with `begin`."""
    line = re.search(rf"^\| {re.escape(begin)}.*$", CONTRACT, re.MULTILINE)
    assert line is not None
    return [cell.strip() for cell in line[0].strip("|").split("|")]


def sizes() -> dict[str, int]:
    """Size in bytes of each scalar type."""
    types, numbers = row("`uint32`")
    found = [int(number) for number in re.findall(r"\d+", numbers)]
    return dict(zip(re.findall(r"\w+", types), found, strict=True))


def neutral() -> dict[str, float]:
    """Neutral values of the parameters whose neutral value is not 0."""
    names, value = row("`temperature`, `top_p`")
    assert row("every other")[1] == "0 or false"
    return {name: float(value) for name in re.findall(r"`([a-z_]+)`", names)}


SIZES: Final = sizes()
NEUTRAL: Final = neutral()
KINDS: Final = {
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "enum",
}


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def scalar(field: FieldDescriptor, value: Any) -> bytes:
    kind = KINDS[field.type]
    if kind == "float":
        return struct.pack("<f", value + 0.0)
    return int(value).to_bytes(SIZES[kind], "little")


def item(field: FieldDescriptor, value: Any) -> bytes:
    if field.type == FieldDescriptor.TYPE_STRING:
        data: bytes = value.encode()
        return u32(len(data)) + data
    return fields(value) if field.message_type is not None else scalar(field, value)


def fields(message: Any) -> bytes:
    """A message's fields, encoded as the tables of the contract say."""
    made = []
    of_params = isinstance(message, pb.SamplingParams)
    for field in sorted(message.DESCRIPTOR.fields, key=lambda each: each.number):
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, inner = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            entries = [scalar(key, each) + item(inner, value[each]) for each in sorted(value)]
        elif field.is_repeated:
            entries = [item(field, each) for each in value]
        elif field.type in KINDS:
            if value != (NEUTRAL.get(field.name, 0.0) if of_params else 0):
                made.append(u32(field.number) + scalar(field, value))
            continue
        else:
            if message.HasField(field.name):
                made.append(u32(field.number) + item(field, value))
            continue
        if entries:
            made.append(u32(field.number) + u32(len(entries)) + b"".join(entries))
    return u32(len(made)) + b"".join(made)


def expected(ids: list[int], params: pb.SamplingParams, seed: int, index: int) -> bytes:
    head = b"fissile request 1\n" + b"\1" + b"".join(map(u32, [len(ids), *ids]))
    return hashlib.sha256(head + fields(params) + seed.to_bytes(8, "little") + u32(index)).digest()


numbers = st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0])
ids = st.lists(st.integers(0, 2**32 - 1), max_size=3)
texts = st.lists(st.sampled_from(["a", "é", "ab"]), max_size=2)


@given(
    values=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.5, 1.0]),
            "top_p": st.sampled_from([0.5, 1.0]),
            "min_p": st.sampled_from([0.0, 0.5, 1.0]),
            "top_k": st.integers(0, 2),
            "repetition_penalty": st.sampled_from([0.5, 1.0]),
            "presence_penalty": numbers,
            "frequency_penalty": numbers,
            "max_tokens": st.integers(0, 2),
            "min_tokens": st.integers(0, 2),
            "ignore_eos": st.booleans(),
            "include_stop_string": st.booleans(),
            "stop_strings": texts,
            "bad_words": texts,
            "stop_token_ids": ids,
            "allowed_token_ids": ids,
            "logit_bias": st.dictionaries(st.integers(0, 9), numbers, max_size=3),
            "stop_token_sequences": st.lists(ids.map(lambda given: pb.TokenIds(ids=given)), max_size=2),
        }
    ),
    prompt=ids,
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 3),
)
def test_request_digest_follows_the_tables_of_the_contract(
    values: dict[str, Any], prompt: list[int], seed: int, index: int
) -> None:
    params = pb.SamplingParams(**values)

    digest = RequestDigest(prompt, params, seed, continues=True).of_answer(index)

    assert digest == expected(prompt, params, seed, index)


def test_greedy_and_temperature_one_have_distinct_digests() -> None:
    greedy, plain = (
        canonical_params(pb.SamplingParams(), SamplingParams(temperature=temperature, max_tokens=5))
        for temperature in (0.0, 1.0)
    )

    assert fields(greedy) != fields(plain)
    for params in (greedy, plain):
        assert RequestDigest([1], params, 7, continues=True).of_answer(0) == expected([1], params, 7, 0)


def test_every_parameter_is_in_the_comparison() -> None:
    compared = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {*APART, "constraint"}

    assert compared == {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("max_tokens", "min_tokens", "ignore_eos", "include_stop_string", "stop_strings", "bad_words"),
        *("stop_token_ids", "allowed_token_ids", "logit_bias", "stop_token_sequences"),
    }
