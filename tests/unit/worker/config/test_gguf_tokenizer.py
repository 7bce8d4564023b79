"""Tokenizers of GGUF files: the ids of the tokenizer that a file was made from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from common.text.tokenizer import Tokenizer, TokenizerError
from tests.checkpoints import BOS_ID, EOS_ID, IM_END_ID, write_tokenizer
from tests.gguf_files import GgufContent, tokenizer_metadata
from worker.config.gguf_file import read_gguf
from worker.config.gguf_tokenizer import _PIECES, end_ids, gguf_tokenizer_files
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer, tokenizer_eos_id


def cuts(*patterns: str) -> Any:
    """Cuts a text by regular expressions, one after the other."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


# Cuts as published: by the tokenizer.json of Llama 3, Qwen2, StarCoder, DeepSeek, Mistral Nemo and gpt-oss, and by the
# patterns in tokenization_kimi.py of Kimi-K2.
SPLITS: dict[str, Any] = {
    "llama-bpe": pre_tokenizers.Split(
        Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        "isolated",
    ),
    "qwen2": pre_tokenizers.Split(
        Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        "isolated",
    ),
    "starcoder": pre_tokenizers.Digits(individual_digits=True),
    "gpt-2": None,
    "deepseek-v3": cuts(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-llm": pre_tokenizers.Sequence(
        [
            cuts(
                "[\r\n]",
                "\\s?[A-Za-zµ\u00c0-\u00d6Ø-\u00f6ø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\u0386\u0388-\u038a\u038c\u038e-ΡΣ-ϵ"
                "Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\u1e00-ἕ\u1f18-Ἕ\u1f20-ὅ\u1f48-Ὅ\u1f50-ὗ\u1f59ὛὝὟ-\u1f7dᾀ"
                "-\u1fb4\u1fb6-\u1fbc\u1fbeῂ-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fecῲ-"
                "\u1ff4\u1ff6-\u1ffcℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ"
                "-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
                "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-\ud7ff]+",
            ),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    ),
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            cuts("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    ),
    "tekken": cuts(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": cuts(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "kimi-k2": cuts(
        "|".join(
            (
                r"[\p{Han}]+",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
                r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
                r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
                r"\s+(?!\S)",
                r"\s+",
            )
        )
    ),
}
# Names -> the one above that cuts in the same way: models with the same pattern in their tokenizer.json.
ALIKE = {
    **dict.fromkeys(("gigachat", "mellum", "trillion"), "gpt-2"),
    **dict.fromkeys(("refact", "smollm", "command-r", "minerva-7b"), "starcoder"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), "llama-bpe"),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("llama4", "kanana2"), "gpt-4o"),
}
# A text that each pattern cuts in its own way.
TEXT = "I'LL pay 12345 NT$/été\r\n\r\n漢字ab getURL.\n/ 一二三  x。 中文's"
WORDS = (
    *("The", "I'LL", "we're", "1234567", "3.14", "été", "e\u0301", "漢字", "ひらカタ", "한글", "中a文", "getURL"),
    *("🙂👍🏽", "\t", "\r\n", "   ", "x=1;", "</s>", ".\n/", "。、", "٣٤", "\u3000", "#include"),
)


def texts(seed: int, count: int = 300) -> list[str]:
    """Texts of words, blanks and any characters."""
    rnd = random.Random(seed)

    def one() -> str:
        parts = [rnd.choice((*WORDS, " ", "\n", chr(rnd.randrange(32, 0x3000)))) for _ in range(rnd.randrange(12))]
        return "".join(part if rnd.random() < 0.7 else f"{part} " for part in parts)

    return [one() for _ in range(count)]


def published(pre: str) -> Any:
    """Pre-tokenizer of the models that a name stands for."""
    name = ALIKE.get(pre, pre)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("starcoder", "gpt-2"))
    return level if SPLITS[name] is None else pre_tokenizers.Sequence([SPLITS[name], level])


