"""The model's tokenizer, read from its Hugging Face files (`tokenizer.json` is the ground truth).

Invariants:
    * Text of a user never becomes a special token: `encode(text)` treats "<|im_end|>" as the ten characters it is.
      Special means flagged so in the files, or named as one (`eos_token`, ...) in `tokenizer_config.json`. Added tokens
      without the flag (`<think>` of Qwen3) are ordinary vocabulary and are matched.
    * A rendered chat keeps the special tokens that its template wrote, not those that the input brought: the template
      marks the latter (`mark_special`), and `encode(text, allow_special=True)` encodes marked tokens as text. The
      result is that of `apply_chat_template(..., sanitize_control_tokens=True)` in transformers.
    * Only `encode_batch_fast` is called, because `encode` holds the GIL (design-details section 7).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import tokenizers

from common.text.detokenizer import Detokenizer, TokenBytes

TOKENIZER_FILES: Final = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Noncharacters are reserved by Unicode for use inside a program, so no text has them.
MARK_START: Final = "\ufdd0"
MARK_END: Final = "\ufdd1"


class TokenizerError(Exception):
    """The tokenizer files can not be used; the message is one line that says what is wrong."""


def tokenizer_files(folder: str | Path) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint folder by name, as far as they exist.

    Raises:
        TokenizerError: there is no `tokenizer.json`.
    """
    paths = {name: Path(folder) / name for name in TOKENIZER_FILES}
    if not paths["tokenizer.json"].is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def files_sha256(files: Mapping[str, bytes]) -> str:
    """Lower-case hex sha256 over name, length and bytes of every file, in order of their names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "little"))
        digest.update(files[name])
    return digest.hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """One of the files as a JSON object; empty when it is absent.

    Raises:
        TokenizerError: it is no JSON object.
    """
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise TokenizerError(f"{name} is not JSON: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{name} is not a JSON object")
    return content


def named_special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of the tokenizer's configuration: what chat templates see by these names."""
    sources = (read_json(files, "tokenizer_config.json"), read_json(files, "special_tokens_map.json"))
    tokens = {}
    for name in NAMED_TOKENS:
        value = next((source[name] for source in sources if source.get(name) is not None), None)
        if value is not None:
            tokens[name] = str(value["content"]) if isinstance(value, dict) else str(value)
    return tokens


def special_tokens(files: Mapping[str, bytes]) -> frozenset[str]:
    """The texts that stand for special tokens."""
    config = read_json(files, "tokenizer_config.json")
    added = [
        *read_json(files, "tokenizer.json").get("added_tokens", ()),
        *config.get("added_tokens_decoder", {}).values(),
    ]
    flagged = {str(token["content"]) for token in added if token.get("special")}
    return frozenset(flagged | set(named_special_tokens(files).values())) - {""}


