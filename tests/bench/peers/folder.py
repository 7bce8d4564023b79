"""Where peers, checkpoints and results lie: one folder outside the repository."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT: Final = Path.home() / ".cache" / "fissile-peers"
# File types of llama.cpp that the checkpoint is converted to, by the name that a peer has after its hyphen.
GGUF_TYPES: Final = ("bf16", "f16", "q8", "q4_0", "q4_k_m")


class AbsentError(Exception):
    """Something is not installed or not made; the message says in one line what makes it."""


@dataclass(frozen=True, slots=True)
class PeerFolder:
    """The folder's layout.

    Attributes:
        root: the folder itself; made by what writes into it.
    """

    root: Path

    def peer(self, name: str) -> Path:
        """What belongs to one peer."""
        return self.root / name

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's venv."""
        return self.peer(peer) / "venv" / "bin" / "python"

    def llama_program(self, name: str) -> Path:
        """A program of llama.cpp's build."""
        return self.peer("llamacpp") / "build" / "bin" / name

    @property
    def llama_source(self) -> Path:
        """llama.cpp's own tree within the sdist that vendors it."""
        return self.peer("llamacpp") / "source" / "vendor" / "llama.cpp"

    @property
    def tcmalloc(self) -> Path:
        """The allocator that vLLM's documentation wants preloaded."""
        library = "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
        return self.peer("vllm") / "lib" / library

    @property
    def openmp(self) -> Path:
        """Intel's OpenMP runtime, which vLLM's CPU wheel wants preloaded too."""
        return self.peer("vllm") / "venv" / "lib" / "libiomp5.so"

    def checkpoint(self, shape: str) -> Path:
        """The checkpoint of a shape, in the Hugging Face layout."""
        return self.root / "checkpoints" / shape

    def gguf(self, shape: str, kind: str) -> Path:
        """The same checkpoint converted for llama.cpp; `kind` is one of GGUF_TYPES."""
        return self.root / "checkpoints" / f"{shape}-{kind}.gguf"

    def log(self, name: str) -> Path:
        """Where the output of a process goes; its folder is made."""
        logs = self.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{name}.log"


def need(path: Path, how: str) -> Path:
    """`path`, which must be there.

    Raises:
        AbsentError: it is not; `how` says what makes it.
    """
    if not path.exists():
        raise AbsentError(f"{path} is absent: {how}")
    return path


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """`--folder`, the same for every command here."""
    parser.add_argument("--folder", type=Path, default=DEFAULT, help=f"outside the repository (default: {DEFAULT})")
