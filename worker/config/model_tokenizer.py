"""The tokenizer of a model, from the files of its folder or from its GGUF file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from common.files import UnreadableFileError, read_file
from common.limits import MAX_CONFIG_FILE_BYTES
from common.text.tokenizer import (
    Tokenizer,
    TokenizerError,
    named_special_tokens,
    read_json,
    tokenizer_fault,
    tokenizer_files,
)
from worker.config.gguf_config import sampling_entries
from worker.config.gguf_file import GgufModel, gguf_files, read_gguf
from worker.config.gguf_tokenizer import gguf_tokenizer_files
from worker.config.published_tokenizer import converted_tokenizer, published_file

_GENERATION: Final = "generation_config.json"


def has_tokenizer(model: str | Path) -> bool:
    """True if a model has a tokenizer, also one that cannot be used; each GGUF file should have one."""
    try:
        if gguf_files(Path(model)):
            return True
    except UnreadableFileError:
        return True
    return (Path(model) / "tokenizer.json").is_file() or published_file(Path(model)) is not None


def model_tokenizer_files(model: str | Path) -> dict[str, bytes]:
    """Contents of the tokenizer's files, by name: see `common.text.tokenizer.tokenizer_files`.

    Args:
        model: a checkpoint folder, or a GGUF file.

    Raises:
        TokenizerError: there is no tokenizer, or a file cannot be read.
    """
    try:
        files = gguf_files(Path(model))
        if files:
            return _gguf_files(Path(model), read_gguf(files))
    except UnreadableFileError as error:
        raise TokenizerError(str(error)) from None
    with naming(model):
        return tokenizer_files(model, converted_tokenizer(Path(model)))


def _gguf_files(model: Path, content: GgufModel) -> dict[str, bytes]:
    files, generation = gguf_tokenizer_files(content), model / _GENERATION
    if generation.is_file():
        return files | {_GENERATION: read_file(generation, MAX_CONFIG_FILE_BYTES)}
    # Routers take from it what a request leaves out, and ModelConfig does for an engine without a router.
    sampling = sampling_entries(content)
    return files | ({_GENERATION: json.dumps(sampling).encode()} if sampling else {})


@contextlib.contextmanager
def naming(model: str | Path) -> Iterator[None]:
    """Adds the model to a TokenizerError that lacks it."""
    try:
        yield
    except TokenizerError as error:
        said = str(error)
        raise TokenizerError(said if str(model) in said else f"{model}: {said}") from None


def model_tokenizer(model: str | Path) -> Tokenizer:
    """Builds a model's tokenizer.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    with naming(model):
        return Tokenizer.from_files(model_tokenizer_files(model))


def tokenizer_eos_id(model: str | Path) -> int | None:
    """Id of the tokenizer's `eos_token`; None without a tokenizer, without that token, or if it has no id.

    Raises:
        TokenizerError: a file of the tokenizer cannot be used.
    """
    if not has_tokenizer(model):
        return None
    with naming(model):
        return _eos_id(model_tokenizer_files(model))


def _eos_id(files: Mapping[str, bytes]) -> int | None:
    try:
        text = named_special_tokens(files).get("eos_token")
        return None if text is None else _token_id(files, text)
    # The JSON of the files may have any shape.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise tokenizer_fault(files, f"the tokenizer's files are not of their usual form: {said}") from None


def _token_id(files: Mapping[str, bytes], text: str) -> int | None:
    decoder = read_json(files, "tokenizer_config.json").get("added_tokens_decoder") or {}
    content = read_json(files, "tokenizer.json")
    added = {token["content"]: int(token_id) for token_id, token in decoder.items()}
    added |= {token["content"]: int(token["id"]) for token in content.get("added_tokens") or ()}
    if text in added:
        return added[text]
    vocab: Any = content["model"].get("vocab") or {}
    # A Unigram vocabulary is a list of tokens with their scores.
    found = vocab.get(text) if isinstance(vocab, dict) else {token: id for id, (token, _) in enumerate(vocab)}.get(text)
    return None if found is None else int(found)
