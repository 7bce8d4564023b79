"""Heads of checkpoints: what a model makes of its hidden states."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

# An output head makes logits of tokens, a classifier numbers of labels; without a head there are the states alone.
Head: TypeAlias = Literal["output", "none", "classifier"]
OUTPUT_HEAD: Final = "output"
NO_HEAD: Final = "none"
CLASSIFIER: Final = "classifier"
