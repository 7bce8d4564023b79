"""Files with proofs: JSON of a ReplayRequest (receipt, request and token ids), or of a Receipt alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fissile.v1 import inference_pb2 as pb
from google.protobuf import json_format
from google.protobuf.message import Message

from common.cli.core.client import CommandAnswer
from common.cli.core.errors import CommandError


def write_proof(path: Path, answer: CommandAnswer) -> None:
    """Writes the proof of an answer that was asked for with a receipt; a new file is for its owner alone.

    Raises:
        CommandError: there is no receipt, or the file cannot be written.
    """
    if answer.receipt is None:
        raise CommandError("the answer has no receipt: workers of two numerics classes have made it", 1)
    text = json_format.MessageToJson(answer.receipt.proof, preserving_proto_field_name=True, indent=1)
    try:
        # The file has the prompt and the answer, which other users must not read.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CommandError(f"the receipt cannot be written to {path}: {error.strerror}", 1) from None


def read_proof(path: Path, request: Path | None) -> pb.ReplayRequest:
    """Reads a proof from a file.

    Args:
        path: of a proof, or of a receipt alone.
        request: of the request, as JSON of GenerateRequest or ChatRequest; None for the one in the proof.

    Raises:
        CommandError: a file cannot be read, or there is no request.
    """
    given, proof = _object(path), pb.ReplayRequest()
    _parse(path, given, proof if "receipt" in given else proof.receipt)
    if request is not None:
        asked = _object(request)
        proof.ClearField("request")
        _parse(request, asked, proof.chat if "messages" in asked else proof.generate)
    if proof.WhichOneof("request") is None:
        raise CommandError(f"{path} has a receipt alone: give the request too, with --request FILE")
    return proof


def _object(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise CommandError(f"{path} is not a JSON object")
    return given


def _parse(path: Path, given: dict[str, Any], message: Message) -> None:
    try:
        json_format.ParseDict(given, message)
    except json_format.ParseError as error:
        raise CommandError(f"{path} is not JSON of {message.DESCRIPTOR.name}: {error}") from None
