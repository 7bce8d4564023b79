"""Reads a tokenizer's files with `AutoTokenizer` of transformers: class, special tokens, chat templates.

Nothing is downloaded, and no code of a checkpoint runs. transformers is imported when the first tokenizer is read. The
import takes almost a second and 23 MB, without PyTorch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import tokenizers

from common.text.deferred_torch import deferred_torch

if find_spec("transformers") is None:
    # Raised at import, so that a command fails at its start and not at the first tokenizer.
    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

# Entry of tokenizer_config.json that names code of the checkpoint.
_REMOTE_CODE: Final = "auto_map"
# Entries of config.json that choose the class of some tokenizers.
CLASS_KEYS: Final = ("model_type", "model_name", "tokenizer_class")
_MISTRAL_COMMON: Final = "MistralCommonBackend"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer as transformers reads it from its files.

    Attributes:
        backend: tokenizer of the library `tokenizers`, with the post-processor that adds tokens around a text.
        named_tokens: texts of `bos_token`, `eos_token`, ... by name, as chat templates see them.
        special_tokens: texts of all special tokens.
        templates: chat templates by name; a single one is named `default`.
    """

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    special_tokens: frozenset[str]
    templates: Mapping[str, str]


def import_transformers() -> None:
    """Imports the part of transformers that reads tokenizers. The first import takes almost a second."""
    # Log lines of transformers are not in this service's format, and their advice is not for operators.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with deferred_torch():
        from transformers import AutoTokenizer  # noqa: F401, PLC0415


def read_tokenizer(
    files: Mapping[str, bytes], config: Mapping[str, Any], settings: Mapping[str, Any]
) -> TokenizerParts:
    """Reads a tokenizer from its files, with `AutoTokenizer` of transformers.

    Args:
        files: contents by name; `tokenizer.json` is one of them.
        config: content of config.json; empty without one.
        settings: content of tokenizer_config.json; empty without one.

    Raises:
        Exception: transformers or one of its libraries cannot use a file; any type.
    """
    import_transformers()
    with tempfile.TemporaryDirectory(prefix="fissile-tokenizer-") as folder, deferred_torch():
        _write(files, settings, Path(folder))
        read = _auto_tokenizer(folder, config, settings)
    backend: tokenizers.Tokenizer = read.backend_tokenizer
    # A file that was saved during training may truncate prompts silently.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special = frozenset(flagged.union(map(str, read.all_special_tokens))) - {""}
    templates = dict(found) if isinstance(found := read.chat_template or {}, Mapping) else {"default": found}
    for name, text in templates.items():
        if not isinstance(text, str) or any("\ud800" <= each <= "\udfff" for each in text):
            raise ValueError(f"the chat template {name!r} is not a text")
    return TokenizerParts(backend, dict(read.special_tokens_map), special, templates)


def _auto_tokenizer(folder: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedConfig  # noqa: PLC0415
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES  # noqa: PLC0415

    # The base class instead of the model's own config class: some of these import PyTorch.
    read: Any = PreTrainedConfig()
    for name in CLASS_KEYS:
        if config.get(name) is not None:
            setattr(read, name, str(config[name]))
    options: dict[str, Any] = {}
    if not settings.get("tokenizer_class") and not config.get("tokenizer_class"):
        found = TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
        if found not in (None, _MISTRAL_COMMON):
            options["tokenizer_type"] = str(config.get("model_type"))
    return AutoTokenizer.from_pretrained(
        folder, config=read, local_files_only=True, trust_remote_code=False, mistral_format=False, **options
    )


def _write(files: Mapping[str, bytes], settings: Mapping[str, Any], folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    if _REMOTE_CODE in settings:
        kept = {key: value for key, value in settings.items() if key != _REMOTE_CODE}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
