"""Client library of Fissile: answers and streams that outlive the router that they began at.

    from fissile.client import Client

    with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        print(client.chat("Tell me a story.", seed=7).text)
        with client.chat_stream("Tell me another one.") as stream:
            for event in stream:
                ...

Needs grpcio, protobuf and googleapis-common-protos alone.
"""

from fissile.client.aio import AsyncClient, AsyncStream
from fissile.client.arguments import ChatArguments, GenerateArguments, Metadata
from fissile.client.calls import Delta, Event, Finished, Result, tool
from fissile.client.connections import Connection
from fissile.client.embeddings import Embeddings
from fissile.client.errors import FieldProblem, FissileError, ReceiptError, ReceiptPart
from fissile.client.progress import Answer
from fissile.client.receipts import Receipt, Verification
from fissile.client.sync import Client, Stream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "ChatArguments",
    "Client",
    "Connection",
    "Delta",
    "Embeddings",
    "Event",
    "FieldProblem",
    "Finished",
    "FissileError",
    "GenerateArguments",
    "Metadata",
    "Receipt",
    "ReceiptError",
    "ReceiptPart",
    "Result",
    "Stream",
    "Verification",
    "tool",
]
