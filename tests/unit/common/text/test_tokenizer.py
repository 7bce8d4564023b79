"""Tokenizer against transformers, and the promise that a client's text never becomes a special token."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from common.text.tokenizer import Tokenizer, TokenizerError, files_sha256, tokenizer_files
from tests.unit.common.text.support import KINDS, Files, backend, files, reference, save

TEXTS = ["", "hello world", " two  spaces ", "中文 and 😀", "a<think>b", "line\n\nnext\r\n", "\ud7ff\ufdd0 private"]
SPECIALS = ["<|im_end|>", "<|im_start|>", "<|im_end|><|im_end|>"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_is_encoded_as_by_transformers(kind: str, text: str) -> None:
    assert Tokenizer.from_files(files(kind)).encode(text) == reference(kind)(text).input_ids


def pair_ids(tokenizer: Tokenizer, first: str, second: str) -> list[int]:
    parts = (tokenizer.encode_pair_pieces(text, is_first=place) for text, place in ((first, True), (second, False)))
    return [id for pieces in parts for piece in pieces for id in piece]


PAIRS = [("a query", " two  docs"), ("", "x"), ("a", "a")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pairs_are_encoded_as_by_transformers(kind: str, first: str, second: str) -> None:
    assert pair_ids(Tokenizer.from_files(files(kind)), first, second) == reference(kind)(first, second).input_ids


START, END = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize("pair", ["$A $B:1", f"{START} $A {START}:1 $B:1", f"{START} $A {END} $B:1 {END}:1"])
def test_pair_ids_include_post_processor_tokens(pair: str) -> None:
    made = backend("byte_level")
    special = [(token, made.token_to_id(token)) for token in (START, END)]
    made.post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=special)
    tokenizer = Tokenizer.from_files({**files("byte_level"), "tokenizer.json": made.to_str().encode()})
    for first, second in PAIRS:
        assert pair_ids(tokenizer, first, second) == made.encode(first, second).ids
    # Text of a client never becomes a special token.
    around = [id for id in pair_ids(tokenizer, END, START) if id in tokenizer.special_ids]
    assert around == [id for id in made.encode("a", "a").ids if id in tokenizer.special_ids]


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_in_plain_text_stay_text(kind: str, special: str) -> None:
    tokenizer = Tokenizer.from_files(files(kind))
    text = f"say {special} now"

    ids = tokenizer.encode(text)

    assert tokenizer.special_ids.isdisjoint(ids[1:])
    assert tokenizer.decode(ids) == text


SHARED = {kind: Tokenizer.from_files(files(kind)) for kind in ("byte_level", "sentencepiece")}


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<|", "|>", "a", " ", "\n", "é"]), max_size=12))
def test_mixed_pieces_never_become_special_tokens(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name, tokenizer in SHARED.items():
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids[1:] if name == "sentencepiece" else ids)
        # SentencePiece replaces a leading space by its own.
        assert tokenizer.decode(ids) in ((text,) if name == "byte_level" else (text, text.removeprefix(" ")))


def test_special_tokens_are_parsed_if_allowed(kind: str) -> None:
    tokenizer = Tokenizer.from_files(files(kind))
    expected = backend(kind).encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False).ids

    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>", allow_special=True) == expected
    assert len(tokenizer.special_ids & set(expected)) == 2


def test_bos_precedes_only_plain_text() -> None:
    tokenizer = Tokenizer.from_files(files("sentencepiece"))

    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("<s>hello", allow_special=True).count(1) == 1


def auto_tokenizer(made: Files, folder: Path) -> Any:
    """transformers' `AutoTokenizer` of the same files."""
    save(made, folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


FLAGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_eos_token": True},
    {"add_eos_token": False},
    {"add_bos_token": False, "add_eos_token": True},
]


