"""tokenizer.json and tokenizer_config.json of a model whose GGUF file has neither, from the file's metadata.

Two kinds of vocabulary are supported: `gpt2`, byte-level BPE whose pieces are cut by the regular expression that
`tokenizer.ggml.pre` names, and `llama`, SentencePiece's BPE, whose merges follow from the scores of its tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from common.files import UnreadableFileError
from common.limits import MAX_GGUF_TOKEN_BYTES, MAX_GGUF_VOCABULARY_BYTES
from worker.config.gguf_file import GgufModel, printable

_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
# Types of tokens: text; an end of text or of turn; one that is matched as a whole; one that no text has.
_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_SPACE: Final = "\u2581"
# Tokens that end a turn, beside those that metadata names: llama.cpp ends at them too.
_ENDS: Final = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
# Ends a turn if it is a control token; Gemma's vocabulary has it as a tag of HTML.
_CONTROL_END: Final = "</s>"
# gpt-oss ends each message of a turn with <|end|>, and the turn with one of these.
_HARMONY: Final = ("<|return|>", "<|call|>")

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2_PATTERN: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_BEGIN_OF_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
_NO_HAN: Final = ("[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]")
KIMI_PATTERN: Final = (
    rf"[\p{{Han}}]+|{_BEGIN_OF_WORD}{_NO_HAN[0]}*{_NO_HAN[1]}+{_CONTRACTIONS}?"
    rf"|{_BEGIN_OF_WORD}{_NO_HAN[0]}+{_NO_HAN[1]}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
_UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
_GPT4O: Final = rf"{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
# Letters that DeepSeek's first models keep together.
_LETTERS: Final = (
    "µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ"
    "-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ"
    "-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-"
    "𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_LLM: Final = (
    *("[\r\n]", rf"\s?[A-Za-z{_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    *(r"\s+$", _HAN, r"\p{N}"),
)
_DEEPSEEK_CODER: Final = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_DEEPSEEK3: Final = (
    *(r"\p{N}{1,3}", _KANA),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2: Final = "gpt-2"
_DIGITS: Final = "digits"
# `tokenizer.ggml.pre` -> how a text is cut: by regular expressions, one after the other, as GPT-2 does, or so behind
# single digits.
_PIECES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys((_GPT2, "gigachat", "mellum", "trillion"), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r", "minerva-7b"), (_DIGITS,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (QWEN2_PATTERN,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_GPT4O,)),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "kimi-k2": (KIMI_PATTERN,),
}
# Have a token before each text unless metadata says otherwise.
_BEGIN: Final = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"))
# A piece that is a token is not built from merges.
_IGNORE_MERGES: Final = _BEGIN | {"glm4", "kimi-k2"}
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids that llama.cpp gives a SentencePiece vocabulary without these entries.
_DEFAULT_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}


def gguf_tokenizer_files(model: GgufModel) -> dict[str, bytes]:
    """Contents of the tokenizer's files, by name.

    Raises:
        UnreadableFileError: the file has no tokenizer, or one that is not supported.
    """
    kind = model.metadata.get(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama"):
        found = "has no tokenizer" if kind is None else f"has the tokenizer {printable(str(kind))}"
        raise UnreadableFileError(f"{model.path} {found}; supported: gpt2 (byte-level BPE), llama (SentencePiece)")
    tokens = _tokens(model)
    if not tokens:
        raise UnreadableFileError(f"{model.path}: {_PREFIX}tokens is empty")
    named = {role: tokens[id] for role, id in _named_ids(model, len(tokens)).items()}
    content = (_byte_level if kind == "gpt2" else _sentence_piece)(model, tokens)
    content |= {"version": "1.0", "truncation": None, "padding": None}
    settings = named | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    templates = _templates(model)
    if templates:
        settings["chat_template"] = templates
    files = {"tokenizer.json": content, "tokenizer_config.json": settings}
    return {name: json.dumps(each, ensure_ascii=False).encode() for name, each in files.items()}


def end_ids(model: GgufModel) -> list[int]:
    """Ids that end an answer: from metadata, and of tokens that end a turn by their name.

    Raises:
        UnreadableFileError: the vocabulary is not well-formed.
    """
    tokens = _tokens(model)
    of_metadata = [token_id(model, name) for name in ("eos", "eot", "eom")]
    ids = [id for id in of_metadata if type(id) is int and 0 <= id < len(tokens)]
    types, ends = _types(model, tokens), _ends(tokens)
    ids += [id for id, token in enumerate(tokens) if token in ends]
    ids += [id for id, token in enumerate(tokens) if token == _CONTROL_END and types[id] == _CONTROL]
    return list(dict.fromkeys(ids))


def token_id(model: GgufModel, name: str) -> object:
    """Id of a special token such as `bos`, as metadata has it; None without one."""
    default = _DEFAULT_IDS.get(name) if model.metadata.get(f"{_PREFIX}model") == "llama" else None
    return model.metadata.get(f"{_PREFIX}{name}_token_id", default)


def _ends(tokens: list[str]) -> frozenset[str]:
    """Tokens that end a turn in this vocabulary."""
    return _ENDS - {"<|end|>"} if set(_HARMONY) <= set(tokens) else _ENDS


def _tokens(model: GgufModel) -> list[str]:
    """Texts of all tokens by id; tokens at the end that no text has are left out.

    Raises:
        UnreadableFileError: a token is too long, or there twice.
    """
    tokens = model.strings(f"{_PREFIX}tokens")
    types = _stored_types(model, len(tokens))
    while tokens and types[len(tokens) - 1] == _UNUSED:
        tokens.pop()
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    lengths = [len(token.encode()) for token in tokens]
    if max(lengths, default=0) > MAX_GGUF_TOKEN_BYTES or sum(lengths) > MAX_GGUF_VOCABULARY_BYTES:
        most = f"{MAX_GGUF_TOKEN_BYTES} bytes a token and {MAX_GGUF_VOCABULARY_BYTES} in all"
        raise UnreadableFileError(f"{model.path}: {_PREFIX}tokens has more than {most}")
    if len(set(tokens)) < len(tokens):
        raise UnreadableFileError(f"{model.path}: {_PREFIX}tokens has a token twice")
    return tokens


def _types(model: GgufModel, tokens: list[str]) -> list[float]:
    """Type of each token; control for tokens that end a turn, whatever the file says, as in llama.cpp."""
    ends = _ends(tokens)
    stored = zip(tokens, _stored_types(model, len(tokens)), strict=False)
    return [_CONTROL if token in ends else kind for token, kind in stored]


def _stored_types(model: GgufModel, count: int) -> Sequence[float]:
    """Type of each of `count` tokens, or more, as the file has them."""
    types = model.numbers(f"{_PREFIX}token_type") or [_NORMAL] * count
    if len(types) < count:
        raise UnreadableFileError(f"{model.path}: {_PREFIX}token_type has {len(types)} items for {count} tokens")
    return types


def _named_ids(model: GgufModel, count: int) -> dict[str, int]:
    """Ids of special tokens by their names in tokenizer_config.json."""
    ids = {}
    for role, name in _ROLES.items():
        id = token_id(model, name.removesuffix("_token_id"))
        if id is None:
            continue
        if type(id) is not int or not 0 <= id < count:
            raise UnreadableFileError(f"{model.path}: {_PREFIX}{name} must be the id of a token, 0 to {count - 1}")
        ids[role] = id
    return ids


def _templates(model: GgufModel) -> str | list[dict[str, str]] | None:
    """The chat template, or several by name; None without one."""
    template = model.metadata.get(_TEMPLATE)
    texts = {"default": template} if isinstance(template, str) else {}
    for name in model.strings("tokenizer.chat_templates"):
        text = model.metadata.get(f"{_TEMPLATE}.{name}")
        if not isinstance(text, str):
            raise UnreadableFileError(f"{model.path} has no {_TEMPLATE}.{printable(name)}, which it lists")
        texts[name] = text
    if set(texts) <= {"default"}:
        return texts.get("default")
    return [{"name": name, "template": text} for name, text in texts.items()]


def _byte_level(model: GgufModel, tokens: list[str]) -> dict[str, Any]:
    """Content of tokenizer.json for byte-level BPE."""
    pre = model.metadata.get(f"{_PREFIX}pre", "")
    if pre not in _PIECES:
        found = printable(str(pre)) or "none"
        raise UnreadableFileError(f"{model.path}: {_PREFIX}pre is {found}; supported: {', '.join(_PIECES)}")
    vocab = {token: id for id, token in enumerate(tokens)}
    added = _added_tokens(model, tokens)
    return {
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(_PIECES[str(pre)]),
        "post_processor": _post_processor(model, tokens, begins=pre in _BEGIN, other=_BYTE_LEVEL),
        "decoder": _BYTE_LEVEL,
        "model": _bpe(vocab, _merges(model, vocab), ignore_merges=pre in _IGNORE_MERGES),
    }


def _pre_tokenizer(pieces: tuple[str, ...]) -> dict[str, Any]:
    if pieces == (_GPT2,):
        return _BYTE_LEVEL | {"use_regex": True}
    split: dict[str, Any] = {"type": "Split", "behavior": "Isolated", "invert": False}
    first = [split | {"pattern": {"Regex": each}} for each in pieces]
    if pieces == (_DIGITS,):
        first = [{"type": "Digits", "individual_digits": True}]
    last = _BYTE_LEVEL | {"use_regex": pieces == (_DIGITS,)}
    return {"type": "Sequence", "pretokenizers": [*first, last]}


def _merges(model: GgufModel, vocab: Mapping[str, int]) -> list[list[str]]:
    if f"{_PREFIX}merges" not in model.metadata and model.metadata.get(f"{_PREFIX}model") == "gpt2":
        raise UnreadableFileError(f"{model.path} has no {_PREFIX}merges; convert the model again")
    stored = model.strings(f"{_PREFIX}merges")
    if len(set(stored)) < len(stored):
        raise UnreadableFileError(f"{model.path}: {_PREFIX}merges has a merge twice")
    merges = [merge.split(" ") for merge in stored]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocab for part in (*merge, "".join(merge))):
            found = printable(" ".join(merge))
            raise UnreadableFileError(
                f"{model.path}: {_PREFIX}merges has {found!r}, which is not two tokens that make a third"
            )
    return merges


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None} | {
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }


def _added_tokens(model: GgufModel, tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens that are matched as a whole before a text is cut."""
    types = _types(model, tokens)
    # Phi-3's special tokens take the white space behind them. Its file says so nowhere, and llama.cpp knows it too.
    strips = model.metadata.get("general.architecture") == "phi3" and model.metadata[f"{_PREFIX}model"] == "llama"
    keep = ("<unk>", "<s>", "<|endoftext|>")
    return [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and (types[id] == _CONTROL or token == _CONTROL_END) and token not in keep,
            "normalized": False,
            "special": types[id] == _CONTROL,
        }
        for id, token in enumerate(tokens)
        if types[id] in (_CONTROL, _USER_DEFINED) and token.strip(" ")
    ]


