"""Lower bounds of a text's number of tokens, and places where a long text can be cut without changing its tokens.

The tokenizer library encodes a text in one call that cannot be interrupted and takes 150 to 200 bytes of memory per
byte of text. Both results are computed from a tokenizer's files. If a file has an unknown part, the result is the safe
one: a lower bound of 0, and no cut.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from common.limits import MAX_KNOWN_CUTS
from common.text.detokenizer import BYTE_LEVEL, BYTE_TOKEN, byte_level_bytes

Ids = Callable[[str], Sequence[int]]

# Characters of a piece up to the next cut, and of one search for a cut. A piece takes about 10 to 30 ms.
PIECE: Final = 32_768
# Prefix for encoding a piece that continues others, because each cut is after a letter.
ANCHOR: Final = "a"
_ASCII: Final = range(0x80)
# Bytes of the marks in rendered chats (`tokenizer.MARK_START`); no token contains them.
_MARK_BYTES: Final = b"\xef\xb7\x90\x91"
_BLANKS: Final = b" \t\n\v\f\r"


class TokenFloor:
    """Computes a lower bound of the number of tokens of a text.

    A token of n bytes covers n bytes of text. So a byte counts for at least 1 / n tokens, where n is the length of the
    longest token that contains this byte. The sum over a text is the bound. It is tight for digits, because tokens have
    at most three, and loose for letters.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._weights = _byte_weights(content)
        # Canonical composition merges an ASCII character with a following mark.
        self._composes = any(kind == "NFC" for kind, _ in _parts(content.get("normalizer"), "normalizers"))

    def tokens(self, text: str, enough: float = float("inf")) -> int:
        """Returns a lower bound for the number of tokens of `text`; stops counting at `enough`."""
        total = 0.0
        for start in range(0, len(text), PIECE):
            total += self._piece(text[start : start + PIECE])
            if total > enough + 1:
                break
        # Rounds down, so that errors of float sums never exceed the true bound.
        return max(0, int(total * (1 - 1e-9)))

    def _piece(self, text: str) -> float:
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        total = float(np.bincount(data, minlength=256) @ self._weights)
        if self._composes:
            wide = data >= 0x80
            before = data[:-1][wide[1:]]
            # The last byte has no successor.
            total -= float(self._weights[before].sum() + self._weights[data[-1:]].sum())
        return total


# Where texts may be cut, by tokenizer. To find it takes 50 ms, and routers read a tokenizer again when weights roll.
_known_followers: Final[dict[tuple[bytes | str, ...], str]] = {}


class Cuts:
    """Cuts texts at places where the tokens of the pieces are the tokens of the whole.

    A cut is between a letter or digit and a character that no token appends to one: a space, an end of line, an
    ideographic comma or stop. Such a character is used only if the pre-tokenizer always ends a word there or no token
    crosses the place, and if hostile probes have the same tokens whole and in pieces.

    Args:
        content: content of tokenizer.json.
        encoders: all functions that encode pieces, without a beginning-of-sequence token.
        pre_tokenize: returns the ends of a text's words; None without a pre-tokenizer.
        added: texts of added tokens, which no cut may touch.
        sha256: digest of tokenizer.json. Of equal ones with the same added tokens, only the first is probed.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        encoders: Sequence[Ids],
        pre_tokenize: Callable[[str], Iterable[int]] | None,
        added: Sequence[str],
        sha256: bytes,
    ) -> None:
        key: tuple[bytes | str, ...] = (sha256, *added)
        followers = _known_followers.get(key)
        if followers is None:
            followers = "" if _looks_around(content) else "".join(_followers(content, encoders, pre_tokenize, added))
            if len(_known_followers) >= MAX_KNOWN_CUTS:
                _known_followers.clear()
            _known_followers[key] = followers
        self._cut = re.compile(f"[^\\W_](?=[{followers}])") if followers else None

    def split(self, text: str, most_bytes: int | None = None) -> Iterator[str]:
        """Yields the pieces of `text`, each of PIECE characters and up to the next cut.

        Raises:
            UncutTextError: a piece has more than `most_bytes` bytes.
        """
        start = 0
        while start < len(text):
            end = self._next(text, start, most_bytes)
            yield text[start:end] if start or end < len(text) else text
            start = end
        if not text:
            yield text

    def _next(self, text: str, start: int, most_bytes: int | None) -> int:
        """Returns the end of the piece that begins at `start`."""
        for near in range(start + PIECE, len(text), PIECE):
            if most_bytes is not None and near - start > most_bytes:
                raise UncutTextError(most_bytes)
            # In steps, because no other thread runs during a search.
            found = None if self._cut is None else self._cut.search(text, near, min(near + PIECE, len(text)))
            if found is not None and found.end() < len(text):
                return self._bounded(text, start, found.end(), most_bytes)
        return self._bounded(text, start, len(text), most_bytes)

    @staticmethod
    def _bounded(text: str, start: int, end: int, most_bytes: int | None) -> int:
        if most_bytes is not None and 4 * (end - start) > most_bytes < len(text[start:end].encode("utf-8", "replace")):
            raise UncutTextError(most_bytes)
        return end


class UncutTextError(Exception):
    """A part of a text without a place to cut it is too long to be encoded at once."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"has more than {most_bytes} bytes without a letter before a space")


