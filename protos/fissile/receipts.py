"""Digests of receipts, byte by byte as docs/reference/contract.md defines them, for routers and clients. Pure.

The sampling parameters of a request and the fields of a receipt have one encoding. It leaves out fields with their
neutral value, so that a field of a later version changes no digest of a message that does not use it.
"""

from __future__ import annotations

import copy
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fissile.v1 import inference_pb2 as pb

VERSION: Final = 1
_REQUEST_DOMAIN: Final = b"fissile request 1\n"
_RECEIPT_DOMAIN: Final = b"fissile receipt 1\n"
_SHA256_BYTES: Final = 32
# Request parameters that are digested separately, or that do not affect the answer.
_APART: Final = frozenset({"seed", "n", "best_of", "num_drafts"})
# Values that turn a parameter off, where that is not zero or empty.
NEUTRAL: Final[Mapping[str, float]] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
_SCALARS: Final = {
    FieldDescriptor.TYPE_FLOAT: "<f",
    FieldDescriptor.TYPE_DOUBLE: "<d",
    FieldDescriptor.TYPE_UINT32: "<I",
    FieldDescriptor.TYPE_FIXED32: "<I",
    FieldDescriptor.TYPE_UINT64: "<Q",
    FieldDescriptor.TYPE_FIXED64: "<Q",
    FieldDescriptor.TYPE_INT32: "<i",
    FieldDescriptor.TYPE_INT64: "<q",
    FieldDescriptor.TYPE_ENUM: "<i",
    FieldDescriptor.TYPE_BOOL: "<?",
}
_FLOATS: Final = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


def canonical_params(given: pb.SamplingParams, params: object) -> pb.SamplingParams:
    """Parameters of a request with every default filled in, for its digest.

    Args:
        given: the parameters as they were sent; lists, maps and messages, which have no defaults, are taken from there.
        params: the numbers and truth values in force, as attributes.
    """
    canonical = pb.SamplingParams()
    canonical.CopyFrom(given)
    for field in canonical.DESCRIPTOR.fields:
        if field.name in _APART:
            canonical.ClearField(field.name)  # type: ignore[arg-type]
        elif field.type in _SCALARS and not field.is_repeated and hasattr(params, field.name):
            setattr(canonical, field.name, getattr(params, field.name))
    return canonical


def confining(request: pb.GenerateRequest | pb.ChatRequest) -> pb.ChatRequest | None:
    """The fields by which tools and reasoning confine an answer, alone or beside a constraint; None if they do not."""
    if isinstance(request, pb.GenerateRequest):
        return None
    made, choice = pb.ChatRequest(), request.tool_choice
    is_called = choice.WhichOneof("choice") == "name" or choice.mode == pb.TOOL_MODE_REQUIRED
    is_beside = bool(request.tools) and request.sampling_params.HasField("constraint")
    confines = is_called or is_beside or any(tool.strict for tool in request.tools)
    if choice.mode != pb.TOOL_MODE_NONE and confines:
        made.tools.MergeFrom(request.tools)
        made.tool_choice.CopyFrom(choice)
    if request.reasoning.HasField("max_tokens"):
        made.reasoning.max_tokens = request.reasoning.max_tokens
    return made if made.ListFields() else None


class RequestDigest:
    """SHA-256 of a canonical request, for each of its answers.

    Args:
        token_ids: the prompt.
        params: of `canonical_params`.
        seed: in force.
        continues: True if the answer's text continues the prompt's (Generate), False if it starts anew (Chat).
        keeps_special_tokens: True if special tokens are part of the text.
        keeps_delimiters: True if stop strings are searched in text with the delimiters of its channels.
        ends_with_first_call: True if the answer ends with its first tool call.
        confined_by: of `confining`.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        params: pb.SamplingParams,
        seed: int,
        *,
        continues: bool,
        keeps_special_tokens: bool = False,
        keeps_delimiters: bool = False,
        ends_with_first_call: bool = False,
        confined_by: pb.ChatRequest | None = None,
    ) -> None:
        self.continues = continues
        self.seed = seed
        self.prompt_tokens = len(token_ids)
        self._digest = hashlib.sha256(_REQUEST_DOMAIN)
        kind_of_text = continues + 2 * keeps_special_tokens + 4 * keeps_delimiters + 8 * ends_with_first_call
        kind_of_text += 0 if confined_by is None else 16
        self._digest.update(struct.pack("<BI", kind_of_text, len(token_ids)))
        self._digest.update(_little_endian(token_ids))
        self._digest.update(_encoded(params, NEUTRAL))
        if confined_by is not None:
            self._digest.update(_encoded(confined_by))
        self._digest.update(struct.pack("<Q", seed))

    def of_answer(self, index: int) -> bytes:
        """The digest with the index of one answer."""
        digest = self._digest.copy()
        digest.update(struct.pack("<I", index))
        return digest.digest()


def output_sha256(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of generated token ids."""
    return hashlib.sha256(_little_endian(token_ids)).digest()


