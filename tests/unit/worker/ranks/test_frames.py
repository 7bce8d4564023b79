"""What crosses between an engine and its ranks arrives as it was sent, however the bytes are cut."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.config import Config
from common.limits import MAX_RANK_FRAME_BYTES
from common.params.config_parts import LayerQuantConfig, QuantizationConfig
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.ranks.frames import FrameError, FrameReader, encode

# What arrives is compared as tuples, which lists become.
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.integers(0, 2**32) | st.text(), inner),
    max_leaves=8,
)


def arrived(data: bytes) -> Any:
    (message,) = FrameReader().feed(data)
    return message


@given(st.lists(PLAIN, max_size=4), st.lists(st.integers(1, 50)))
def test_messages_survive_any_cut(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(encode, messages))
    found: list[Any] = []
    reader, at = FrameReader(), 0
    for cut in [*cuts, len(data) or 1]:
        found += reader.feed(data[at : at + cut])
        at += cut
    found += reader.feed(data[at:])
    assert found == messages


def test_parameters_and_arrays_arrive_equal() -> None:
    params = SamplingParams(temperature=0.7, min_tokens=2, stop_token_ids=(4,), stop_token_sequences=((1, 2),))
    found, ids = arrived(encode((params, np.array([5, 6, 7]))))
    assert found == params
    assert ids.dtype == np.int64
    assert ids.tolist() == [5, 6, 7]


def test_configs_and_outputs_arrive_equal() -> None:
    config = Config(model="m", tensor_parallel_size=2, stop_token_ids=(1, 2), scheduler_delay_factor=0.5)
    output = ScheduledBatchOutput({7: (1,), 8: (2, 3)}, {7: [4]}, {8: {5: 2**64 - 1}}, {7: b"\0\1"}, {8: bytes(200)})
    assert arrived(encode((config, math.inf))) == (config, math.inf)
    found = arrived(encode(output))
    assert found.token_ids == output.token_ids
    assert (found.logit_digests, found.logprobs) == (output.logit_digests, output.logprobs)
    assert found.target_logprobs == output.target_logprobs


def test_non_wire_object_is_refused() -> None:
    with pytest.raises(TypeError, match="Sequence must not cross"):
        encode(Sequence([1], 16))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<I", MAX_RANK_FRAME_BYTES + 1), "a frame of"),
        (struct.pack("<I", 1) + b"\xc1", "damaged"),
        (struct.pack("<I", 2) + b"\x01\x02", "damaged"),
        (encode(7)[:4] + b"\x92", "damaged"),
    ],
)
def test_garbage_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        list(FrameReader().feed(data))


def test_unknown_class_is_refused() -> None:
    data = encode(Config())
    with pytest.raises(FrameError, match="damaged"):
        list(FrameReader().feed(data.replace(b"Config", b"Popen_", 1)))


def nested(depth: int) -> bytes:
    """A frame of an extension in an extension, `depth` times."""
    body: bytes = msgpack.packb(["x"])
    for _ in range(depth):
        body = msgpack.packb(msgpack.ExtType(1, body))
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("depth", [4, 300, 2000, 100_000])
def test_nested_extensions_are_refused(depth: int) -> None:
    """Former fault: 300 nested extensions ended the process by SIGSEGV."""
    with pytest.raises(FrameError, match="extensions in each other"):
        list(FrameReader().feed(nested(depth)))


REFUSED_VALUES: list[tuple[str, tuple[Any, ...]]] = [
    ("SamplingParams", (-5.0,)),
    ("ParallelConfig", (-1, -1)),
    ("SpeculativeConfig", ("no such method",)),
    ("LayerQuantConfig", ("no such kind",)),
    ("Config", (None,) * 100),
]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("name", "values"), REFUSED_VALUES)
def test_invalid_field_values_are_frame_errors(name: str, values: tuple[Any, ...], depth: int) -> None:
    """Former fault: the error named an option that the operator had not given, and ended the process."""
    body: bytes = msgpack.packb([name, *values])
    for level in range(depth):
        body = msgpack.packb(msgpack.ExtType(1, body) if level == 0 else [msgpack.ExtType(1, body)])
    with pytest.raises(FrameError, match="damaged"):
        list(FrameReader().feed(struct.pack("<I", len(body)) + body))


def test_nested_known_classes_arrive() -> None:
    everywhere = LayerQuantConfig("per_token", "int8", True, "w8a8_int8")
    config = Config(quant_config=QuantizationConfig(everywhere, (("lm_head", LayerQuantConfig()),)))
    assert arrived(encode(config)) == config


@given(st.binary(max_size=200))
@example(b"\xc7\x02\x02\x91\xa1")
@example(msgpack.packb(msgpack.ExtType(2, msgpack.packb(["(", (1,), b""]))))
@example(msgpack.packb(msgpack.ExtType(2, msgpack.packb(["O", (1,), bytes(8)]))))
@example(msgpack.packb(msgpack.ExtType(2, msgpack.packb(["<i8", (2**62, 2**62), bytes(8)]))))
def test_any_bytes_are_a_message_or_a_frame_error(body: bytes) -> None:
    try:
        list(FrameReader().feed(struct.pack("<I", len(body)) + body))
    except FrameError:
        pass
    except Exception as error:
        pytest.fail(repr(error))
