"""Names of the tensors of a checkpoint, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

INDEX_FILE: Final = "model.safetensors.index.json"
# Longest header that is read: more than any checkpoint's.
_MAX_HEADER: Final = 100 << 20


def stored_names(folder: Path) -> frozenset[str]:
    """Names of a checkpoint's tensors, of its index or the headers of its files.

    What cannot be read has none here; loading says why.
    """
    try:
        index = folder / INDEX_FILE
        if index.is_file():
            return frozenset(json.loads(index.read_bytes())["weight_map"])
        return frozenset[str]().union(*map(_names_in, folder.glob("*.safetensors")))
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def _names_in(path: Path) -> frozenset[str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return frozenset(json.loads(file.read(min(size, _MAX_HEADER))))
