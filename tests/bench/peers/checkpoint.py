"""Makes the checkpoint that all peers serve: `python -m tests.bench.peers.checkpoint [--shape 60m]`.

Random bfloat16 weights in Qwen3's layout and a byte-level tokenizer with an entry for every id, so that no peer meets
an id that it cannot decode. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.folder import PeerFolder, add_folder_option
from tests.checkpoints import make_checkpoint
from tests.shapes import QWEN3_0_6B, QWEN3_60M

_COMMON: Final[dict[str, Any]] = {"max_position_embeddings": 4096, "tie_word_embeddings": True}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-0.6b": _COMMON | QWEN3_0_6B,
    "qwen3-60m": _COMMON | QWEN3_60M,
}
DEFAULT_SHAPE: Final = "qwen3-0.6b"


def add_shape_option(parser: argparse.ArgumentParser) -> None:
    """`--shape`, the same for every command here."""
    parser.add_argument("--shape", choices=list(SHAPES), default=DEFAULT_SHAPE)


def make(folder: PeerFolder, shape: str, seed: int = 0) -> Path:
    """Writes the checkpoint of `shape`, unless it is there. Returns its folder."""
    target = folder.checkpoint(shape)
    if not (target / "tokenizer.json").is_file():
        make_checkpoint(target, dtype="bfloat16", seed=seed, **SHAPES[shape])
    return target


def main() -> None:
    """Prints the checkpoint's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folder_option(parser)
    add_shape_option(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args()
    target = make(PeerFolder(options.folder), options.shape, options.seed)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
