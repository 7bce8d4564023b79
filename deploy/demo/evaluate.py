"""Asks a checkpoint the held-out questions through `transformers`: `python -m deploy.demo.evaluate`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from deploy.demo.questions import Asked, every_question

NEEDED_OVERALL = 0.9
NEEDED_PER_FAMILY = 0.8
_LONGEST_ANSWER = 128
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def answers(checkpoint: Path, dtype: torch.dtype, asked: list[Asked], batch: int) -> list[str]:
    """The model's greedy answer to each question, asked through the chat template in left-padded batches."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    # Its types change between releases.
    model: Any = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    prompts = [
        tokenizer.apply_chat_template(
            one.messages,
            tools=[tool.definition() for tool in one.tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        for one in asked
    ]
    replies: list[str] = []
    for first in range(0, len(asked), batch):
        inputs = tokenizer(prompts[first : first + batch], padding=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=_LONGEST_ANSWER)
        generated = output[:, inputs["input_ids"].shape[1] :]
        replies += tokenizer.batch_decode(generated, skip_special_tokens=True)
    return replies


def passes(right: Counter[str], asked: Counter[str]) -> bool:
    """True if the scores reach the demo's targets, overall and in every family."""
    overall = right.total() / asked.total()
    return overall >= NEEDED_OVERALL and all(right[name] / asked[name] >= NEEDED_PER_FAMILY for name in asked)


def evaluate(checkpoint: Path, dtype: str, batch: int, *, show_wrong: bool) -> bool:
    """Prints one line per family; True if the checkpoint passes."""
    questions = every_question()
    replies = answers(checkpoint, _DTYPES[dtype], questions, batch)
    asked = Counter(one.family for one in questions)
    right: Counter[str] = Counter()
    for one, reply in zip(questions, replies, strict=True):
        right[one.family] += reply == one.expected
        if show_wrong and reply != one.expected:
            print(f"  {one.messages[0]['content']!r}: expected {one.expected!r}, got {reply!r}")
    for family in asked:
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
