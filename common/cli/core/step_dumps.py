"""Reads dumps of steps."""

from __future__ import annotations

import json
from pathlib import Path

from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.json_format import ParseDict, ParseError

from common.cli.core.errors import CommandError


def read_steps(dump: Path) -> list[wpb.Step]:
    """The steps of a dump, or of the output of `fissile steps --json`.

    Raises:
        CommandError: the file cannot be read, has no step, or a line is none; names the line.
    """
    try:
        lines = dump.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{dump} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise CommandError(f"{dump}, line {number} is not a step: it is not a JSON object")
            found.append(ParseDict(fields, wpb.Step(), ignore_unknown_fields=True))
        except (ValueError, ParseError) as error:
            raise CommandError(f"{dump}, line {number} is not a step: {error}") from None
    if not found:
        raise CommandError(f"{dump} has no step")
    return found
