"""Converts the checkpoint for llama.cpp with its own converter: `python -m tests.bench.peers.convert [--kinds q8]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.bench.peers.checkpoint import add_shape_option
from tests.bench.peers.folder import GGUF_TYPES, AbsentError, PeerFolder, add_folder_option, need

# What llama.cpp's converter writes; its other types are made by llama-quantize from bfloat16.
_OUTTYPES: Final = {"bf16": "bf16", "f16": "f16", "q8": "q8_0"}
_SCRIPT: Final = Path(__file__).with_name("llama_converter.py")


def convert(folder: PeerFolder, shape: str, kind: str) -> Path:
    """Writes the checkpoint as `kind` unless it is there. Returns the file.

    Raises:
        AbsentError: there is no checkpoint, or llama.cpp's source or the converter's venv are not installed.
    """
    install = f"python -m tests.bench.peers.install llamacpp --folder {folder.root}"
    make = f"python -m tests.bench.peers.checkpoint --folder {folder.root} --shape {shape}"
    python, source = need(folder.python("transformers"), install), need(folder.llama_source, install)
    checkpoint, target = need(folder.checkpoint(shape) / "tokenizer.json", make).parent, folder.gguf(shape, kind)
    if not target.exists():
        unfinished = target.with_suffix(".part")
        command: list[str | Path] = []
        if kind in _OUTTYPES:
            command = [python, _SCRIPT, source, checkpoint, "--outtype", _OUTTYPES[kind], "--outfile", unfinished]
        else:
            quantize = need(folder.llama_program("llama-quantize"), install)
            command = [quantize, convert(folder, shape, "bf16"), unfinished, kind.upper()]
        subprocess.run([str(part) for part in command], check=True)
        unfinished.replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_folder_option(parser)
    add_shape_option(parser)
    parser.add_argument("--kinds", nargs="+", choices=GGUF_TYPES, default=GGUF_TYPES)
    options = parser.parse_args()
    try:
        for kind in options.kinds:
            target = convert(PeerFolder(options.folder.resolve()), options.shape, kind)
            print(f"{target}: {target.stat().st_size / 1e9:.2f} GB", flush=True)
    except (AbsentError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
