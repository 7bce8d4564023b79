"""Parameters of random requests."""

from __future__ import annotations

import random
from typing import Any


def changes_of_logits(rnd: random.Random, share: float, num_ids: int) -> dict[str, Any]:
    """Filters, penalties, biases and masks for a model with `num_ids` ids, each with probability `share`.

    Masks are mild: short answers would preempt no others.
    """
    few = rnd.sample(range(5, num_ids), 40)
    optional: dict[str, Any] = {
        "top_k": rnd.randint(2, 50),
        "top_p": rnd.uniform(0.5, 1.0),
        "min_p": rnd.uniform(0.0, 0.1),
        "repetition_penalty": rnd.uniform(0.8, 1.5),
        "presence_penalty": rnd.uniform(-1, 1),
        "frequency_penalty": rnd.uniform(-1, 1),
        "logit_bias": {token: rnd.uniform(-3, 3) for token in few[:20]},
        "allowed_token_ids": tuple(rnd.sample(range(5, num_ids), num_ids * 9 // 10)),
        "bad_words_token_ids": tuple((*rnd.sample(few, rnd.randint(0, 2)), token) for token in few[20:]),
    }
    return {name: value for name, value in optional.items() if rnd.random() < share}
