"""Tokenizers that a checkpoint has in another form than tokenizer.json, converted to it.

The forms are SentencePiece's `tokenizer.model`, Mistral's `tekken.json` and tiktoken's lists of ranks. The converted
tokenizer gives the ids of the package that made the file. The packages themselves are not needed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from common.files import UnreadableFileError, parse_json, read_file
from common.limits import MAX_GGUF_TOKEN_BYTES, MAX_TOKEN_IDS, MAX_TOKENIZER_BYTES
from common.text.deferred_torch import deferred_torch
from common.text.detokenizer import BYTE_LEVEL
from common.text.tokenizer import TokenizerError
from worker.config.gguf_tokenizer import KIMI_PATTERN, QWEN2_PATTERN

_SETTINGS: Final = "tokenizer_config.json"
# A class of transformers that takes tokenizer.json as it is.
_CLASS: Final = "PreTrainedTokenizerFast"
_BPE: Final = 2
_UNIGRAM: Final = 1
_CONTROL_PIECE: Final = 3
_CHARS: Final = {byte: char for char, byte in BYTE_LEVEL.items()}
# Classes of tokenizers whose code has the pattern that cuts a text. A file of tiktoken has the ranks alone.
_PATTERNS: Final = {"TikTokenTokenizer": KIMI_PATTERN, "QWenTokenizer": QWEN2_PATTERN}
# Special tokens behind the ranks. Kimi's have names in tokenizer_config.json, Qwen's first model's in its code.
_NUM_RESERVED: Final = {"TikTokenTokenizer": 256}
_QWEN_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
# Special tokens of the tekken files of 2024, which do not list them.
_TEKKEN_SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_TEKKEN_NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class Conversion:
    """A converted tokenizer.

    Attributes:
        backend: the tokenizer.
        defaults: entries of tokenizer_config.json that count unless the checkpoint says otherwise.
    """

    backend: tokenizers.Tokenizer
    defaults: Mapping[str, Any]


def converted_tokenizer(folder: Path) -> dict[str, bytes]:
    """Contents of tokenizer.json and tokenizer_config.json of a tokenizer in another form; empty for a folder without.

    Raises:
        TokenizerError: the tokenizer cannot be converted; the message names the file and what is valid.
    """
    file = published_file(folder)
    if file is None:
        return {}
    stat = file.stat()
    return dict(_converted(folder, file, stat.st_mtime_ns, stat.st_size))


def published_file(folder: Path) -> Path | None:
    """The file of a tokenizer that has to be converted."""
    if (folder / "tokenizer.json").exists():
        return None
    names = [folder / name for name in ("tekken.json", "tiktoken.model", "tokenizer.model")]
    return next((path for path in (*names, *sorted(folder.glob("*.tiktoken"))) if path.is_file()), None)


# A worker reads its tokenizer more than once while it starts, and a conversion takes seconds.
@lru_cache(maxsize=1)
def _converted(folder: Path, file: Path, _modified: int, _size: int) -> Mapping[str, bytes]:
    try:
        data = read_file(file, MAX_TOKENIZER_BYTES)
        settings = _object(folder / _SETTINGS)
        convert = _CONVERTERS.get(file.name, _from_tiktoken)
        made = convert(data, settings)
        added = _added_tokens(settings, _object(folder / "added_tokens.json"))
        _add(made.backend, added)
        kept = {key: value for key, value in settings.items() if value is not None}
        written = {**made.defaults, **kept, "tokenizer_class": _CLASS}
        _frame(made.backend, written)
    except UnreadableFileError as error:
        raise TokenizerError(str(error)) from None
    # Both libraries raise exceptions of any kind for files that are not of their form.
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"{file} cannot be converted to tokenizer.json: {said}") from None
    return {"tokenizer.json": made.backend.to_str().encode(), _SETTINGS: json.dumps(written).encode()}


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = parse_json(read_file(path, MAX_TOKENIZER_BYTES))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return content


def _added_tokens(settings: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by id, of tokenizer_config.json and added_tokens.json."""
    found = {int(id): AddedToken(text, normalized=False) for text, id in added.items()}
    for id, token in (settings.get("added_tokens_decoder") or {}).items():
        names = ("single_word", "lstrip", "rstrip", "special")
        flags = {name: bool(token[name]) for name in names if name in token}
        found[int(id)] = AddedToken(token["content"], normalized=False, **flags)
    return found


