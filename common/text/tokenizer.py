"""The model's tokenizer, read from its Hugging Face files by transformers (`common.text.tokenizer_reading`).

Invariants:
    * Text of a user never becomes a special token: `encode(text)` treats "<|im_end|>" as the ten characters it is.
      Special means flagged so in the files, or named as one (`eos_token`, ...) in `tokenizer_config.json`. Added tokens
      without the flag (`<think>` of Qwen3) are ordinary vocabulary and are matched.
    * A rendered chat keeps the special tokens that its template wrote, not those that the input brought: the template
      marks the latter (`mark_special`), and `encode(text, allow_special=True)` encodes marked tokens as text. The
      result is that of `apply_chat_template(..., sanitize_control_tokens=True)` in transformers.
    * A text has the same tokens whole and in pieces (`encode_pieces`).
    * Only `encode_batch_fast` is called, because `encode` holds the GIL (docs/explanation/architecture.md).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from common.errors import InvalidFieldError
from common.files import UnreadableFileError, parse_json, read_file
from common.limits import MAX_BAD_WORD_TOKENS, MAX_TOKEN_IDS, MAX_TOKENIZER_BYTES
from common.params.sampling_checks import TokenSequences
from common.text.detokenizer import Detokenizer, TokenBytes
from common.text.pieces import ANCHOR, Cuts, TokenFloor, UncutTextError, vocabulary
from common.text.tokenizer_reading import CLASS_KEYS, TokenizerParts, read_tokenizer

TOKENIZER_FILES: Final = (
    "config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
# Folder of named chat templates, each in a separate file.
TEMPLATE_FOLDER: Final = "additional_chat_templates"
# What makes a text longer in a normalizer or decoder: texts that replace others; other steps, and how many times.
_CONTENT: Final = re.compile(r'(?:"pattern": {"String": "([^"\\]+)"}, )?"content": "((?:[^"\\]|\\.)*)"')
_GROWTH: Final = {"NF": 18, "precompiled_charsmap": 18, "Lowercase": 2, "ByteLevel": 4, "BertNormalizer": 24}
_TEMPLATE_FILE: Final = re.compile(rf"{TEMPLATE_FOLDER}/[^/\0]{{1,128}}\.jinja")
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Noncharacters are reserved by Unicode for use inside a program, so no text has them.
MARK_START: Final = "\ufdd0"
MARK_END: Final = "\ufdd1"


class TokenizerError(Exception):
    """The tokenizer files cannot be used; the message is one line that says what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def tokenizer_files(folder: str | Path, converted: Mapping[str, bytes] = MappingProxyType({})) -> dict[str, bytes]:
    """Reads the existing tokenizer files of a checkpoint folder, by name; of config.json only `CLASS_KEYS`.

    Contents in `converted` replace the folder's.

    Raises:
        TokenizerError: there is no `tokenizer.json`, or a file cannot be read.
    """
    named = sorted((Path(folder) / TEMPLATE_FOLDER).glob("*.jinja"))
    paths = {
        name: Path(folder) / name for name in (*TOKENIZER_FILES, *(f"{TEMPLATE_FOLDER}/{each.name}" for each in named))
    }
    if not converted and not paths["tokenizer.json"].exists():
        raise TokenizerError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
    try:
        files = {name: read_file(path, MAX_TOKENIZER_BYTES) for name, path in paths.items() if path.exists()}
    except UnreadableFileError as error:
        raise TokenizerError(str(error)) from None
    files |= converted
    config = read_json(files, "config.json")
    if "config.json" in files:
        # Keeps the digest of the files the same when another entry of config.json changes.
        files["config.json"] = json.dumps({key: config[key] for key in CLASS_KEYS if key in config}).encode()
    return files


def files_sha256(files: Mapping[str, bytes]) -> str:
    """Returns lower-case hex sha256 over name, length and bytes of each file, in order of names."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + len(files[name]).to_bytes(8, "little"))
        digest.update(files[name])
    return digest.hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parses one of the files as a JSON object; returns an empty one for an absent file.

    Raises:
        TokenizerError: the file is not a JSON object.
    """
    if name not in files:
        return {}
    try:
        content = parse_json(files[name])
    except ValueError as error:
        raise TokenizerError(f"{name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{name} is not a JSON object")
    return content