def _post_processor(
    model: GgufModel, tokens: list[str], *, begins: bool, other: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Adds the tokens before and behind each text that metadata, or the kind of tokenizer, asks for."""
    ids = _named_ids(model, len(tokens))
    before = ids.get("bos_token") if model.metadata.get(f"{_PREFIX}add_bos_token", begins) else None
    behind = ids.get("eos_token") if model.metadata.get(f"{_PREFIX}add_eos_token", False) else None
    if before is None and behind is None:
        return other
    special = {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in _given(before, behind)}

    def text(name: str, number: int) -> list[dict[str, Any]]:
        return [
            *({"SpecialToken": {"id": tokens[id], "type_id": number}} for id in _given(before)),
            {"Sequence": {"id": name, "type_id": number}},
            *({"SpecialToken": {"id": tokens[id], "type_id": number}} for id in _given(behind)),
        ]

    single = text("A", 0)
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + text("B", 1),
        "special_tokens": special,
    }
    return template if other is None else {"type": "Sequence", "processors": [other, template]}


def _given(*ids: int | None) -> list[int]:
    return [id for id in ids if id is not None]


def _sentence_piece(model: GgufModel, tokens: list[str]) -> dict[str, Any]:
    """Content of tokenizer.json for SentencePiece's BPE."""
    added = _added_tokens(model, tokens)
    # Tokens of spaces are stored as spaces.
    vocab = {token if token.strip(" ") else _SPACE * len(token): id for id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise UnreadableFileError(f"{model.path}: {_PREFIX}tokens has a token of spaces twice")
    scores = model.numbers(f"{_PREFIX}scores")
    if len(scores) < len(tokens):
        raise UnreadableFileError(f"{model.path}: {_PREFIX}scores has {len(scores)} items for {len(tokens)} tokens")
    if any(map(math.isnan, scores)):
        raise UnreadableFileError(f"{model.path}: {_PREFIX}scores has items that are not numbers")
    types, special = _types(model, tokens), {each["id"] for each in added}
    mergeable = {
        token: id for token, id in vocab.items() if types[id] in (_NORMAL, _USER_DEFINED) and id not in special
    }
    if str(model.metadata.get("general.architecture")).startswith("gemma"):
        # Merges in the order of the vocabulary, which the scores do not have.
        scores = range(0, -len(tokens), -1)
    merges = _merges(model, vocab) or _merges_of_scores(model, mergeable, scores)
    unknown = _named_ids(model, len(tokens)).get("unk_token", 0)
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.metadata.get(f"{_PREFIX}add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": _post_processor(model, tokens, begins=True, other=None),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True),
    }


def _merges_of_scores(model: GgufModel, vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Merges of all pairs of tokens that make a token, the best token's first, in the order of transformers.

    Raises:
        UnreadableFileError: there are more of them than any vocabulary of text has.
    """
    found: list[tuple[float, int, int, str, str]] = []
    size = 0
    for token, id in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        there = [(vocab[left], vocab[right], left, right) for left, right in pairs if left in vocab and right in vocab]
        size += len(there) * len(token)
        if size > MAX_GGUF_VOCABULARY_BYTES:
            most = f"{MAX_GGUF_VOCABULARY_BYTES} bytes of merges"
            raise UnreadableFileError(f"{model.path}: {_PREFIX}tokens makes more than {most}")
        found += [(scores[id], len(left), len(right), left, right) for _, _, left, right in sorted(there)]
    found.sort(key=lambda each: each[:3], reverse=True)
    return [[left, right] for _, _, _, left, right in found]
