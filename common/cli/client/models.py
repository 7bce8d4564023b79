"""`fissile models`: what a running router serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click
import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.core import output
from common.cli.core.client import NO_CREDENTIALS, Credentials, call_failed, open_channel
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials

_HEADINGS = ("MODEL", "ARCHITECTURE", "LENGTH", "VOCABULARY", "SERVES", "WORKERS", "WEIGHTS", "TOKENIZER")
_DIGEST_CHARACTERS = 12
# Shown of what models can do.
_SERVED = {
    "generate": pb.CAPABILITY_GENERATE,
    "chat": pb.CAPABILITY_CHAT,
    "embed": pb.CAPABILITY_EMBED,
    "rerank": pb.CAPABILITY_RERANK,
}


async def list_models(address: str, timeout_s: float, credentials: Credentials = NO_CREDENTIALS) -> Sequence[pb.Model]:
    """Asks the router at `address` for its models.

    Raises:
        CommandError: the call failed.
    """
    async with open_channel(address, credentials) as channel:
        stub = InferenceServiceStub(channel)
        try:
            asked = pb.ListModelsRequest()
            return (await stub.ListModels(asked, timeout=timeout_s, metadata=credentials.metadata)).models
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, address) from error


def as_table(models: Sequence[pb.Model]) -> str:
    """The models as aligned columns with headings.

    Raises:
        CommandError: there are none (exit code 3).
    """
    if not models:
        raise CommandError("no model is served yet: no worker has come up", 3)
    return output.aligned([_HEADINGS, *map(_row, models)])


def _row(model: pb.Model) -> tuple[str, ...]:
    return (
        model.name,
        model.architecture,
        str(model.max_model_len),
        str(model.vocab_size),
        ",".join(name for name, capability in _SERVED.items() if capability in model.capabilities),
        str(model.ready_workers),
        model.weights_digest[:_DIGEST_CHARACTERS],
        model.tokenizer_sha256[:_DIGEST_CHARACTERS],
    )


@click.command()
@options("models")
@with_credentials
def models(address: str, credentials: Credentials, timeout: float, as_json: bool) -> None:
    """List the models that a running router serves."""
    found = asyncio.run(list_models(address, timeout, credentials))
    click.echo(output.as_json(found) if as_json else as_table(found))