def named_special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns `bos_token`, `eos_token`, ... of the tokenizer's configuration, as chat templates see them."""
    sources = (read_json(files, "tokenizer_config.json"), read_json(files, "special_tokens_map.json"))
    tokens = {}
    for name in NAMED_TOKENS:
        value = next((source[name] for source in sources if source.get(name) is not None), None)
        if value is not None:
            tokens[name] = str(value["content"]) if isinstance(value, dict) else str(value)
    return tokens


def check_text_ids(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses a text with tokens that the model has no embedding for: tokens added without resizing the model.

    Raises:
        InvalidFieldError: the text has such a token.
    """
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        problem = f"has a part that the model's tokenizer makes token {highest} of, which the model itself lacks"
        raise InvalidFieldError(path, problem, f"text of tokens 0 to {vocab_size - 1}")


def mark_special(text: str, pattern: re.Pattern[str]) -> str:
    """Marks every match of `pattern` (see `special_pattern`) in `text` as text that only looks special."""
    return pattern.sub(f"{MARK_START}\\g<0>{MARK_END}", text)


def unmarked(text: str) -> str:
    """Removes the marks of `mark_special` from `text`."""
    return text.replace(MARK_START, "").replace(MARK_END, "")


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of `tokens`, the longest first; without tokens it matches nothing."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class LongPieceError(TokenizerError):
    """A text has a part that cannot be cut and is too long to be encoded at once."""


class Tokenizer:
    """Encodes text to token ids and decodes them. Immutable; safe to use from several threads.

    Attributes:
        sha256: digest of the files, lower-case hex (`files_sha256`).
        vocab_size: 1 + the highest token id.
        special_ids: ids that `decode` leaves out by default.
        added_tokens: texts of the tokens added to the vocabulary, special ones and others, by id.
        named_tokens: texts of `bos_token`, `eos_token`, ... by name, as chat templates see them.
        special_tokens: texts of all special tokens.
        chat_templates: chat templates by name; a single one is named `default`.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        reading = _read(files)
        self.named_tokens, self.special_tokens = reading.named_tokens, (special := reading.special_tokens)
        self.chat_templates = reading.templates
        self._parsing = reading.backend
        _flag_special(self._parsing, special)
        self.vocab_size = 1 + max(self._parsing.get_vocab().values(), default=-1)
        # The library takes time and memory for each id below the highest when it writes a vocabulary.
        if self.vocab_size > MAX_TOKEN_IDS:
            raise TokenizerError(f"tokenizer.json has the id {self.vocab_size - 1}; valid: below {MAX_TOKEN_IDS}")
        if len(set((own := self._parsing.get_vocab(with_added_tokens=False)).values())) < len(own):
            raise TokenizerError("tokenizer.json gives several tokens the same id")
        written = self._parsing.to_str()
        self._plain = tokenizers.Tokenizer.from_str(written)
        self._plain.encode_special_tokens = True
        self.sha256 = files_sha256(files)
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._special = special_pattern(special)
        self._marked = re.compile(f"{MARK_START}({self._special.pattern}){MARK_END}|[{MARK_START}{MARK_END}]")
        self._frame = self._text_frame()
        self._pair_frame = self._frame_of_pair()
        self._unknown = self._parsing.token_to_id(self.named_tokens.get("unk_token", ""))
        self.bos_token_id: int | None = self._parsing.token_to_id(self.named_tokens.get("bos_token", ""))
        self._newline = self._ids(self._parsing, "\n")
        self.pieces = TokenBytes(self._parsing)
        content = json.loads(written)
        self._floor = TokenFloor(content)
        self._spells_special = _spells_special(content, special)
        self._anchors = {id(each): len(self._ids(each, ANCHOR)) for each in (self._parsing, self._plain)}
        self._cuts = self._safe_cuts(content, special, hashlib.sha256(written.encode()).digest())

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Builds a tokenizer from the contents of `TOKENIZER_FILES`.

        Raises:
            TokenizerError: `tokenizer.json` is missing or one of the files cannot be used.
        """
        try:
            return cls(files)
        except (KeyboardInterrupt, SystemExit, TokenizerError):
            raise
        # The files are JSON of any shape. The library raises Exception, or for a panic BaseException.
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            raise tokenizer_fault(files, f"the tokenizer's files are not of their usual form: {said}") from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Builds a tokenizer from a checkpoint folder.

        Raises:
            TokenizerError: as `from_files`.
        """
        return cls.from_files(tokenizer_files(folder))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Encodes `text` to token ids.

        Plain text gets the tokens of the tokenizer's post-processor (a beginning-of-sequence token with Llama), and its
        special tokens are text. With `allow_special`, `text` is a rendered chat: unmarked special tokens are parsed,
        and no token is added, since the template writes its own beginning.

        Raises:
            TokenizerError: the vocabulary gives no way to write a special token as text.
        """
        return list(chain.from_iterable(self.encode_pieces(text, allow_special=allow_special)))

    def encode_pieces(
        self, text: str, *, allow_special: bool = False, most_bytes: int | None = None
    ) -> Iterator[list[int]]:
        """Encodes as `encode` does, in pieces with a bounded amount of work for each.

        Args:
            text, allow_special: as for `encode`.
            most_bytes: most bytes of a part that cannot be cut; None for no limit.

        Raises:
            TokenizerError: as `encode`.
            LongPieceError: a part that cannot be cut has more than `most_bytes` bytes.
        """
        try:
            if allow_special:
                yield from self._chat_pieces(text, most_bytes)
            else:
                yield from self._framed_pieces(text, most_bytes, self._frame)
        except UncutTextError as error:
            raise LongPieceError(str(error)) from None

    def encode_pair_pieces(self, text: str, *, is_first: bool, most_bytes: int | None = None) -> Iterator[list[int]]:
        """Encodes one of a pair of texts, such as query and document, in pieces as `encode_pieces` does.

        Args:
            text: the first one gets the tokens in front of the pair and between both, the second one those behind it.
            is_first: True for the first text.
            most_bytes: as for `encode_pieces`.

        Raises:
            TokenizerError, LongPieceError: as `encode_pieces`.
        """
        before, between, behind = self._pair_frame
        try:
            yield from self._framed_pieces(text, most_bytes, (before, between) if is_first else ([], behind))
        except UncutTextError as error:
            raise LongPieceError(str(error)) from None

    def encode_inside(self, text: str) -> list[int]:
        """Encodes `text` that follows other text: no special token is parsed, and no token is added.

        Raises:
            TokenizerError: as `encode`.
        """
        return list(chain.from_iterable(self._text_pieces(text, None, inner=True)))

    def fewest_tokens(self, text: str, enough: float = float("inf")) -> int:
        """Returns a lower bound for the number of tokens of `text`, quickly; stops counting at `enough`."""
        return self._floor.tokens(text, enough)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decodes `ids` to the text that `decode_stream` gives in pieces. Unknown ids are left out."""
        stream = self.decode_stream(skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    def decode_stream(
        self, *, skip_special: bool = True, keep: Set[int] = frozenset(), behind: Sequence[int] = ()
    ) -> Detokenizer:
        """Returns an incremental decoder of a text behind the ids `behind`; special ids in `keep` stay in the text."""
        return Detokenizer(self.pieces, skip=self.special_ids - keep if skip_special else frozenset(), behind=behind)

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each token inside a text, by id."""
        return [self.pieces.inner(id) for id in range(self.vocab_size)]

    def token_text(self, id: int) -> str:
        """Returns the text of a token inside a text, for display; "" for an unknown id. Special tokens are shown."""
        return self.added_tokens.get(id) or self.pieces.inner(id).decode("utf-8", "replace")

    @property
    def hides_first_space(self) -> bool:
        """True if decoding drops the space of a text's first token, as with SentencePiece."""
        first = self._ids(self._plain, "a")[:1]
        return any(self.pieces.first(id) != self.pieces.inner(id) for id in first)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each id, for display; empty for an unknown id."""
        return [self._parsing.id_to_token(id) or "" for id in ids]

    def _framed_pieces(
        self, text: str, most_bytes: int | None, frame: tuple[list[int], list[int]]
    ) -> Iterator[list[int]]:
        prefix, suffix = frame
        for ids in self._text_pieces(text, most_bytes):
            yield [*prefix, *ids]
            prefix = []
        if suffix:
            yield suffix

    def _chat_pieces(self, text: str, most_bytes: int | None) -> Iterator[list[int]]:
        start = 0
        for marked, begin, end in self._marks(text):
            if begin > start or not start:
                yield from self._pieces(self._parsing, text[start:begin], most_bytes, inner=start > 0)
            if marked:
                yield from self._text_pieces(marked, most_bytes, inner=True)
            start = end
        if start < len(text) or not start:
            yield from self._pieces(self._parsing, text[start:], most_bytes, inner=start > 0)

    def _marks(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yields the marked tokens of a chat, with begin and end of token and marks together.

        The token is empty for a mark that stands alone: a template may cut a marked token in two, and the halves must
        not join into a token again.
        """
        at = {mark: text.find(mark) for mark in (MARK_START, MARK_END)}
        while found := [place for place in at.values() if place >= 0]:
            begin = min(found)
            match = self._marked.match(text, begin)
            assert match is not None
            yield match[1] or "", begin, match.end()
            at = {
                mark: text.find(mark, match.end()) if 0 <= place < match.end() else place for mark, place in at.items()
            }

    def _text_pieces(self, text: str, most_bytes: int | None, *, inner: bool = False) -> Iterator[list[int]]:
        """Yields ids of `text` without parsing special tokens; `inner` is True if text precedes it."""
        named = self._named(text) if self._spells_special else frozenset()
        if named:
            is_split = False
            for ids in self._pieces(self._plain, text, most_bytes, inner=inner):
                is_split |= not named.isdisjoint(ids)
                yield []
            if is_split:
                yield from self._split_pieces(text, named, most_bytes, inner)
                return
        yield from self._pieces(self._plain, text, most_bytes, inner=inner)

    def _named(self, text: str) -> Set[int | None]:
        """Ids of the special tokens that are written out in `text`."""
        return frozenset(self._parsing.token_to_id(token) for token in self._special.findall(text)) - {self._unknown}

    def _split_pieces(
        self, text: str, named: Set[int | None], most_bytes: int | None, inner: bool
    ) -> Iterator[list[int]]:
        """Encodes text for a vocabulary with special tokens as pieces (Unigram): cuts each after a letter."""
        cut = self._special.sub(lambda match: f"{match[0][0]}{MARK_START}{match[0][1:]}", text)
        for part in cut.split(MARK_START):
            for ids in self._pieces(self._plain, part, most_bytes, inner=inner):
                if not named.isdisjoint(ids):
                    raise TokenizerError("a special token in the text cannot be encoded as text with this vocabulary")
                inner = inner or bool(ids)
                yield ids

    def _pieces(
        self, tokenizer: tokenizers.Tokenizer, text: str, most_bytes: int | None, *, inner: bool
    ) -> Iterator[list[int]]:
        """Yields ids of `text`, cut into pieces if it is long."""
        pieces = self._cuts.split(text, most_bytes)
        first = next(pieces)
        yield self._inner_ids(tokenizer, first) if inner else self._ids(tokenizer, first)
        for piece in pieces:
            yield self._ids(tokenizer, ANCHOR + piece)[self._anchors[id(tokenizer)] :]

    def _safe_cuts(self, content: Mapping[str, Any], special: frozenset[str], sha256: bytes) -> Cuts:
        words = self._parsing.pre_tokenizer
        added = {token.content for token in self._parsing.get_added_tokens_decoder().values()}

        def ends(text: str) -> list[int]:
            assert words is not None
            return [end for _, (_, end) in words.pre_tokenize_str(text)]

        encoders = [lambda text: self._ids(self._parsing, text), lambda text: self._ids(self._plain, text)]
        return Cuts(content, encoders, None if words is None else ends, sorted(added | special), sha256)

    def _inner_ids(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        """Encodes text that continues other text, without the space that SentencePiece puts in front of a text."""
        ids = self._ids(tokenizer, "\n" + text)
        return ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self._ids(tokenizer, text)

    @staticmethod
    def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _text_frame(self) -> tuple[list[int], list[int]]:
        """Tokens that the post-processor puts before and after plain text."""
        whole = list(self._parsing.encode_batch_fast(["a"], add_special_tokens=True)[0].ids)
        bare = self._ids(self._parsing, "a")
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def _frame_of_pair(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens that the post-processor puts before, between and after two texts."""
        whole = list(self._parsing.encode_batch_fast([("a", "a")], add_special_tokens=True)[0].ids)
        bare = self._ids(self._parsing, "a")
        first, *_, last = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:first], whole[first + len(bare) : last], whole[last + len(bare) :]


def _read(files: Mapping[str, bytes]) -> TokenizerParts:
    if "tokenizer.json" not in files:
        raise TokenizerError("there is no tokenizer.json; a fast tokenizer is needed")
    # Workers choose the names, so only known names become paths. A later version may send more files.
    known = {name: data for name, data in files.items() if name in TOKENIZER_FILES or _TEMPLATE_FILE.fullmatch(name)}
    config, settings = read_json(files, "config.json"), read_json(files, "tokenizer_config.json")
    content = read_json(files, "tokenizer.json")
    for part in ("normalizer", "decoder"):
        steps = json.dumps(content.get(part), ensure_ascii=False)
        growth = [-(-len(new) // len(old)) or 1 if old else 1 + len(new) for old, new in _CONTENT.findall(steps)]
        if prod(growth) * prod(_GROWTH.get(word, 1) for word in re.findall(r'"(NF|\w+)', steps)) > 4096:
            raise TokenizerError(f"tokenizer.json: its {part} makes texts too long; at most 4096 times is valid")
    try:
        return read_tokenizer(known, config, settings)
    # transformers and its libraries raise exceptions of any kind.
    except Exception as error:
        raise tokenizer_fault(files, f"transformers cannot read tokenizer_config.json: {error}") from None


def tokenizer_fault(files: Mapping[str, bytes], said: str) -> TokenizerError:
    """Returns an error with the message `said`, or one that names tokenizer.json if that file alone cannot be read."""
    try:
        tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:
        return TokenizerError(f"tokenizer.json cannot be read: {error}")
    return TokenizerError(said)


def _flag_special(tokenizer: tokenizers.Tokenizer, special: frozenset[str]) -> None:
    """Flags the tokens `special` as special in the library, since files may name special tokens without the flag."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [t for t in special - known if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in sorted(missing)])


def _spells_special(content: Mapping[str, Any], special: Set[str]) -> bool:
    """True if encoding plain text may give a special token, because it is a piece of the vocabulary."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("ignore_merges"):
        return not special.isdisjoint(vocabulary(model))
    merged = ("".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1) for pair in model["merges"])
    return any(len(token) == 1 for token in special) or not special.isdisjoint(merged)


def bad_words_token_ids(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> TokenSequences:
    """Returns the token sequences of each word, alone and behind a blank as inside a text, without duplicates.

    Raises:
        InvalidFieldError: a word cannot be tokenized, has no or too many tokens, or a token that the model lacks.
    """
    found = dict[tuple[int, ...], None]()
    for i, word in enumerate(words):
        for text in (word, f" {word}"):
            found[_token_ids(f"sampling_params.bad_words[{i}]", text, tokenizer, vocab_size)] = None
    return tuple(found)


def _token_ids(path: str, text: str, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    try:
        ids = tokenizer.encode_inside(text)
    except (TokenizerError, UnicodeError) as error:
        raise InvalidFieldError(path, f"cannot be tokenized: {error}", "another word") from None
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
        raise InvalidFieldError(path, f"has {len(ids)} tokens", f"1 to {MAX_BAD_WORD_TOKENS}")
    check_text_ids(path, ids, vocab_size)
    return tuple(ids)
