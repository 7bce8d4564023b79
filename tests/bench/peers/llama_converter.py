"""llama.cpp's own converter for an unknown tokenizer; run by `convert.py` in a peer's venv.

The converter knows tokenizers by a hash of their tokens of one text, and chooses by it how the server splits texts.
Prompts are token ids here, so any choice works. Arguments: llama.cpp's source folder, then the converter's own.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    source = sys.argv.pop(1)
    sys.path[0] = source
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    base: Any = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda _model, _tokenizer: "qwen2"
    converter.main()


if __name__ == "__main__":
    main()
