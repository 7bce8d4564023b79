"""Parameters of random requests."""

from __future__ import annotations

import random
from typing import Any


def filters_and_penalties(rnd: random.Random, share: float) -> dict[str, Any]:
    """Each with this probability."""
    optional = {
        "top_k": rnd.randint(2, 50),
        "top_p": rnd.uniform(0.5, 1.0),
        "min_p": rnd.uniform(0.0, 0.1),
        "repetition_penalty": rnd.uniform(0.8, 1.5),
        "presence_penalty": rnd.uniform(-1, 1),
        "frequency_penalty": rnd.uniform(-1, 1),
    }
    return {name: value for name, value in optional.items() if rnd.random() < share}