def trained(pre: str) -> Backend:
    """A byte-level tokenizer of 700 tokens."""
    backend = Backend(BPE(ignore_merges=pre in ("llama-bpe", "glm4", "tekken", "kimi-k2")))
    backend.pre_tokenizer = published(pre)
    backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(1), trainer)
    if pre in ("llama-bpe", "tekken"):
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 0)]
        )
    return backend


def written(path: Path, metadata: dict[str, Any]) -> Path:
    path.write_bytes(GgufContent({"general.architecture": "llama", **metadata}).to_bytes())
    return path


@pytest.mark.parametrize("pre", [*SPLITS, *ALIKE])
def test_texts_are_cut_as_published(tmp_path: Path, pre: str) -> None:
    metadata = small(tmp_path) | {"tokenizer.ggml.pre": pre}
    files = gguf_tokenizer_files(read_gguf([written(tmp_path / "m.gguf", metadata)]))
    ours, original = Backend.from_str(files["tokenizer.json"].decode()).pre_tokenizer, published(pre)
    for text in [TEXT, *texts(4)]:
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text), text


def test_every_name_is_compared_and_every_pattern_differs() -> None:
    assert {*SPLITS, *ALIKE} == set(_PIECES)
    assert len({tuple(published(pre).pre_tokenize_str(TEXT)) for pre in SPLITS}) == len(SPLITS)


@pytest.mark.parametrize("pre", [*SPLITS, "glm4"])
def test_byte_level_ids_equal_those_of_the_original(tmp_path: Path, pre: str) -> None:
    backend = trained(pre)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    original = Tokenizer.from_folder(tmp_path)
    metadata = tokenizer_metadata(tmp_path) | {"tokenizer.ggml.pre": pre}
    ours = model_tokenizer(written(tmp_path / "m.gguf", metadata))
    for text in texts(2):
        ids = original.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)
    assert ours.encode("<|begin|>a<|end|>", allow_special=True) == original.encode(
        "<|begin|>a<|end|>", allow_special=True
    )
    assert (ours.bos_token_id, ours.special_ids, ours.vocab_size) == (0, original.special_ids, original.vocab_size)


