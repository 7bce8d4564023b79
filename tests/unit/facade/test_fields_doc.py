"""The page of fields names each field of Responses and Messages, and the values that have no effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from facade.anthropic import messages
from facade.openai import responses

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/responses-and-messages.md"


def section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "body", "harmless"),
    [
        ("Responses", responses.ResponsesBody, responses.HARMLESS_FIELDS),
        ("Messages", messages.MessagesBody, messages.HARMLESS_FIELDS),
    ],
)
def test_page_has_each_field(title: str, body: Any, harmless: Mapping[str, Collection[Any] | None]) -> None:
    served, _, without_effect = section(title).partition("These fields have no effect")
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", "".join(re.findall(r"\n\|[^|]*\|", served))))
    assert named == {*body.__struct_fields__} - {*harmless}
    rows = dict(re.findall(r"\n\| `([a-z_]+)` \| ([^|]*) \|", without_effect))
    assert [*rows] == sorted(harmless)
    for name, values in harmless.items():
        if values is None:
            assert rows[name].startswith("all")
        else:
            shown = [f"`{value}`" if isinstance(value, str) else str(value).lower() for value in values]
            expected = ", ".join(shown) or "null"
            assert rows[name].partition(":")[0].replace("an empty list", "[]") == expected
