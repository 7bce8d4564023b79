"""Fields that several APIs have: parts whose form depends on their `type`, seeds, and receipts.

Parts of a list, such as items of a conversation, are read one by one, so that a refusal names the part by its index.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fissile.v1 import inference_pb2 as pb
from google.protobuf.json_format import MessageToDict

from common.errors import InvalidFieldError
from facade.http.bodies import Body, UInt32, decode_part

# Default of a part that may be absent: msgspec allows no union with `Raw`.
ABSENT: Final = msgspec.Raw()
# Most characters of a value in an error.
_SHOWN: Final = 64


class TypedPart(msgspec.Struct):
    """The `type` of a part; its other fields are read later."""

    type: str = ""


def type_of(part: msgspec.Raw, default: str = "") -> str:
    """The type of a part; `default` if it has none.

    Raises:
        ApiError: the part is not an object, or its type is not a text.
    """
    return decode_part(part, TypedPart).type or default


def is_given(part: msgspec.Raw) -> bool:
    """True if a part is neither absent nor null."""
    return bytes(part) not in (b"", b"null")


def unserved_type(kind: str, valid: str) -> InvalidFieldError:
    """The error for a part of a type that is not served."""
    return InvalidFieldError("type", f"is {kind[:_SHOWN]!r}, which is not served here", valid)


def object_text(path: str, raw: msgspec.Raw) -> str:
    """A JSON object as it was written, because the order of names and the form of numbers matter.

    Raises:
        InvalidFieldError: the value is not an object; the error names `path`.
    """
    text = bytes(raw).decode().strip()
    if not text.startswith("{"):
        raise InvalidFieldError(path, "is another JSON value", "a JSON object")
    return text


def unsigned_seed(seed: int | None) -> int | None:
    """A seed as 64 bits without a sign: other services have signed seeds.

    Raises:
        InvalidFieldError: it has more than 64 bits.
    """
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise InvalidFieldError("seed", "has more than 64 bits", "-2^63 to 2^64 - 1")
    return None if seed is None else seed % (1 << 64)


class ReceiptField(Body):
    """Coverage of a receipt; `receipt: true` asks for one without logits."""

    logits_every: UInt32 = 0


def receipt_argument(given: bool | ReceiptField | None) -> bool | dict[str, int]:
    """The field `receipt` of a body as an argument of the client library."""
    return {"logits_every": given.logits_every} if isinstance(given, ReceiptField) else bool(given)


def fissile_facts(finish: pb.Finish) -> dict[str, Any]:
    """Fissile's own field of an answer: what proves it."""
    facts: dict[str, Any] = {"exact": finish.exact, "weights_digest": finish.weights_digest}
    if finish.HasField("receipt"):
        facts["receipt"] = MessageToDict(finish.receipt, preserving_proto_field_name=True)
    return facts
