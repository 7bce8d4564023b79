"""Decodes token ids to text, incrementally.

Every token stands for the same bytes wherever it occurs, except that SentencePiece drops the space of a text's first
token. So a stream concatenates the bytes of its tokens and decodes all whole UTF-8 characters. This costs O(1) per
token and never fails, whereas `tokenizers.decoders.DecodeStream` raises "Invalid prefix" and holds back everything
after a broken character. For a text that continues another, only one fact about the earlier text matters: that it is
not empty.

The result equals `tokenizers.Tokenizer.decode` of all ids at once, with one exception. If byte-fallback tokens form
invalid UTF-8, that decoder replaces the whole run of byte tokens, valid characters included, which a stream cannot take
back. Here only the invalid bytes become U+FFFD.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import tokenizers

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Number of tokens before a text that are checked for text, as in vLLM. Nearly always the last one has some; the others
# serve prompts that end with special tokens, such as `</s><s>`. The bound makes the cost independent of the prompt.
TAIL: Final = 5


class Detokenizer:
    """Decodes one stream of token ids. The results of all `push` calls and of `flush` make up the text.

    Args:
        token_bytes: bytes of the tokenizer's tokens.
        skip: ids that are not part of a text.
        behind: ids that the stream continues. If one of the last `TAIL` is text, the stream's first token keeps its
            space. Bytes of a character that `behind` leaves unfinished never appear in this text.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip: frozenset[int], behind: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._skip = skip
        self._started = any(id not in skip and token_bytes.inner(id) for id in reversed(behind[-TAIL:]))
        # Bytes of a character that no token has completed yet.
        self._begun = b""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` complete, in whole characters."""
        if len(ids) == 1 and self._started and not self._begun and ids[0] not in self._skip:
            text = self._bytes.whole(ids[0])
            if text is not None:
                return text
        return self._decode(b"".join([self._piece(id) for id in ids if id not in self._skip]), final=False)

    def flush(self) -> str:
        """Returns the rest at the end of the stream: U+FFFD for an unfinished character, usually nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._begun + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._begun = data[used:]
        return text

    def _piece(self, id: int) -> bytes:
        if self._started:
            return self._bytes.inner(id)
        # An unknown id has no bytes, so the text has not begun.
        self._started = bool(self._bytes.inner(id))
        return self._bytes.first(id)


class TokenBytes:
    """Bytes of each token, computed on first use. Shared by all streams of a tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The pickled state of a decoder is its JSON. That of the whole tokenizer is megabytes long.
        decoder = tokenizer.decoder
        kinds = set() if decoder is None else _decoder_kinds(json.loads(decoder.__getstate__()))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._inner: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        self._anchor = () if self._byte_level else (_visible_token(tokenizer),)
        self._anchor_text = self._decode(*self._anchor)

    def inner(self, id: int) -> bytes:
        """Bytes of a token that follows another; empty for an unknown id."""
        piece = self._inner.get(id)
        if piece is None:
            piece = self._inner[id] = self._compute(id)
        return piece

    def whole(self, id: int) -> str | None:
        """Text of a token that follows another and is whole characters; None for any other."""
        try:
            return self._whole[id]
        except KeyError:
            pass
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self.inner(id).decode()
        self._whole[id] = text
        return text

    def first(self, id: int) -> bytes:
        """Bytes of a token at the beginning of a text."""
        inner = self.inner(id)
        # A byte token that is half a character cannot be decoded alone, and is not a space.
        if self._byte_level or (not inner.isascii() and self._byte_value(id) is not None):
            return inner
        return self._decode(id).encode()

    def _compute(self, id: int) -> bytes:
        if self._byte_level:
            return byte_level_bytes(self._tokenizer.id_to_token(id) or "")
        value = self._byte_value(id)
        if value is not None:
            return bytes([value])
        return self._decode(*self._anchor, id)[len(self._anchor_text) :].encode()

    def _byte_value(self, id: int) -> int | None:
        match = BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(id) or "") if self._byte_fallback else None
        return int(match[1], 16) if match else None

    def _decode(self, *ids: int) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    """Type names of a decoder, and of its parts if it is a Sequence."""
    kinds = {str(decoder["type"])}
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds


def _visible_token(tokenizer: tokenizers.Tokenizer) -> int:
    """A token whose text does not begin with a space: a token after it is decoded as inside a text."""
    ids = sorted(tokenizer.get_vocab().values())
    return next((id for id in ids if tokenizer.decode([id, id])[:1].strip()), ids[0])


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable characters for bytes, as `bytes_to_unicode` makes them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_LEVEL: Final = _byte_level_table()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary."""
    values = [BYTE_LEVEL.get(char) for char in token]
    known = [value for value in values if value is not None]
    # A token with any character outside the table is an added token, written as it is.
    return bytes(known) if len(known) == len(values) else token.encode()
