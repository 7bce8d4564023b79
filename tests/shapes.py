"""Shapes of models that several tests and benchmarks make checkpoints of; parameters of `make_checkpoint`."""

from __future__ import annotations

from typing import Any, Final

# 596 M parameters.
QWEN3_0_6B: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
}
# 8.2 G parameters.
QWEN3_8B: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
# 60M parameters, for benchmarks.
QWEN3_60M: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 32_000,
}
# Shapes by their names in commands.
NAMED: Final = {
    "tiny": {"num_hidden_layers": 1},
    "qwen3-60m": QWEN3_60M,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
}
