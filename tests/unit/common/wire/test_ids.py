"""Ids chosen by clients reach logs and terminals, so control characters are refused."""

from __future__ import annotations

import unicodedata

import pytest

from common.errors import InvalidFieldError
from common.wire.ids import check_id


@pytest.mark.parametrize("text", ["", "alice-job-1", "é" * 64, "a b", "任务 7", "🦊", "x" * 128, "~!@#$%^&*()\\'\""])
def test_valid_id_is_accepted(text: str) -> None:
    check_id("request_id", text, 128)


@pytest.mark.parametrize(
    "text", ["\x1b]0;x\x07\x1b[31m", "a\nb", "a\rb", "\x00", "\x7f", "\x9b31m", "a\u2028b", "\u202egnp.exe", "\u2066"]
)
def test_terminal_control_characters_are_refused(text: str) -> None:
    """Terminal escapes in ids."""
    with pytest.raises(InvalidFieldError, match=r"request_id has U\+[0-9A-F]{4} at position [01]; valid: no control"):
        check_id("request_id", text, 128)


def test_every_control_character_is_refused_in_ids() -> None:
    for code in range(0x3000):
        if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(chr(code)) in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        ):  # fmt: skip
            with pytest.raises(InvalidFieldError):
                check_id("request_id", f"a{chr(code)}", 128)


def test_length_and_emptiness() -> None:
    with pytest.raises(InvalidFieldError, match="has 130 bytes; valid: at most 128 bytes of UTF-8"):
        check_id("request_id", "é" * 65, 128)
    with pytest.raises(InvalidFieldError, match="router_id is empty; valid: 1 to 128"):
        check_id("router_id", "", 128, required=True)