def mark_special(text: str, pattern: re.Pattern[str]) -> str:
    """`text` with every match of `pattern` (see `special_pattern`) marked as text that only looks special."""
    return pattern.sub(f"{MARK_START}\\g<0>{MARK_END}", text)


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first; nothing when there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class Tokenizer:
    """Text to token ids and back. Immutable; safe to use from several threads.

    Attributes:
        sha256: digest of the files, lower-case hex (`files_sha256`).
        vocab_size: 1 + the highest token id.
        special_ids: ids that `decode` leaves out by default.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        special = special_tokens(files)
        self._parsing = _load(files, special)
        self._plain = _load(files, special)
        self._plain.encode_special_tokens = True
        self.sha256 = files_sha256(files)
        self.vocab_size = 1 + max(self._parsing.get_vocab().values(), default=-1)
        self.special_ids = frozenset(
            id for id, token in self._parsing.get_added_tokens_decoder().items() if token.special
        )
        self._special = special_pattern(special)
        self._marked = re.compile(f"{MARK_START}({self._special.pattern}){MARK_END}|[{MARK_START}{MARK_END}]")
        self._frame = self._text_frame(files)
        self._unknown = self._parsing.token_to_id(named_special_tokens(files).get("unk_token", ""))
        self._newline = self._ids(self._parsing, "\n")
        self._bytes = TokenBytes(self._parsing)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Builds a tokenizer from the contents of `TOKENIZER_FILES`.

        Raises:
            TokenizerError: `tokenizer.json` is missing or one of the files can not be used.
        """
        return cls(files)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Builds a tokenizer from a checkpoint folder.

        Raises:
            TokenizerError: as `from_files`.
        """
        return cls(tokenizer_files(folder))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Plain text gets what the tokenizer's post-processor adds (a beginning-of-sequence token with Llama), and its
        special tokens are text. With `allow_special`, `text` is a rendered chat: special tokens are parsed except where
        marked, and nothing is added, since the template writes its own beginning.

        Raises:
            TokenizerError: the vocabulary gives no way to write a special token as text.
        """
        if allow_special:
            return self._encode_chat(text)
        prefix, suffix = self._frame
        return [*prefix, *self._text_ids(text), *suffix]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; equal to what `decode_stream` gives in pieces. Unknown ids are left out."""
        stream = self.decode_stream(skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    def decode_stream(self, *, skip_special: bool = True) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(self._bytes, skip=self.special_ids if skip_special else frozenset())

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary entry of each id, for people to read; empty for an id that has none."""
        return [self._parsing.id_to_token(id) or "" for id in ids]

    def _encode_chat(self, text: str) -> list[int]:
        # [text, marked token, text, ..., text], with None in place of the token where a mark stands alone: a template
        # may cut a marked token in two, and the halves must not join into a token again.
        first, *pieces = self._marked.split(text)
        ids = self._ids(self._parsing, first)
        for i, piece in enumerate(pieces):
            if piece:
                ids += self._text_ids(piece, inner=True) if i % 2 == 0 else self._inner_ids(self._parsing, piece)
        return ids

    def _text_ids(self, text: str, *, inner: bool = False) -> list[int]:
        """Ids of `text` with nothing parsed; `inner` when more text is before it."""
        ids = self._inner_ids(self._plain, text) if inner else self._ids(self._plain, text)
        named = {self._parsing.token_to_id(token) for token in self._special.findall(text)} - {self._unknown}
        return ids if named.isdisjoint(ids) else self._split_ids(text, named, inner)

    def _split_ids(self, text: str, named: Set[int | None], inner: bool) -> list[int]:
        """As `_text_ids` where the vocabulary has special tokens as pieces (Unigram): cuts each after a character."""
        cut = self._special.sub(lambda match: f"{match[0][0]}{MARK_START}{match[0][1:]}", text)
        ids: list[int] = []
        for piece in cut.split(MARK_START):
            ids += self._inner_ids(self._plain, piece) if inner or ids else self._ids(self._plain, piece)
        if not named.isdisjoint(ids):
            raise TokenizerError("a special token in the text can not be encoded as text with this vocabulary")
        return ids

    def _inner_ids(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        """Ids of text that continues other text: without the space that SentencePiece puts before a beginning."""
        ids = self._ids(tokenizer, "\n" + text)
        size = len(self._newline)
        return ids[size:] if ids[:size] == self._newline else self._ids(tokenizer, text)

    @staticmethod
    def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _text_frame(self, files: Mapping[str, bytes]) -> tuple[list[int], list[int]]:
        """What goes before and after plain text: what the configuration says, else what the post-processor does."""
        config = read_json(files, "tokenizer_config.json")
        if "add_bos_token" in config or "add_eos_token" in config:
            names = named_special_tokens(files)
            bos = names.get("bos_token", "") if config.get("add_bos_token") else ""
            eos = names.get("eos_token", "") if config.get("add_eos_token") else ""
            found = [[self._parsing.token_to_id(token)] if token else [] for token in (bos, eos)]
            return [id for id in found[0] if id is not None], [id for id in found[1] if id is not None]
        whole = list(self._parsing.encode_batch_fast(["a"], add_special_tokens=True)[0].ids)
        bare = self._ids(self._parsing, "a")
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]


def _load(files: Mapping[str, bytes], special: frozenset[str]) -> tokenizers.Tokenizer:
    if "tokenizer.json" not in files:
        raise TokenizerError("there is no tokenizer.json; a fast tokenizer is needed")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the library raises plain Exception, ValueError or a Rust panic's
        raise TokenizerError(f"tokenizer.json can not be read: {_one_line(error)}") from None
    # A file saved during training may truncate prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in special - known if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in sorted(missing)])
    return tokenizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
