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
from worker.config.gguf_tokenizer import end_ids
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer, tokenizer_eos_id

# Cuts as the published tokenizer.json of Llama 3, Qwen2, StarCoder and DeepSeek-V3 have them.
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
    "deepseek-v3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in (
                r"\p{N}{1,3}",
                "[一-龥\u3040-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )
        ]
    ),
}
# As Llama 3's, without a token before each text.
SPLITS["glm4"] = SPLITS["llama-bpe"]
WORDS = (
    *("The", "I'LL", "we're", "1234567", "3.14", "été", "e\u0301", "漢字"),
    *("🙂👍🏽", "\t", "\r\n", "   ", "x=1;", "</s>"),
)


def texts(seed: int, count: int = 300) -> list[str]:
    """Texts of words, blanks and any characters."""
    rnd = random.Random(seed)

    def one() -> str:
        parts = [rnd.choice((*WORDS, " ", "\n", chr(rnd.randrange(32, 0x3000)))) for _ in range(rnd.randrange(12))]
        return "".join(part if rnd.random() < 0.7 else f"{part} " for part in parts)

    return [one() for _ in range(count)]


def trained(pre: str) -> Backend:
    """A byte-level tokenizer of 700 tokens."""
    backend = Backend(BPE(ignore_merges=pre in ("llama-bpe", "glm4")))
    split = SPLITS[pre]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("starcoder", "gpt-2"))
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
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
    if pre == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 0)]
        )
    return backend


def written(path: Path, metadata: dict[str, Any]) -> Path:
    path.write_bytes(GgufContent({"general.architecture": "llama", **metadata}).to_bytes())
    return path


@pytest.mark.parametrize("pre", SPLITS)
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
