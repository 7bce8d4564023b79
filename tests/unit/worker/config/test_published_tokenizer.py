"""Tokenizers published without tokenizer.json: ids as the package of their format gives them (record_tokenizers.py)."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any, Final

import pytest

from common.text.tokenizer import Tokenizer, TokenizerError, mark_special, special_pattern
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer, model_tokenizer_files, tokenizer_eos_id

RECORDED: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("recorded_tokenizers.json").read_text("utf-8"))
TEXTS: Final[list[str]] = RECORDED["texts"]
FILES: Final[dict[str, Any]] = RECORDED["files"]
NUM_RANKS: Final = len(FILES["ranks"].splitlines())
END: Final = "<|im_end|>"
SECTION: Final = "<|tool_calls_section_begin|>"
KIMI: Final = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {
        str(NUM_RANKS): {"content": "[BOS]", "special": True},
        str(NUM_RANKS + 2): {"content": END, "special": True},
        str(NUM_RANKS + 11): {"content": SECTION, "special": True},
    },
    "eos_token": END,
}
FOLDERS: Final[dict[str, dict[str, bytes]]] = {
    "bpe": {"tokenizer.model": base64.b64decode(FILES["bpe"])},
    "unigram": {"tokenizer.model": base64.b64decode(FILES["unigram"])},
    "tekken": {"tekken.json": json.dumps(FILES["tekken"]).encode()},
    "kimi": {"tiktoken.model": FILES["ranks"].encode(), "tokenizer_config.json": json.dumps(KIMI).encode()},
    "qwen": {
        "qwen.tiktoken": FILES["ranks"].encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "QWenTokenizer"}',
    },
}


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def with_config(name: str, **settings: Any) -> dict[str, bytes]:
    return {**FOLDERS[name], "tokenizer_config.json": json.dumps(settings).encode()}


@pytest.fixture(params=list(FOLDERS))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Tokenizer]:
    return request.param, model_tokenizer(folder_of(tmp_path, FOLDERS[request.param]))


def test_ids_are_those_of_the_formats_package(named: tuple[str, Tokenizer]) -> None:
    name, tokenizer = named
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert [tokenizer.encode(text) for text in TEXTS] == [[*before, *ids] for ids in RECORDED["ids"][name]]


def test_long_text_in_pieces_has_the_same_ids(named: tuple[str, Tokenizer]) -> None:
    _, tokenizer = named
    text = "".join(text for text in TEXTS if "<s>" not in text and "</s>" not in text) * 20
    [whole] = tokenizer._plain.encode_batch_fast([text], add_special_tokens=False)
    before = 0 if tokenizer.bos_token_id is None else 1
    assert tokenizer.encode(text)[before:] == whole.ids


def test_stream_of_tokens_is_the_text(named: tuple[str, Tokenizer]) -> None:
    name, tokenizer = named
    draw = random.Random(3)
    for text, ids in zip(TEXTS, RECORDED["ids"][name], strict=True):
        stream = tokenizer.decode_stream()
        pieces = "".join([stream.push([id]) for id in ids]) + stream.flush()
        assert pieces == tokenizer.decode(ids)
        if name not in ("unigram", "bpe"):
            assert pieces == text
        shuffled = [draw.randrange(tokenizer.vocab_size) for _ in ids]
        stream = tokenizer.decode_stream()
        assert "".join([stream.push([id]) for id in shuffled]) + stream.flush() == tokenizer.decode(shuffled)


def test_special_tokens_have_their_ids_in_chats_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, FOLDERS["kimi"])
    tokenizer = model_tokenizer(folder)
    assert tokenizer_eos_id(folder) == NUM_RANKS + 2
    assert tokenizer.encode(f"{SECTION}{END}", allow_special=True) == [NUM_RANKS + 11, NUM_RANKS + 2]
    marked = mark_special(END, special_pattern(tokenizer.special_tokens))
    assert tokenizer.encode(marked, allow_special=True) == tokenizer.encode(END)
    assert NUM_RANKS + 2 not in tokenizer.encode(END)
    # Ids up to 255 behind the ranks are reserved.
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert tokenizer.decode([NUM_RANKS + 11], skip_special=False) == SECTION


def test_mistrals_tokens_begin_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = model_tokenizer(folder_of(tmp_path, FOLDERS["tekken"]))
    assert tokenizer.encode("[INST]a[TOOL_CALLS]", allow_special=True)[::2] == [3, 9]
    assert tokenizer.named_tokens["eos_token"] == "</s>"
    names = ["<unk>", "<s>", "</s>", *(f"<t{i}>" for i in range(3, 18))]
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    content = {**FILES["tekken"], "special_tokens": listed}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = model_tokenizer(tmp_path)
    assert tokenizer.encode("<t17><SPECIAL_19>", allow_special=True) == [17, 19]


def test_settings_of_a_sentence_piece_model_count(tmp_path: Path) -> None:
    size = model_tokenizer(folder_of(tmp_path, FOLDERS["bpe"])).vocab_size
    assert has_tokenizer(tmp_path)
    added = {str(size): {"content": "<|new|>", "special": True}, str(size + 3): {"content": "<word>", "special": False}}
    files = with_config("bpe", add_bos_token=False, add_eos_token=True, eos_token="<|new|>", added_tokens_decoder=added)
    tokenizer = model_tokenizer(folder_of(tmp_path, files))
    assert tokenizer.encode("<word>")[-2:] == [size + 3, size]
    assert tokenizer.encode("a")[0] != 1
    assert tokenizer_eos_id(tmp_path) == size


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.model": b"\xff\xfe no model"}, "tokenizer.model cannot be converted to tokenizer.json: "),
        ({"tokenizer.model": b""}, "supported: unigram (1), BPE (2)"),
        ({"tekken.json": b"[]"}, "tekken.json cannot be converted to tokenizer.json: "),
        ({"tekken.json": b'{"config": {"pattern": "("}, "vocab": []}'}, "the byte 0 is not a token"),
        (
            {"tiktoken.model": FOLDERS["kimi"]["tiktoken.model"]},
            "the tokenizer_class 'None' does not say how texts are cut; supported: TikTokenTokenizer, QWenTokenizer",
        ),
        ({**FOLDERS["kimi"], "tiktoken.model": b"IQ== 1\n"}, "the ranks of its 1 tokens are not 0 to 0"),
        ({**FOLDERS["kimi"], "tiktoken.model": b"IQ== 0\n"}, "the byte 0 is not a token"),
        (
            with_config("bpe", added_tokens_decoder={"5": {"content": "<0x05>"}}),
            "a piece is there twice",
        ),
        (
            {**FOLDERS["bpe"], "added_tokens.json": b'{"<0x05>": 800}'},
            "the added token '<0x05>' has id 800, but its vocabulary makes it ",
        ),
        (
            {**FOLDERS["bpe"], "added_tokens.json": b'{"<far>": 2000000000}'},
            "the added token '<far>' has id 2000000000; ids below 1048576 are valid",
        ),
        (
            {"tekken.json": b'{"config": {"pattern": "a", "default_num_special_tokens": 1000000000}, "vocab": []}'},
            "it has 1000000000 special tokens; at most 1048576 are valid",
        ),
        (
            {**FOLDERS["kimi"], "tiktoken.model": base64.b64encode(b"a" * 1025) + b" 0\n"},
            "a token has more than 1024 bytes",
        ),
        (with_config("bpe", added_tokens_decoder={"5": {"content": "a" * 1025}}), "a piece has more than 1024 bytes"),
        (with_config("bpe", bos_token="<none>"), "the bos_token '<none>' is not in its vocabulary"),
        ({"vocab.json": b"{}"}, "has no tokenizer.json; a fast tokenizer is needed"),
    ],
)
def test_tokenizer_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    with pytest.raises(TokenizerError) as refused:
        model_tokenizer_files(folder_of(tmp_path, files))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