def _parts(content: Any, inner: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Type and settings of a normalizer or pre-tokenizer, or of the parts of a Sequence."""
    if not content:
        return
    if content["type"] == "Sequence":
        for part in content[inner]:
            yield from _parts(part, inner)
    else:
        yield str(content["type"]), content


# Lower bound of the number of tokens.


def _byte_weights(content: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Part of a token that each byte counts for at least; 0 if unknown."""
    none = np.zeros(256)
    normalizers = list(_parts(content.get("normalizer"), "normalizers"))
    words = list(_parts(content.get("pre_tokenizer"), "pretokenizers"))
    if not all(map(_keeps_all, normalizers)) or not all(map(_splits_only, words)):
        return none
    model, kinds = content["model"], {kind for kind, _ in words}
    if model.get("type", "BPE") not in ("BPE", "Unigram") or model.get("continuing_subword_prefix"):
        return none
    tokens = vocabulary(model)
    added = content.get("added_tokens", ())
    covered = _covered(tokens, byte_level="ByteLevel" in kinds, byte_fallback=bool(model.get("byte_fallback")))
    if any(kind == "NFC" for kind, _ in normalizers):
        covered &= set(_ASCII)
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        covered &= set(_ASCII) - set(_BLANKS)
    spelled = [_spelled(token, "ByteLevel" in kinds, bool(model.get("byte_fallback"))) for token in tokens]
    longest = _longest_with_byte([*spelled, *(str(token["content"]).encode() for token in added)])
    for byte in covered.difference(_MARK_BYTES):
        # SentencePiece spells a space as a character of three bytes, and a text may contain either.
        none[byte] = 1 / max(longest[byte], longest[0xE2] if byte == 0x20 else 1)
    return none


def _keeps_all(part: tuple[str, Mapping[str, Any]]) -> bool:
    """True if a normalizer keeps ASCII, or only spells spaces as SentencePiece does."""
    kind, settings = part
    if kind == "Replace":
        return bool(settings["pattern"] == {"String": " "} and settings["content"] == "▁")
    return kind in ("NFC", "Prepend")


def _splits_only(part: tuple[str, Mapping[str, Any]]) -> bool:
    """True if a pre-tokenizer splits text without dropping any of it."""
    kind, settings = part
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and settings["behavior"] != "Removed")


def vocabulary(model: Mapping[str, Any]) -> list[str]:
    """Tokens of tokenizer.json's `model`, in its spelling."""
    vocab = model["vocab"]
    return list(vocab) if isinstance(vocab, Mapping) else [str(piece) for piece, _ in vocab]


def _covered(tokens: list[str], *, byte_level: bool, byte_fallback: bool) -> set[int]:
    """Bytes that are never dropped and never share an unknown token with others."""
    known = set(tokens)
    if byte_level:
        return set(range(256)) if known.issuperset(BYTE_LEVEL) else set()
    if byte_fallback and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return set(range(256))
    return {byte for byte in _ASCII if ("▁" if byte == 0x20 else chr(byte)) in known}


def _spelled(token: str, byte_level: bool, byte_fallback: bool) -> bytes:
    """Bytes of text of a token; a space of SentencePiece counts as the three bytes of its character."""
    if byte_level:
        return byte_level_bytes(token)
    match = BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    return bytes([int(match[1], 16)]) if match else token.encode("utf-8", "surrogatepass")


