"""`fissile verify`: runs a finished request again and compares the answer with its receipt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import click
from fissile.client import AsyncClient, FissileError, ReceiptError, Verification
from fissile.v1 import inference_pb2 as pb

from common.cli.client.proof import read_proof
from common.cli.core.client import Credentials, call_failed, client_arguments
from common.cli.core.errors import CommandError
from common.cli.core.options import argument, options
from common.cli.core.tls_options import with_credentials

# Verdict -> exit code, and what it means.
_OUTCOMES: Final = {
    pb.REPLAY_VERDICT_EQUAL: (0, "equal"),
    pb.REPLAY_VERDICT_LOGITS_DIFFER: (1, "the logits differ"),
    pb.REPLAY_VERDICT_CHOICE_DIFFERS: (1, "another token was chosen"),
    pb.REPLAY_VERDICT_OTHER_REQUEST: (2, "this is not the request of the receipt"),
    pb.REPLAY_VERDICT_BAD_RECEIPT: (2, "the receipt was altered, or is none"),
}


async def ask_replay(
    address: str, proof: pb.ReplayRequest, worker: str, timeout_s: float, credentials: Credentials
) -> Verification:
    """Asks the router at `address` to replay a request, unless its receipt contradicts itself.

    Raises:
        CommandError: the call failed, or the receipt is whole and the token ids beside it are of another answer.
    """
    async with AsyncClient(**client_arguments([address], credentials)) as client:
        try:
            return await client.verify(proof, worker_id=worker, timeout_s=timeout_s)
        except ReceiptError as error:
            raise CommandError(f"the answer was altered: {error.message}") from None
        except FissileError as error:
            raise call_failed(error, address) from error


def as_dict(found: Verification) -> dict[str, Any]:
    """Converts an outcome to JSON values."""
    return {
        "verdict": pb.ReplayVerdict.Name(found.verdict).removeprefix("REPLAY_VERDICT_").lower(),
        "position": found.position,
        "detail": found.detail,
        "worker_id": found.worker_id,
    }


@click.command()
@argument("receipt", type=click.Path(path_type=Path))
@options("verify")
@with_credentials
def verify(
    receipt: Path,
    request: Path | None,
    worker: str,
    address: str,
    credentials: Credentials,
    timeout: float,
    as_json: bool,
) -> None:
    """Run the request of RECEIPT again and compare the answer with it, to the bit.

    RECEIPT is a file of `fissile generate --receipt`, or the JSON of a Receipt. Exit code: 0 equal, 1 the answer
    differs, 2 the receipt was altered, is of another request, or cannot be replayed here, 3 it may work later.
    """
    proof = read_proof(receipt, request)
    found = asyncio.run(ask_replay(address, proof, worker, timeout, credentials))
    code, meaning = _OUTCOMES.get(found.verdict, (1, f"verdict {found.verdict}, which this version does not know"))
    where = f" on worker {found.worker_id}" if found.worker_id else ""
    click.echo(json.dumps(as_dict(found)) if as_json else f"{meaning}: {found.detail}{where}")
    click.get_current_context().exit(code)