def receipt_sha256(receipt: pb.Receipt) -> bytes:
    """SHA-256 over the fields of a receipt, except `receipt_sha256` itself."""
    bare = pb.Receipt()
    bare.CopyFrom(receipt)
    bare.ClearField("receipt_sha256")
    return hashlib.sha256(_RECEIPT_DOMAIN + _encoded(bare)).digest()


def sealed(receipt: pb.Receipt) -> pb.Receipt:
    """The receipt with its own digest."""
    receipt.receipt_sha256 = receipt_sha256(receipt)
    return receipt


def contradiction(receipt: pb.Receipt) -> str:
    """Reason why no router can have made this receipt, as a sentence; "" if there is none."""
    for name in ("request_sha256", "output_sha256", "receipt_sha256"):
        if len(getattr(receipt, name)) != _SHA256_BYTES:
            return f"{name} has {len(getattr(receipt, name))} bytes, not {_SHA256_BYTES}"
    if receipt.receipt_sha256 != receipt_sha256(receipt):
        return "receipt_sha256 is not the digest of the other fields"
    expected = -(-receipt.output_tokens // receipt.logits_every) if receipt.logits_every else 0
    if len(receipt.logit_digests) != expected:
        return f"logit_digests has {len(receipt.logit_digests)} entries where its other fields ask for {expected}"
    return ""


def _little_endian(token_ids: Sequence[int]) -> bytes:
    """Four bytes for each id."""
    ids = token_ids if isinstance(token_ids, array) and token_ids.itemsize == 4 else array("I", token_ids)
    if sys.byteorder == "big":
        ids = copy.copy(ids)
        ids.byteswap()
    return ids.tobytes()


def _encoded(message: Message, neutral: Mapping[str, Any] | None = None) -> bytes:
    """The fields of a message that are present and not at their neutral value, in order of their numbers."""
    off = neutral or {}
    present = [
        (field, value) for field, value in message.ListFields() if not _is_neutral(field, value, off.get(field.name, 0))
    ]
    entries = sorted((field.number, _encoded_value(field, value)) for field, value in present)
    return struct.pack("<I", len(entries)) + b"".join(struct.pack("<I", number) + value for number, value in entries)


def _is_neutral(field: FieldDescriptor, value: Any, neutral: Any) -> bool:
    """True if a number or truth value is `neutral`; texts, lists and messages are present or not."""
    return field.type in _SCALARS and not field.is_repeated and bool(value == neutral)


def _encoded_value(field: FieldDescriptor, value: Any) -> bytes:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, item = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return _listed(_encoded_item(key, k) + _encoded_item(item, value[k]) for k in sorted(value))
    if field.is_repeated and field.type == FieldDescriptor.TYPE_FIXED64:
        return struct.pack("<I", len(value)) + _fixed64_bytes(value)
    if field.is_repeated and field.type in _SCALARS and field.type not in _FLOATS:
        return struct.pack(f"<I{len(value)}{_SCALARS[field.type][1:]}", len(value), *value)
    if field.is_repeated:
        return _listed(_encoded_item(field, item) for item in value)
    return _encoded_item(field, value)


def _fixed64_bytes(values: Sequence[int]) -> bytes:
    """Eight bytes for each, as the wire has them: there may be a hundred thousand, and they become no objects."""
    alone = pb.Receipt()
    alone.logit_digests.MergeFrom(values)
    size = 8 * len(values)
    return alone.SerializeToString()[-size:] if size else b""


def _listed(items: Iterable[bytes]) -> bytes:
    encoded = list(items)
    return struct.pack("<I", len(encoded)) + b"".join(encoded)


def _encoded_item(field: FieldDescriptor, value: Any) -> bytes:
    if isinstance(value, Message):
        return _encoded(value)
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<I", len(data)) + data
    # There is one zero: -0.0 + 0.0 is 0.0.
    return struct.pack(_SCALARS[field.type], value + 0.0 if field.type in _FLOATS else value)
