"""Digests of receipts: known values, an independent encoder, and verdicts of comparisons."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Any

import pytest
import xxhash
from fissile.receipts import RequestDigest, canonical_params, contradiction, output_sha256, receipt_sha256, sealed
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams
from router.answers.logit_digests import LogitChain, compare_answer, compare_request


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def f32(number: float) -> bytes:
    return struct.pack("<f", number)


def text(value: bytes) -> bytes:
    return u32(len(value)) + value


def digest(params: pb.SamplingParams, *, continues: bool = True, ids: list[int] | None = None, seed: int = 7) -> bytes:
    return RequestDigest(ids or [1, 2, 3], params, seed, continues=continues).of_answer(0)


def expected(parameters: bytes, *, continues: int = 1, index: int = 0) -> bytes:
    """The digest of a request with prompt 1, 2, 3 and seed 7, as docs/reference/contract.md says."""
    head = b"fissile request 1\n" + bytes([continues]) + u32(3, 1, 2, 3)
    return hashlib.sha256(head + parameters + u64(7) + u32(index)).digest()


# The number of fields, then each field's number and value, as docs/reference/contract.md defines them.
ALL = pb.SamplingParams(
    temperature=0.5,
    top_k=40,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=0.75,
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    stop_strings=["é", "ab"],
    include_stop_string=True,
    stop_token_ids=[5, 4],
    stop_token_sequences=[pb.TokenIds(ids=[8, 9]), pb.TokenIds(ids=[7])],
    logit_bias={30: -0.0, 4: 2.0},
    bad_words=["x"],
    allowed_token_ids=[1],
    constraint=pb.Constraint(regex="a+"),
)
ALL_ENCODED = b"".join(
    (
        u32(18),
        u32(1) + f32(0.5),
        u32(2) + u32(40),
        u32(3) + f32(0.25),
        u32(4) + f32(0.125),
        u32(5) + f32(1.5),
        u32(6) + f32(-1.0),
        u32(7) + f32(0.75),
        u32(9) + u32(9),
        u32(10) + u32(2),
        u32(11) + b"\1",
        u32(12) + u32(2) + text("é".encode()) + text(b"ab"),
        u32(13) + b"\1",
        u32(14) + u32(2, 5, 4),
        u32(15) + u32(2) + (u32(1) + u32(1) + u32(2, 8, 9)) + (u32(1) + u32(1) + u32(1, 7)),
        u32(18) + u32(2) + u32(4) + f32(2.0) + u32(30) + f32(0.0),
        u32(19) + u32(1) + text(b"x"),
        u32(20) + u32(1, 1),
        u32(21) + u32(1) + u32(3) + text(b"a+"),
    )
)


def test_request_digest_covers_every_parameter() -> None:
    assert digest(ALL) == expected(ALL_ENCODED)
    assert digest(ALL, continues=False) == expected(ALL_ENCODED, continues=False)
    kept = RequestDigest([1, 2, 3], ALL, 7, continues=True, keeps_special_tokens=True)
    assert kept.of_answer(0) == expected(ALL_ENCODED, continues=3)
    covered = {field.name for field, _ in ALL.ListFields()} | {"seed", "n", "best_of", "num_drafts"}
    assert covered == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def test_known_answers() -> None:
    """These numbers must never change: receipts are kept for years."""
    assert digest(ALL).hex() == "22a42bb0f31db3dcd3351c9a334fa3b0e0d29f29dc72027f91d13db4d36722dc"
    assert (
        digest(canonical_params(pb.SamplingParams(), SamplingParams(max_tokens=5))).hex()
        == "997cf5ab0f5584ebedf9e7123e66c3ee23b2cb220f079d39c27af02244811169"
    )
    assert output_sha256([]).hex() == hashlib.sha256(b"").hexdigest()
    assert output_sha256([1, 256, 2**32 - 1]) == hashlib.sha256(bytes.fromhex("0100000000010000ffffffff")).digest()
    assert output_sha256(array("I", [3])) == output_sha256([3])
    assert receipt_sha256(receipt()).hex() == "bdcc4a463eb5256481bf108f5304d383b23a22a3efc453cc3c8b13ed418d9a80"


def test_request_digest_omits_disabled_parameters() -> None:
    """A parameter added in a later version changes no digest of a request without it."""
    off = pb.SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=-0.0, ignore_eos=False
    )
    plain = u32(1) + u32(9) + u32(5)
    assert digest(canonical_params(off, SamplingParams(max_tokens=5))) == expected(plain)
    assert digest(canonical_params(pb.SamplingParams(), SamplingParams(max_tokens=5))) == expected(plain)


def test_defaults_of_the_model_are_filled_in() -> None:
    """The digest covers the values in force, not only those sent."""
    params = SamplingParams(temperature=0.5, top_k=7, max_tokens=5)
    parameters = u32(3) + u32(1) + f32(0.5) + u32(2) + u32(7) + u32(9) + u32(5)
    assert digest(canonical_params(pb.SamplingParams(), params)) == expected(parameters)


def test_request_digest_omits_irrelevant_parameters() -> None:
    """One of several answers has the digest of a single answer; greedy sampling is not a disabled parameter."""
    given = pb.SamplingParams(n=4, best_of=5, num_drafts=3, seed=1, temperature=0)
    params = SamplingParams(n=4, seed=1, temperature=0.0, max_tokens=5)
    assert digest(canonical_params(given, params)) == expected(u32(2) + u32(1) + f32(0.0) + u32(9) + u32(5))
    answers = RequestDigest([1, 2, 3], canonical_params(given, params), 7, continues=True)
    assert answers.of_answer(3) == expected(u32(2) + u32(1) + f32(0.0) + u32(9) + u32(5), index=3)


def test_logit_chain_equals_reference_xxh3() -> None:
    """XXH3 of eight bytes by the reference library, seeded with the previous digest. The values must never change."""
    chain = LogitChain(10, 2)
    assert chain_of(chain, 0) == []
    first = xxhash.xxh3_64(u64(1), seed=0).intdigest()
    chain.add([10, 12], [1, 2])
    assert chain_of(chain, 3) == [first, xxhash.xxh3_64(u64(2), seed=first).intdigest()]
    # A resuming worker sends one digest again, then a new one.
    chain.add([12, 14], [2, 2**64 - 1])
    known = [f"{digest:x}" for digest in chain_of(chain, 5) or ()]
    assert known == [
        "2fbc593564db792e",
        "c5526e5481d03c88",
        "49019cad1cf01200",
    ]


@pytest.mark.parametrize(("positions", "said"), [([10, 14], None), ([12, 14], None), ([10, 12, 14], 2), ([10], None)])
def test_logit_chain_covers_answer_or_is_empty(positions: list[int], said: int | None) -> None:
    """A missing digest makes the chain empty; digests of tokens dropped by a stop string are omitted."""
    chain = LogitChain(10, 2)
    chain.add(positions, positions)
    found = chain_of(chain, 4)
    assert (None if found is None else len(found)) == said


def chain_of(chain: LogitChain, num_tokens: int) -> list[int] | None:
    made = chain.of_answer(num_tokens)
    return None if made is None else list(made.logit_digests)


def receipt(**fields: Any) -> pb.Receipt:
    request = RequestDigest([1, 2, 3], ALL, 7, continues=True)
    made = pb.Receipt(
        version=1,
        request_sha256=request.of_answer(0),
        seed="7",
        prompt_tokens=3,
        output_tokens=4,
        output_sha256=output_sha256([10, 11, 12, 13]),
        weights_digest="ww",
        numerics="nn",
        tokenizer_sha256="tt",
        router_version="0.1",
        worker_version="0.2",
        logits_every=2,
        logit_digests=[2**63, 5],
    )
    made.MergeFrom(pb.Receipt(**fields))
    return sealed(made)


def test_receipt_digest_follows_contract() -> None:
    made = receipt()
    encoded = b"".join(
        (
            u32(13),
            u32(1) + u32(1),
            u32(2) + text(made.request_sha256),
            u32(3) + text(b"7"),
            u32(5) + u32(3),
            u32(6) + u32(4),
            u32(7) + text(made.output_sha256),
            u32(8) + text(b"ww"),
            u32(9) + text(b"nn"),
            u32(10) + text(b"tt"),
            u32(12) + text(b"0.1"),
            u32(13) + text(b"0.2"),
            u32(14) + u32(2),
            u32(15) + u32(2) + u64(2**63) + u64(5),
        )
    )
    assert made.receipt_sha256 == hashlib.sha256(b"fissile receipt 1\n" + encoded).digest()
    assert contradiction(made) == ""


@given(st.sampled_from([field.name for field in pb.Receipt.DESCRIPTOR.fields]), st.integers(0, 2**20))
def test_altered_receipt_field_contradicts_digest(name: str, number: int) -> None:
    made = receipt()
    value = getattr(made, name)
    if name == "logit_digests":
        made.logit_digests[number % 2] ^= 1 << number % 64
    elif isinstance(value, bytes):
        at = number % len(value)
        setattr(made, name, value[:at] + bytes([value[at] ^ 1 << number % 8]) + value[at + 1 :])
    elif isinstance(value, str):
        setattr(made, name, value + "x")
    else:
        setattr(made, name, value + 1 + number)
    assert contradiction(made)


def test_sealed_receipt_with_too_few_digests_contradicts_itself() -> None:
    short = receipt(output_tokens=5)
    assert "logit_digests" in contradiction(short)
    assert contradiction(sealed(pb.Receipt(version=1)))


@pytest.mark.parametrize(
    ("ids", "seed", "num_answers", "said"),
    [
        ([1, 2, 3], 7, 1, ""),
        ([1, 2, 4], 7, 1, "parameters"),
        ([1, 2], 7, 1, "prompt has 2"),
        ([1, 2, 3], 8, 1, "seed"),
        ([1, 2, 3], 7, 0, "answer 0"),
    ],
)
def test_other_request_is_reported_before_replay(ids: list[int], seed: int, num_answers: int, said: str) -> None:
    found = compare_request(receipt(), RequestDigest(ids, ALL, seed, continues=True), num_answers)
    assert (found is None) == (said == "")
    if found is not None:
        assert (found.verdict, found.position) == (pb.REPLAY_VERDICT_OTHER_REQUEST, None)
        assert said in found.detail


IDS = [10, 11, 12, 13]
LOGITS, CHOICE, EQUAL = (
    pb.REPLAY_VERDICT_LOGITS_DIFFER,
    pb.REPLAY_VERDICT_CHOICE_DIFFERS,
    pb.REPLAY_VERDICT_EQUAL,
)


@pytest.mark.parametrize(
    ("replayed", "digests", "known", "verdict", "position"),
    [
        (IDS, [2**63, 5], True, EQUAL, None),
        (IDS, [2**63, 5], False, EQUAL, None),
        # Equal tokens with different logits.
        (IDS, [2**63, 6], True, LOGITS, 2),
        (IDS, [1, 6], False, LOGITS, 0),
        ([10, 9, 9, 9], [2**63, 6], True, CHOICE, 1),
        ([10, 9, 9, 9], [2**63, 6], False, LOGITS, 2),
        ([10, 11, 9, 9], [2**63, 6], True, LOGITS, 2),
        ([10, 11, 12, 9], [2**63, 5], True, CHOICE, 3),
        ([10, 11, 12, 9], [2**63, 5], False, CHOICE, None),
        ([10, 11], [2**63], True, CHOICE, 2),
        ([10, 11, 12, 13, 14], [2**63, 5, 8], True, CHOICE, 4),
        ([10, 11, 12, 13, 14], [2**63, 5, 8], False, CHOICE, None),
    ],
)
def test_replay_names_first_difference(
    replayed: list[int], digests: list[int], known: bool, verdict: int, position: int | None
) -> None:
    again = receipt()
    again.output_tokens, again.output_sha256 = len(replayed), output_sha256(replayed)
    del again.logit_digests[:]
    again.logit_digests.extend(digests)
    found = compare_answer(receipt(), IDS if known else [], again, replayed)
    assert (found.verdict, found.position) == (verdict, position)
    assert found.detail
