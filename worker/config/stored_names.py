"""Names of the tensors of a checkpoint, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from common.files import UnreadableFileError, is_regular, parse_json, read_json_file
from common.limits import MAX_WEIGHT_INDEX_BYTES

INDEX_FILE: Final = "model.safetensors.index.json"


def stored_names(folder: Path) -> frozenset[str]:
    """Names of a checkpoint's tensors, from its index or the headers of its files.

    What cannot be read has none here; loading says why.
    """
    try:
        index = folder / INDEX_FILE
        if index.is_file():
            return frozenset(read_json_file(index, MAX_WEIGHT_INDEX_BYTES)["weight_map"])
        return frozenset[str]().union(*map(_names_in, filter(is_regular, folder.glob("*.safetensors"))))
    except (OSError, ValueError, KeyError, TypeError, UnreadableFileError):
        return frozenset()


def _names_in(path: Path) -> frozenset[str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return frozenset(parse_json(file.read(min(size, MAX_WEIGHT_INDEX_BYTES))))
