"""What weights of fewer bits cost in perplexity: `python -m tests.bench.weight_loss`.

The text is the demo model's: stories of its training mixture from another seed. Of other documents it learned the
answers alone, and random weights have no perplexity worth a word. Takes half a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from itertools import islice
from pathlib import Path

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from tokenizers import Tokenizer

from common.config import Config
from common.params.config_parts import QUANTIZE_NO
from deploy.demo import corpus
from worker.llm_engine import LLMEngine

DEMO = Path(corpus.__file__).parent / "checkpoint"
SEED = 4
LONGEST = 1024


def texts(count: int) -> list[list[int]]:
    """Token ids of unseen documents."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    unseen = dataclasses.replace(corpus.SEVENTH, seed=SEED)
    stories = (one for one in corpus.documents(unseen) if one.learned is corpus.Learned.EVERYTHING)
    return [tokenizer.encode(one.text).ids[:LONGEST] for one in islice(stories, count)]


def perplexity(quantize: str, dtype: str, prompts: list[list[int]]) -> float:
    """e to the mean negative logprob of all tokens but the first of each document."""
    config = Config(model=str(DEMO), dtype=dtype, quantize=quantize, kernels="cpu", kv_cache_memory=1 << 28)
    engine = LLMEngine(config)
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    found = [
        one["logprob"]
        for answer in engine.generate(prompts, params)
        for one in answer["prompt_logprobs"]
        if one is not None and one["logprob"] is not None
    ]
    engine.close()
    return math.exp(-sum(found) / len(found))


def main() -> None:
    """Prints a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = texts(options.documents)
    print(f"{sum(map(len, prompts))} tokens", flush=True)
    for quantize, dtype in (
        (QUANTIZE_NO, "float32"),
        (QUANTIZE_NO, "bfloat16"),
        ("int8", "bfloat16"),
        ("int4", "bfloat16"),
    ):
        print(f"{quantize} {dtype}: {perplexity(quantize, dtype, prompts):.4f}", flush=True)


if __name__ == "__main__":
    main()