def sentence_piece() -> tuple[Backend, dict[str, Any]]:
    """A tokenizer in SentencePiece's manner, and metadata with a score for each token."""
    backend = Backend(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    plain = ["the cat sat on the mat", "then a thin man came and ran", "another theory of hats and rats"] * 5
    backend.train_from_iterator(plain, trainer)
    content = json.loads(backend.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    types = [2, 3, 3, *([6] * 256), *([1] * (len(tokens) - 259))]
    scores = [float(-i) for i in range(len(tokens))]
    values: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
    }
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    content["added_tokens"] = content["added_tokens"][:3]
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Backend.from_str(json.dumps(content)), {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_sentence_piece_ids_follow_from_scores(tmp_path: Path) -> None:
    backend, metadata = sentence_piece()
    ours = model_tokenizer(written(tmp_path / "m.gguf", metadata))
    for text in ["the other cat", "a hat", "  thin rats ", "ümläut 漢字 🙂", "line\nline", *texts(3)]:
        ids = ours.encode(text)
        assert ids[0] == 1
        backend.encode_special_tokens = True
        assert ids[1:] == backend.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == backend.decode(ids[1:])


def small(folder: Path) -> dict[str, Any]:
    write_tokenizer(folder, 300)
    return tokenizer_metadata(folder)


def test_template_and_ends_come_from_metadata(tmp_path: Path) -> None:
    metadata = small(tmp_path)
    file = written(tmp_path / "m.gguf", metadata)
    ours, original = model_tokenizer(file), Tokenizer.from_folder(tmp_path)
    assert ours.chat_templates == original.chat_templates
    assert ours.named_tokens["bos_token"] == "<|bos|>"
    assert (ours.bos_token_id, tokenizer_eos_id(file), has_tokenizer(file)) == (BOS_ID, EOS_ID, True)
    assert end_ids(read_gguf([file])) == [EOS_ID, IM_END_ID]
    named = metadata | {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "R"}
    templates = model_tokenizer(written(tmp_path / "n.gguf", named)).chat_templates
    assert templates == {**original.chat_templates, "rag": "R"}


@pytest.mark.parametrize("kind", [1, 4])
def test_turn_ends_at_a_known_token_of_any_type(tmp_path: Path, kind: int) -> None:
    """As in llama.cpp, which takes it for a control token too."""
    metadata = small(tmp_path)
    metadata[TOKENS][298:] = ["<|eot_id|>", "</s>"]
    metadata["tokenizer.ggml.token_type"][298:] = [kind, kind]
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:1]
    file = written(tmp_path / "m.gguf", metadata)
    assert end_ids(read_gguf([file])) == [EOS_ID, IM_END_ID, 298]
    tokenizer = model_tokenizer(file)
    assert tokenizer.encode("<|eot_id|>", allow_special=True) == [298]
    assert 298 in tokenizer.special_ids
    metadata["tokenizer.ggml.token_type"][299] = 3
    assert end_ids(read_gguf([written(file, metadata)])) == [EOS_ID, IM_END_ID, 298, 299]


def test_sentence_piece_without_ids_has_those_of_llama(tmp_path: Path) -> None:
    _, metadata = sentence_piece()
    expected = model_tokenizer(written(tmp_path / "m.gguf", metadata))
    ids = {f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown")}
    file = written(tmp_path / "n.gguf", {key: value for key, value in metadata.items() if key not in ids})
    assert model_tokenizer(file).encode("the cat 漢") == expected.encode("the cat 漢")
    assert model_tokenizer(file).named_tokens == expected.named_tokens
    assert (model_tokenizer(file).bos_token_id, tokenizer_eos_id(file), end_ids(read_gguf([file]))) == (1, 2, [2])


def test_end_of_a_message_is_no_end_where_a_turn_has_several(tmp_path: Path) -> None:
    """gpt-oss ends its reasoning with <|end|>, and its turn with <|return|> or <|call|>."""
    metadata = small(tmp_path)
    metadata[TOKENS][5:8] = ["<|end|>", "<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"][5:8] = [3, 3, 3]
    file = written(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.merges": []})
    assert end_ids(read_gguf([file])) == [EOS_ID, IM_END_ID, 6, 7]
    metadata[TOKENS][7] = "<|other|>"
    assert end_ids(read_gguf([written(file, metadata)])) == [EOS_ID, IM_END_ID, 5, 6]


TOKENS = "tokenizer.ggml.tokens"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "has the tokenizer bert; supported: gpt2"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is default; supported: gpt-2, "),
        ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges; convert the model again"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges has 'a b c', which is not two tokens that make a third"),
        ({"tokenizer.ggml.merges": ["\u0120 t", "\u0120 t"]}, "merges has a merge twice"),
        ({"tokenizer.ggml.merges": ["Q zz"]}, "merges has 'Q zz', which is not two tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 items for 300 tokens"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id must be the id of a token, 0 to 299"),
        ({TOKENS: ["a", "a"]}, "tokens has a token twice"),
        ({TOKENS: ["a" * 1025]}, "tokens has more than 1024 bytes a token"),
        (
            {
                **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.token_type": [1] * 400},
                **{TOKENS: ["a" * n for n in range(1, 401)], "tokenizer.ggml.scores": [0.5] * 400},
                "tokenizer.ggml.merges": None,
            },
            "tokens makes more than 8388608 bytes of merges",
        ),
        ({"tokenizer.ggml.model": "llama", TOKENS: None}, "tokens is empty"),
        ({TOKENS: 5}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.model": "llama"}, "scores has 0 items for 300 tokens"),
        ({"tokenizer.chat_templates": ["rag"]}, "has no tokenizer.chat_template.rag, which it lists"),
    ],
)
def test_broken_tokenizer_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    metadata = small(tmp_path) | changes
    file = written(tmp_path / "m.gguf", {key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(TokenizerError) as error:
        model_tokenizer(file)
    assert said in str(error.value)
    assert str(file) in str(error.value)