def _add(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Adds tokens, in order of their ids.

    Raises:
        ValueError: a token has a too large id, or would get another one.
    """
    for id in sorted(added):
        if id >= MAX_TOKEN_IDS:
            raise ValueError(f"the added token {added[id].content!r} has id {id}; ids below {MAX_TOKEN_IDS} are valid")
        fillers = [f"<|reserved_token_{each}|>" for each in range(backend.get_vocab_size(), id)]
        if fillers:
            backend.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in fillers])
        add = backend.add_special_tokens if added[id].special else backend.add_tokens
        add([added[id]])
        if (found := backend.token_to_id(added[id].content)) != id:
            raise ValueError(f"the added token {added[id].content!r} has id {id}, but its vocabulary makes it {found}")


def _frame(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Lets plain texts begin and end with the tokens of `add_bos_token` and `add_eos_token`."""
    framing = {}
    for name in ("bos", "eos"):
        token = settings.get(f"{name}_token")
        text = token["content"] if isinstance(token, dict) else token
        if settings.get(f"add_{name}_token") and text is not None:
            framing[name] = (str(text), backend.token_to_id(str(text)))
            if framing[name][1] is None:
                raise ValueError(f"the {name}_token {text!r} is not in its vocabulary")
    if framing:
        before, behind = ([f"{framing[name][0]}:0"] if name in framing else [] for name in ("bos", "eos"))
        second = [part.replace(":0", ":1") for part in (*before, "$B:0", *behind)]
        single = [*before, "$A:0", *behind]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, *second], special_tokens=list(framing.values())
        )


def _from_sentence_piece(data: bytes, settings: Mapping[str, Any]) -> Conversion:
    # The protobuf classes of SentencePiece's format are in transformers.
    with deferred_torch():
        library: Any = import_module("transformers.convert_slow_tokenizer")
    if _is_tiktoken(data):
        return _from_tiktoken(data, settings)
    proto = library.import_protobuf().ModelProto()
    proto.ParseFromString(data)
    kind, pieces = proto.trainer_spec.model_type, proto.pieces
    if kind not in (_BPE, _UNIGRAM) or not pieces:
        raise ValueError(
            f"it has {len(pieces)} pieces of model type {kind}; supported: unigram ({_UNIGRAM}), BPE ({_BPE})"
        )
    names = {int(id): str(token["content"]) for id, token in (settings.get("added_tokens_decoder") or {}).items()}
    texts = [names.get(id, piece.piece) for id, piece in enumerate(pieces)]
    if len(set(texts)) < len(texts):
        raise ValueError("a piece is there twice")
    if max(len(text.encode()) for text in texts) > MAX_GGUF_TOKEN_BYTES:
        raise ValueError(f"a piece has more than {MAX_GGUF_TOKEN_BYTES} bytes")
    vocab: Any = {text: id for id, text in enumerate(texts)}
    if kind == _UNIGRAM:
        vocab = [(text, piece.score) for text, piece in zip(texts, pieces, strict=True)]
    backend: tokenizers.Tokenizer = library.SpmConverter.build_tokenizer_from_spm_proto(
        proto, vocab, legacy=settings.get("legacy", True)
    )
    if proto.normalizer_spec.remove_extra_whitespaces:
        # SentencePiece takes its own character for a space as one too, at the end of a text.
        ends = normalizers.Replace(Regex(r"\u2581+\z"), "")
        backend.normalizer = normalizers.Sequence([backend.normalizer, ends])
    special = [text for text, piece in zip(texts, pieces, strict=True) if piece.type == _CONTROL_PIECE]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    spec = proto.trainer_spec
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id, "pad_token": spec.pad_id}
    named = {name: texts[id] for name, id in ids.items() if 0 <= id < len(texts)}
    return Conversion(backend, {**named, "add_bos_token": "bos_token" in named, "add_eos_token": False})


