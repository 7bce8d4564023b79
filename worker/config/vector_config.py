"""Reads what a checkpoint was trained for besides generation: vectors of texts, and relevance of documents.

Both are said in files of sentence-transformers beside config.json: `modules.json`, `1_Pooling/config.json`,
`1_LogitScore/config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.files import UnreadableFileError, read_json_file
from common.limits import MAX_CONFIG_FILE_BYTES
from common.params.pooling import LAST, MEAN, Pooling
from common.text.tokenizer import TokenizerError
from worker.config.model_config import ModelError
from worker.config.model_tokenizer import model_tokenizer

# Names of the ways in both forms of the file.
_POOLINGS: Final[dict[str, Pooling]] = {
    "lasttoken": LAST,
    "mean": MEAN,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
}
# Kinds of modules that change no vector, or as Embed does.
_MODULES: Final = frozenset(("Transformer", "Pooling", "Normalize", "LogitScore"))
_MODE: Final = "pooling_mode"
# Of config.json, as vLLM has it: the texts of the tokens "no" and "yes".
_CLASSIFIER: Final = "classifier_from_token"


@dataclass(frozen=True, slots=True)
class RelevanceTokens:
    """Tokens by which a model answers whether a document is relevant."""

    yes: int
    no: int


def checkpoint_pooling(folder: str | Path) -> Pooling | None:
    """Pooling by which a checkpoint's hidden states become a vector: `LAST` if it names none, None if it names an
    unsupported pooling or a further unsupported module.

    Raises:
        ModelError: one of its files is not what it has to be.
    """
    modules = _modules(Path(folder))
    if not modules.keys() <= _MODULES:
        return None
    config = _read(Path(folder) / modules.get("Pooling", "1_Pooling") / "config.json")
    if isinstance(config.get(_MODE), str):
        return _POOLINGS.get(config[_MODE])
    modes = [name for name, value in config.items() if name.startswith(f"{_MODE}_") and value is True]
    if not modes:
        return LAST
    return _POOLINGS.get(modes[0]) if len(modes) == 1 else None


def relevance_tokens(folder: str | Path, source: Mapping[str, Any], vocab_size: int) -> RelevanceTokens | None:
    """Tokens by which a checkpoint says whether a document is relevant; None if it was not trained for that.

    Args:
        folder: of the checkpoint.
        source: its config.json.
        vocab_size: ids are below it.

    Raises:
        ModelError: what it says makes no two tokens.
    """
    config = _read(Path(folder) / "1_LogitScore" / "config.json")
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    if None in ids:
        texts = source.get(_CLASSIFIER)
        if texts is None:
            return None
        ids = _token_ids(folder, texts)
    yes, no = ids
    if not (type(yes) is type(no) is int and yes != no and max(yes, no) < vocab_size and min(yes, no) >= 0):
        raise ModelError(f"{folder}: the tokens of yes and no are {yes} and {no}; two ids below {vocab_size} are due")
    return RelevanceTokens(yes, no)


def _modules(folder: Path) -> dict[str, str]:
    """Kinds and folders of the modules in `modules.json`; empty without that file.

    Raises:
        ModelError: it is no list of modules.
    """
    path = folder / "modules.json"
    if not path.exists():
        return {}
    try:
        modules = read_json_file(path, MAX_CONFIG_FILE_BYTES)
        found = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    except (UnreadableFileError, TypeError, KeyError):
        raise ModelError(f"{path} is not a list of modules, each with type and path") from None
    for name in found.values():
        if name in (".", "..") or Path(name).name != name:
            raise ModelError(f"{path} names {name!r}; folders in the same folder are valid")
    return found


def _token_ids(folder: str | Path, texts: object) -> list[int | None]:
    """Ids of the tokens for yes and no; config.json lists them as no, yes."""
    if not (isinstance(texts, list) and len(texts) == 2 and all(isinstance(text, str) for text in texts)):
        raise ModelError(f'config.json: {_CLASSIFIER} is {texts!r}; the texts of two tokens, ["no", "yes"], are needed')
    tokenizer = model_tokenizer(folder)
    try:
        found = [tokenizer.encode_inside(text) for text in reversed(texts)]
    except (TokenizerError, TypeError, UnicodeError) as error:
        raise ModelError(f"config.json: {_CLASSIFIER} is {texts!r}; texts of two tokens are valid ({error})") from None
    return [ids[0] if len(ids) == 1 else None for ids in found]


def _read(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; empty without the file."""
    if not path.exists():
        return {}
    try:
        content = read_json_file(path, MAX_CONFIG_FILE_BYTES)
    except UnreadableFileError as error:
        raise ModelError(str(error)) from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
