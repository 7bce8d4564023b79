"""Makes recorded_tokenizers.json: small tokenizers, and the ids that the packages of their formats give.

Run it where sentencepiece, tiktoken and mistral-common are installed, which the tests do not need:
`python tests/unit/worker/config/record_tokenizers.py`.
"""

from __future__ import annotations

import base64
import io
import json
import random
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("recorded_tokenizers.json")
PARTS = (
    *(
        "hello",
        " ",
        "  ",
        "   ",
        "    ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        " world",
        "The quick brown fox",
        "日本語",
        "中文测试",
    ),
    *(
        "😀",
        "👨‍👩‍👧",
        "é",
        "a\u0301",
        "ﬁ",
        "①",
        "한국어",
        "def f(x):\n    return x",
        '{"a": 1}',
        "<s>",
        "</s>",
        "[INST]",
    ),
    *(
        "[TOOL_CALLS]",
        "<|im_start|>",
        "<|im_end|>",
        "▁",
        "▁▁",
        " .",
        "1234567",
        "3.14",
        "\u00a0",
        "\u200b",
        "I'LL can't",
    ),
    *("HELLOworld", "ΑΒγδ", "汉字abc漢字DEF", "----", "\x00", "\ufffd", "🇩🇪"),
)
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts() -> list[str]:
    draw = random.Random(41)
    drawn = ["".join(draw.choice(PARTS) for _ in range(draw.randint(1, 8))) for _ in range(100)]
    return ["", " ", "  ", "a", " a", "a ", "▁a", "\n", *PARTS, *drawn]


def corpus() -> str:
    root = Path(__file__).resolve().parents[4]
    pages = [root / "README.md", root / "docs" / "tutorial.md", root / "common" / "errors.py"]
    return "\n".join(page.read_text("utf-8") for page in pages) + "\n日本語 中文测试 汉字 한국어 ΑΒγδ é 😀\n" * 20


def sentence_piece(**options: Any) -> tuple[str, list[list[int]]]:
    sentencepiece = import_module("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for line in corpus().splitlines() if line.strip()), model_writer=written,
        vocab_size=380, byte_fallback=True, normalization_rule_name="identity", minloglevel=2, **options,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return base64.b64encode(written.getvalue()).decode(), [model.encode(text) for text in texts()]


def main() -> None:
    tiktoken = import_module("tiktoken")

    bpe, bpe_ids = sentence_piece(
        model_type="bpe", remove_extra_whitespaces=False, user_defined_symbols=["<|im_start|>", "    "]
    )
    unigram, unigram_ids = sentence_piece(model_type="unigram", add_dummy_prefix=False)
    ranks: dict[bytes, int] = import_module("tiktoken._educational").bpe_train(corpus(), 450, TEKKEN, visualise=None)
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    tekken: dict[str, Any] = {
        "config": {
            "pattern": TEKKEN, "num_vocab_tokens": 450, "default_vocab_size": 470, "default_num_special_tokens": 20,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for token, rank in ranks.items()
        ],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tekken.json"
        path.write_text(json.dumps(tekken))
        mistral = import_module("mistral_common.tokens.tokenizers.tekken").Tekkenizer.from_file(path)
    encodings = {
        name: tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        for name, pattern in (("kimi", KIMI), ("qwen", QWEN))
    }
    found = {
        "texts": texts(),
        "files": {"bpe": bpe, "unigram": unigram, "ranks": lines, "tekken": tekken},
        "ids": {
            "bpe": bpe_ids,
            "unigram": unigram_ids,
            "tekken": [mistral.encode(text, bos=False, eos=False) for text in texts()],
            **{name: [encoding.encode_ordinary(text) for text in texts()] for name, encoding in encodings.items()},
        },
    }
    PAGE.write_text(json.dumps(found, ensure_ascii=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