def _from_tekken(data: bytes, _: Mapping[str, Any]) -> Conversion:
    content = json.loads(data)
    config = content["config"]
    listed = content.get("special_tokens")
    special = list(_TEKKEN_SPECIAL)
    if listed is not None:
        special = [str(token["token_str"]) for token in sorted(listed, key=lambda token: int(token["rank"]))]
    count = int(config.get("default_num_special_tokens") or len(special))
    if count > MAX_TOKEN_IDS:
        raise ValueError(f"it has {count} special tokens; at most {MAX_TOKEN_IDS} are valid")
    special += [f"<SPECIAL_{id}>" for id in range(len(special), count)]
    size = int(config.get("default_vocab_size") or count + len(content["vocab"]))
    ranks = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][: size - count]]
    backend = _byte_level({token: rank for rank, token in enumerate(ranks)}, config["pattern"], special)
    return Conversion(backend, {**_TEKKEN_NAMED, "add_bos_token": True, "add_eos_token": False})


def _from_tiktoken(data: bytes, settings: Mapping[str, Any]) -> Conversion:
    name = str(settings.get("tokenizer_class"))
    if name not in _PATTERNS:
        raise ValueError(
            f"the tokenizer_class {name!r} does not say how texts are cut; supported: {', '.join(_PATTERNS)}"
        )
    ranks = {}
    for line in data.split(b"\n"):
        if line.strip():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    backend = _byte_level(ranks, _PATTERNS[name], [])
    if name == "QWenTokenizer":
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _QWEN_SPECIAL])
        return Conversion(backend, {"eos_token": _QWEN_SPECIAL[0]})
    names = {int(id): str(token["content"]) for id, token in (settings.get("added_tokens_decoder") or {}).items()}
    behind = range(len(ranks), len(ranks) + _NUM_RESERVED[name])
    reserved = [names.get(id, f"<|reserved_token_{id}|>") for id in behind]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in reserved])
    return Conversion(backend, {})


def _is_tiktoken(data: bytes) -> bool:
    """True if each line is a token in Base64 and its rank: some checkpoints name such a file tokenizer.model."""
    first = data[:200].partition(b"\n")[0].split()
    return len(first) == 2 and first[1].isdigit()


def _byte_level(ranks: Mapping[bytes, int], pattern: str, special: list[str]) -> tokenizers.Tokenizer:
    """BPE over bytes whose lowest rank is merged first.

    Args:
        ranks: of all tokens.
        pattern: regular expression whose matches are encoded one by one.
        special: special tokens in front of the others, by id.

    Raises:
        ValueError: a rank or a byte is missing, or a token is too long.
    """
    if max(map(len, ranks), default=0) > MAX_GGUF_TOKEN_BYTES:
        raise ValueError(f"a token has more than {MAX_GGUF_TOKEN_BYTES} bytes")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"the byte {missing[0]} is not a token")
    texts = {token: "".join(_CHARS[byte] for byte in token) for token in ranks}
    merges = [
        (texts[token[:cut]], texts[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in sorted(
            (cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks),
            key=lambda cut, token=token: (ranks[token[:cut]], ranks[token[cut:]]),  # type: ignore[misc]
        )
    ]
    vocab = {text: id for id, text in enumerate(special)}
    vocab |= {texts[token]: len(special) + rank for token, rank in ranks.items()}
    if len(vocab) < len(special) + len(ranks):
        raise ValueError("a special token is there twice, or is the text of another token")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return backend


_CONVERTERS: Final[Mapping[str, Callable[[bytes, Mapping[str, Any]], Conversion]]] = {
    "tekken.json": _from_tekken,
    "tiktoken.model": _from_tiktoken,
    "tokenizer.model": _from_sentence_piece,
}
