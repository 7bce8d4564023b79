"""llama.cpp's own converter for an unknown tokenizer; run by `convert.py` and tests/peers in a peer's environment.

The converter knows tokenizers by a hash of their tokens of one text, and chooses by it how the server splits texts.
Prompts are token ids here, so any choice works, and every model has a byte-level tokenizer. Arguments: llama.cpp's
source folder, then the converter's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any


def main() -> None:
    source = sys.argv.pop(1)
    sys.path[:1] = [source, f"{source}/gguf-py"]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    model: Any = importlib.import_module("conversion.base").TextModel
    importlib.import_module("conversion").load_all_models()
    for each in _below(model):
        each.set_vocab = model._set_vocab_gpt2
        each.get_vocab_base_pre = lambda _model, _tokenizer: "qwen2"
    converter.main()


def _below(model: Any) -> Iterator[Any]:
    yield model
    for each in model.__subclasses__():
        yield from _below(each)


if __name__ == "__main__":
    main()
