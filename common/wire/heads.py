"""Heads of checkpoints: what a model computes from its hidden states."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

# An output head gives logits of tokens, a classifier gives scores of labels. Without a head the states are the
# result.
Head: TypeAlias = Literal["output", "none", "classifier"]
OUTPUT_HEAD: Final = "output"
NO_HEAD: Final = "none"
CLASSIFIER: Final = "classifier"
