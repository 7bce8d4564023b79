"""Messages of calls by their kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from fissile.v1 import inference_pb2 as pb

T = TypeVar("T")
Request: TypeAlias = "pb.GenerateRequest | pb.ChatRequest"
Response: TypeAlias = "pb.GenerateResponse | pb.ChatResponse"
# Metadata as gRPC takes it: pairs of name and value.
SentMetadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"


@dataclass(frozen=True, slots=True)
class Unary(Generic[T]):
    """A call with one answer: the method's name, its request, and a function that reads the answer."""

    method: str
    request: Message
    made_of: Callable[[Any], T]
