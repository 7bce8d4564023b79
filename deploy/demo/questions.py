"""The 200 held-out questions: forty of each family, all from the side that training never sees."""

from __future__ import annotations

import random

from deploy.demo.families import FAMILIES, Exchange, draw

PER_FAMILY = 40
_SEED = 4712
_QUOTING = ("spelling", "reversing")
"""Families whose word is asked for in quotes, where the tokenizer shows the model its single letters."""


def questions() -> list[Exchange]:
    """The same 200 questions every time, family by family, no content asked twice."""
    rng = random.Random(_SEED)
    chosen: dict[str, Exchange] = {}
    for count, family in enumerate(FAMILIES, start=1):
        while len(chosen) < count * PER_FAMILY:
            exchange = draw(rng, family, reserved=True)
            if family in _QUOTING and '"' not in exchange.user:
                continue
            chosen.setdefault(f"{family} {exchange.key}", exchange)
    return list(chosen.values())
