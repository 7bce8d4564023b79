"""Requests of a benchmark: random token ids of drawn lengths, or the lines of a data set. Pure, standard library.

What request `index` asks for depends on the seed, the round and the index alone: not on how many requests there are, or
on the order in which they are sent. So every engine that is measured with one seed gets the same work, whatever its
client is written with. Lengths depend on seed and index: every round has the same lengths and other token ids, so that
a second round (another concurrency, a repetition, a warm-up) finds nothing of the first in a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.params.options.types import Lengths

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Work:
    """Content of one request. Exactly one of the three forms of a prompt is given.

    Attributes:
        output_tokens: to generate, at most or exactly.
        token_ids: the prompt as token ids.
        text: the prompt as text.
        messages: the prompt as a conversation: mappings with `role` and `content`.
    """

    output_tokens: int
    token_ids: Sequence[int] = ()
    text: str = ""
    messages: Sequence[Message] = ()


class Workload(Protocol):
    """Requests by round and index."""

    def work(self, round_: int, index: int) -> Work:
        """Request `index` (from 0) of a round."""
        ...


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Prompts of random token ids, uniform over the vocabulary.

    Attributes:
        seed: of everything random.
        vocab_size: token ids are in [0, vocab_size).
        input_len: tokens of a prompt behind its prefix.
        output_len: tokens of an answer.
        prefix_len: tokens that all prompts of a round begin with, in addition to `input_len`.

    Raises:
        ValueError: a number is out of range.
    """

    seed: int
    vocab_size: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}; valid: at least 1")
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len is {self.prefix_len}; valid: 0 (off) or more")

    @property
    def longest(self) -> int:
        """Most tokens that a prompt and its answer have together."""
        return self.prefix_len + self.input_len.high + self.output_len.high

    def work(self, round_: int, index: int) -> Work:
        """Request `index` of a round. Its lengths are the same in every round; its token ids differ."""
        lengths = random.Random(f"lengths {self.seed} {index}")
        count, output_tokens = self.input_len.draw(lengths), self.output_len.draw(lengths)
        own = self._ids(f"ids {self.seed} {round_} {index}", count)
        return Work(output_tokens, (*self._ids(f"prefix {self.seed} {round_}", self.prefix_len), *own))

    def _ids(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(self.vocab_size), k=count)


@dataclass(frozen=True, slots=True)
class GivenWorkload:
    """Cycles through the entries of a data set; every round is the same.

    Raises:
        ValueError: there are none.
    """

    entries: Sequence[Work]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("entries is empty; valid: at least 1 entry")

    def work(self, round_: int, index: int) -> Work:
        """Request `index` of any round."""
        return self.entries[index % len(self.entries)]
