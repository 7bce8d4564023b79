"""Time of a mask by grammars in GBNF: `python -m tests.bench.gbnf_masks --folder FOLDER [--texts 20]`.

The folder has a tokenizer, as `python -m tests.bench.constraints --folder FOLDER --prepare` makes it. Each grammar is
walked along random texts of its own, token by token; the first walk, in which the library makes its tables, counts too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Final

from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.text.tokenizer import Tokenizer
from tests.gbnf import Reference
from tests.unit.common.constraints.test_gbnf import GRAMMARS
from worker.grammars import Grammars, model_grammars

# A key and a value could each continue at the other's start, so both are read by characters.
_PAIRS: Final = r"""
root ::= object
object ::= "{" (key ":" value ";")* "}"
key ::= [a-z: ]+
value ::= object | [a-z0-9: ]+
"""


def main() -> None:
    """Prints a line for each grammar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=20)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(options.folder)
    end = max(tokenizer.added_tokens)
    grammars = model_grammars(tokenizer, tokenizer.vocab_size, frozenset({end}))
    checker = GrammarChecker(tokenizer.added_tokens, {end})
    for name, grammar in {**GRAMMARS, "by characters": _PAIRS}.items():
        text = checker.check(Constraint("grammar", (grammar,)), optional_space=False)
        times = _times(grammars, text, tokenizer, _texts(grammar, options.texts))
        median, mean, most = statistics.median(times), statistics.mean(times), max(times)
        print(f"{name}: {len(times)} masks, median {median:.0f} us, mean {mean:.0f} us, longest {most:.0f} us")


def _texts(grammar: str, number: int) -> list[str]:
    reference, rng = Reference(grammar), random.Random(0)
    return [reference.sample(rng, 200) for _ in range(number)]


def _times(grammars: Grammars, grammar: str, tokenizer: Tokenizer, texts: list[str]) -> list[float]:
    """Microseconds of each mask."""
    compiled, times = grammars.begin(grammar).result(), list[float]()
    for text in texts:
        matcher = compiled.deep_copy()
        for token in tokenizer.encode(text):
            begin = time.perf_counter()
            matcher.compute_bitmask()
            times.append(1e6 * (time.perf_counter() - begin))
            if not matcher.consume_token(token):
                raise SystemExit(f"the grammar does not take {text!r}")
    return times


if __name__ == "__main__":
    main()