def _longest_with_byte(tokens: list[bytes]) -> list[int]:
    """Length of the longest token with each byte; 1 for a byte that no token has."""
    longest, left = [1] * 256, set(range(256))
    for token in sorted(tokens, key=len, reverse=True):
        for byte in left.intersection(token):
            longest[byte] = len(token)
            left.discard(byte)
    return longest


# Cuts.

_BLANK_FOLLOWERS: Final = (" ", "\\n")
_FOLLOWERS: Final = (*_BLANK_FOLLOWERS, "，。、")
_LEFT: Final = ("word", "a", "Z", "7", "42", "é", "中文", "слово", "ا", "ｗ", "½", "don't", "x_1", "ﬁ", "한")
_RIGHT: Final = (
    "",
    "next",
    "  two",
    "\n\n  three\r\n",
    "\t.",
    " 'll",
    "123 4567",
    "...\n",
    "\u0301x",
    "😀👩\u200d💻",
    "▁▁",
    "\u3000",
)
_KNOWN_WORDS: Final = frozenset(
    ("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer")
)
_CLASS: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_LOOKS_BACK: Final = re.compile(r"\(\?<|\\[bBAzZGK]|(?<!\\)[\^$]")


def _looks_around(content: Mapping[str, Any]) -> bool:
    """True if the end of a word may depend on distant or earlier text."""
    parts = [*_parts(content.get("normalizer"), "normalizers"), *_parts(content.get("pre_tokenizer"), "pretokenizers")]
    patterns = [part["pattern"].get("Regex", "") for _, part in parts if isinstance(part.get("pattern"), Mapping)]
    unknown = {kind for kind, _ in _parts(content.get("pre_tokenizer"), "pretokenizers")} - _KNOWN_WORDS
    model = content["model"]
    affixed = model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return bool(affixed and model.get("type", "BPE") == "BPE") or bool(unknown) or any(
        _LOOKS_BACK.search(_CLASS.sub("", pattern)) for pattern in patterns
    )  # fmt: skip


def _followers(
    content: Mapping[str, Any],
    encoders: Sequence[Ids],
    pre_tokenize: Callable[[str], Iterable[int]] | None,
    added: Sequence[str],
) -> Iterator[str]:
    """Characters, in the syntax of a pattern's class, in front of which a text may be cut after a letter or digit."""
    anchored = [(encode, len(encode(ANCHOR))) for encode in encoders]
    strips = any(token.get("rstrip") and token["content"][-1:].isalnum() for token in content.get("added_tokens", ()))
    for follower in _FOLLOWERS:
        cut = re.compile(f"[^\\W_](?=[{follower}])")
        # An added token that strips the blanks behind it must see them in its piece.
        if any(map(cut.search, added)) or (strips and follower in _BLANK_FOLLOWERS):
            continue
        probes = list(_probes(follower.replace("\\n", "\n"), added))
        ends = pre_tokenize is not None and all(len(left) in set(pre_tokenize(left + right)) for left, right in probes)
        if not ends and _crossed(content, cut):
            continue
        if all(_same(encode, anchor, left, right) for encode, anchor in anchored for left, right in probes):
            yield follower


def _probes(followers: str, added: Sequence[str]) -> Iterator[tuple[str, str]]:
    before = itertools.cycle(("", " ", "\n", "  "))
    for follower in followers:
        for left, right in itertools.product(_LEFT, _RIGHT):
            yield next(before) + left, follower + right
        for token in added[:64]:
            yield f"{token}a", f"{follower}{token}"
            if token[-1:].isalnum():
                yield token, f"{follower}d"
            yield f"a{token}b", f"{follower}c{token} d"


def _crossed(content: Mapping[str, Any], cut: re.Pattern[str]) -> bool:
    """True if a token may cross such a cut. True for byte-level vocabularies and Unigram, which are not analyzed."""
    model = content["model"]
    words = _parts(content.get("pre_tokenizer"), "pretokenizers")
    if model.get("type", "BPE") != "BPE" or any(kind == "ByteLevel" for kind, _ in words):
        return True
    return cut.search("\0".join(vocabulary(model)).replace("▁", " ")) is not None


def _same(encode: Ids, anchor: int, left: str, right: str) -> bool:
    return [*encode(left), *encode(ANCHOR + right)[anchor:]] == list(encode(left + right))
