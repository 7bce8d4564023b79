"""Formats lists as aligned columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns rows of equal length in columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def as_json(messages: Iterable[Message]) -> str:
    """Formats messages as a JSON list on one line, with the proto's field names and fields at their defaults."""
    return json.dumps([as_fields(message) for message in messages], ensure_ascii=False)


def as_fields(message: Message) -> dict[str, Any]:
    """Converts a message to JSON values, with the proto's field names and fields at their defaults."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