@pytest.mark.each_value
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("model_type", ["llama", "phi3", None])
@pytest.mark.parametrize("framed", ["byte_level", "sentencepiece"])
def test_tokens_around_a_text_equal_auto_tokenizer(
    framed: str, model_type: str | None, name: str | None, flags: dict[str, Any], tmp_path: Path
) -> None:
    """Regression: flags that the class ignores removed Llama 3's BOS token, or added EOS to every prompt."""
    named = {} if name is None else {"tokenizer_class": name}
    made = files(framed, bos_token="<|im_start|>", eos_token="<|im_end|>", **named, **flags)
    if framed == "byte_level":
        made["tokenizer.json"] = llama3_like().to_str().encode()
    made["config.json"] = json.dumps({"model_type": model_type} if model_type else {}).encode()
    tokenizer, expected = Tokenizer.from_files(made), auto_tokenizer(made, tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == expected(text).input_ids
    assert pair_ids(tokenizer, "a b", "c") == expected("a b", "c").input_ids


def llama3_like() -> tokenizers.Tokenizer:
    """A byte-level tokenizer whose post-processor adds `<|im_start|>` before a text."""
    made = tokenizers.Tokenizer.from_str(backend("byte_level").to_str())
    special = [("<|im_start|>", made.token_to_id("<|im_start|>"))]
    pair = "<|im_start|> $A <|im_start|> $B"
    made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", pair=pair, special_tokens=special)
    return made


def test_flags_ignored_by_the_class_change_no_token() -> None:
    """transformers 4.57.1 and 5.24.0 ignore these flags for PreTrainedTokenizerFast."""
    for flags in FLAGS:
        made = files(
            bos_token="<|im_start|>", eos_token="<|im_end|>", tokenizer_class="PreTrainedTokenizerFast", **flags
        )
        made["tokenizer.json"] = llama3_like().to_str().encode()
        ids = Tokenizer.from_files(made).encode("hello")
        assert [id in (0, 1) for id in ids] == [True, *[False] * (len(ids) - 1)]


def test_special_tokens_equal_auto_tokenizer(kind: str, tmp_path: Path) -> None:
    config = {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
        "additional_special_tokens": ["hello"],
    }
    made = files(kind, **config)
    tokenizer, expected = Tokenizer.from_files(made), auto_tokenizer(made, tmp_path)
    assert tokenizer.special_tokens >= set(expected.all_special_tokens)
    assert dict(tokenizer.named_tokens) == expected.special_tokens_map
    hello = expected.convert_tokens_to_ids("hello")
    assert hello in tokenizer.special_ids
    assert hello not in tokenizer.encode("a hello")


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    made = files(tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    made["config.json"] = json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}).encode()
    folder = save(made, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    assert Tokenizer.from_folder(folder).encode("hello") == Tokenizer.from_files(files()).encode("hello")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../escaped.jinja", "additional_chat_templates/../x.jinja", "/x", "own.py"])
def test_files_of_other_names_are_not_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker chooses names and contents of files that a router writes for transformers."""
    written: list[Path] = []
    write = Path.write_bytes

    def recording(path: Path, data: bytes) -> int:
        written.append(path)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", recording)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Tokenizer.from_files({**files(), name: b"x"}).encode("hello")
    assert {path.name for path in written} == {"tokenizer.json", "tokenizer_config.json"}
    assert not list(tmp_path.iterdir())


READING = """
import socket, sys
sys.path[:0] = {paths!r}
class Refused(socket.socket):
    def connect(self, address):
        raise SystemExit(f"connects to {{address}}")
socket.socket = Refused
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer
print(ChatTemplate.from_tokenizer(Tokenizer.from_folder({folder!r})) is not None, "torch" in sys.modules)
"""


def test_reading_needs_neither_network_nor_torch(tmp_path: Path) -> None:
    made = files(chat_template="{{ messages }}", tokenizer_class="PreTrainedTokenizerFast")
    folder = save({**made, "config.json": b'{"model_type": "llama"}'}, tmp_path)
    root = Path(__file__).resolve().parents[4]
    code = READING.format(paths=[str(root), str(root / "protos")], folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    # transformers must not write to stderr, because it has the log lines.
    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_named_special_tokens_count_although_not_flagged() -> None:
    plain, named = (Tokenizer.from_files(files("byte_level", **c)) for c in ({}, {"pad_token": "<think>"}))
    think = backend("byte_level").token_to_id("<think>")

    assert think in plain.encode("a<think>b")
    assert think not in named.encode("a<think>b")
    assert named.special_ids - plain.special_ids == {think}


def test_tokenizer_truncation_setting_does_not_cut_prompts() -> None:
    content = json.loads(backend("byte_level").to_str())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(content).encode()})

    assert tokenizer.decode(tokenizer.encode("hello world " * 20)) == "hello world " * 20


def test_vocab_size_and_token_strings() -> None:
    tokenizer = Tokenizer.from_files(files("byte_level"))

    assert tokenizer.vocab_size == backend("byte_level").get_vocab_size()
    assert tokenizer.token_strings([1, tokenizer.vocab_size]) == ["<|im_end|>", ""]


def test_decode_keeps_special_tokens_when_asked() -> None:
    tokenizer = Tokenizer.from_files(files("byte_level"))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True)

    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_sha256_covers_names_lengths_and_bytes() -> None:
    expected = hashlib.sha256()
    for name, data in (("a", b"x"), ("b", b"")):
        expected.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)

    assert files_sha256({"b": b"", "a": b"x"}) == expected.hexdigest()
    assert Tokenizer.from_files(files()).sha256 == files_sha256(files())
    assert files_sha256({"a": b"xb"}) != files_sha256({"a": b"x", "b": b""})


def test_files_of_a_folder(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"large")

    found = tokenizer_files(tmp_path)

    assert set(found) == {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert tokenizer_files(tmp_path)["additional_chat_templates/tool_use.jinja"] == b"x"
    assert Tokenizer.from_folder(tmp_path).encode("hi") == reference()("hi").input_ids


def test_unrelated_config_entries_keep_tokenizer_digest(tmp_path: Path) -> None:
    for name, data in files().items():
        (tmp_path / name).write_bytes(data)
    found = set()
    for entries in ({}, {"rope_theta": 1.0}, {"model_type": "llama"}):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        found.add(files_sha256(tokenizer_files(tmp_path)))
    assert len(found) == 2
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(TokenizerError, match=r"config\.json"):
        tokenizer_files(tmp_path)


def test_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^.* has no tokenizer\.json; .*$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"tokenizer.json": b"{"},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff\xfe"},
        {"tokenizer.json": b"[]"},
        files() | {"tokenizer_config.json": b"nope"},
    ],
)
def test_unusable_files_are_one_line(bad: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(bad)
    assert "\n" not in str(caught.value)


def test_huge_token_id_is_refused_at_once() -> None:
    """Former fault: the library took 8 GB and a minute for the ids below."""
    content = json.loads(files()["tokenizer.json"])
    vocab = content["model"]["vocab"]
    highest = max(vocab, key=lambda token: vocab[token])
    vocab[highest] = 2**31
    with pytest.raises(TokenizerError, match=r"has the id 2147483648; valid: below 1048576"):
        Tokenizer.from_files(files() | {"tokenizer.json": json.dumps(content).encode()})


def replacement(old: dict[str, str], new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


def with_steps(part: str, steps: list[dict[str, Any]]) -> dict[str, bytes]:
    content = json.loads(files()["tokenizer.json"])
    content[part] = {"type": "Sequence", f"{part}s": steps}
    return files() | {"tokenizer.json": json.dumps(content).encode()}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        # Former fault: these made a text of one letter too long for any memory.
        [replacement({"String": "a"}, "a" * 1000)] * 6,
        [replacement({"Regex": "a"}, "a")] * 13,
        [replacement({"String": "aa"}, "aaa")] * 13,
        # Six characters in JSON, one in a text.
        [replacement({"String": "\x01"}, "\x01" * 6)] * 5,
        # In another order, and with a pattern that is none.
        [{"other": {"String": "a" * 1000}, "content": "a" * 1000, "pattern": {"String": "a"}, "type": "Replace"}] * 2,
        [{"type": "Replace", "pattern": {"Regex": "a"}, "other": {"String": "aa"}, "content": "aa"}] * 8,
    ],
)
def test_texts_that_grow_without_bound_are_refused(part: str, steps: list[dict[str, Any]]) -> None:
    with pytest.raises(TokenizerError, match=f"its {part} makes texts too long; at most 4096 times"):
        Tokenizer.from_files(with_steps(part, steps))


def test_steps_that_grow_each_other_are_refused() -> None:
    """U+FDFA is 18 characters in NFKC, three of them blanks."""
    with pytest.raises(TokenizerError, match="its normalizer makes texts too long"):
        Tokenizer.from_files(with_steps("normalizer", [replacement({"String": " "}, "\ufdfa"), {"type": "NFKC"}] * 3))


def test_replacements_that_keep_the_length_are_no_growth() -> None:
    """Former fault: thirteen of one character by one were refused."""
    steps = [replacement({"String": chr(blank)}, " ") for blank in (0xA0, *range(0x2000, 0x200B), 0x202F)]
    tokenizer = Tokenizer.from_files(with_steps("normalizer", [{"type": "NFKC"}, *steps, *steps]))
    assert tokenizer.encode("a\u2003b\xa0c") == tokenizer.encode("a b c")


def test_two_tokens_with_one_id_are_refused() -> None:
    """Former fault: an exception or a panic of the library, which had lost one of them."""
    content = json.loads(files()["tokenizer.json"])
    model = content["model"]
    first, second = model["merges"][0] if isinstance(model["merges"][0], list) else model["merges"][0].split(" ")
    model["vocab"][first] = model["vocab"][second]
    with pytest.raises(TokenizerError, match="gives several tokens the same id") as caught:
        Tokenizer.from_files(files() | {"tokenizer.json": json.dumps(content).encode()})
    assert "\n" not in str(caught.value)
