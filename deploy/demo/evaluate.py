"""Asks a checkpoint the 200 held-out questions through `transformers`: `python -m deploy.demo.evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from deploy.demo.families import FAMILIES, Exchange
from deploy.demo.questions import questions

NEEDED_OVERALL = 0.9
NEEDED_PER_FAMILY = 0.8
_LONGEST_ANSWER = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def answers(checkpoint: Path, dtype: torch.dtype, asked: list[Exchange], batch: int) -> list[str]:
    """The model's greedy answer to each question, asked through the chat template in left-padded batches."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    # Its types change between releases.
    model: Any = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    replies: list[str] = []
    for first in range(0, len(asked), batch):
        chats = [[{"role": "user", "content": one.user}] for one in asked[first : first + batch]]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=_LONGEST_ANSWER)
        generated = output[:, inputs["input_ids"].shape[1] :]
        replies += tokenizer.batch_decode(generated, skip_special_tokens=True)
    return replies


def passes(right: Counter[str], asked: Counter[str]) -> bool:
    """True if the scores reach what the demo promises, overall and in every family."""
    overall = right.total() / asked.total()
    return overall >= NEEDED_OVERALL and all(right[name] / asked[name] >= NEEDED_PER_FAMILY for name in asked)


def evaluate(checkpoint: Path, dtype: str, batch: int, *, show_wrong: bool) -> bool:
    """Prints one line per family; True if the checkpoint passes."""
    exchanges = questions()
    replies = answers(checkpoint, _DTYPES[dtype], exchanges, batch)
    asked = Counter(exchange.family for exchange in exchanges)
    right: Counter[str] = Counter()
    for exchange, reply in zip(exchanges, replies, strict=True):
        right[exchange.family] += reply == exchange.assistant
        if show_wrong and reply != exchange.assistant:
            print(f"  {exchange.user!r}: expected {exchange.assistant!r}, got {reply!r}")
    for family in FAMILIES:
        print(f"{dtype:9s} {family:11s} {right[family]:3d} of {asked[family]}")
    print(f"{dtype:9s} {'all':11s} {right.total():3d} of {asked.total()}")
    return passes(right, asked)


def main() -> None:
    """The command line; exits with 1 when the checkpoint misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--dtype", choices=[*_DTYPES], default="bfloat16")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--show-wrong", action="store_true")
    arguments = parser.parse_args()
    ok = evaluate(arguments.checkpoint, arguments.dtype, arguments.batch, show_wrong=arguments.show_wrong)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
