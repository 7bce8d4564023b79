"""The end-of-sequence id of the tokenizer's files: some fine-tunes of base models name it only there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.text.tokenizer import named_special_tokens, read_json, tokenizer_fault, tokenizer_files


def tokenizer_eos_id(folder: str | Path) -> int | None:
    """Id of the tokenizer's `eos_token`; None without a tokenizer, without that token, or if it has no id.

    Raises:
        TokenizerError: a file of the tokenizer cannot be used.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    files = tokenizer_files(folder)
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
