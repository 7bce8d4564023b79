"""Logprobs that a request may ask for, and how long their rows are (common/wire/logprob_rows.py).

No numpy here: the command line imports this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RAW: Final = "raw"
PROCESSED: Final = "processed"
LOGPROBS_KINDS: Final = (RAW, PROCESSED)

_WORD_BYTES: Final = 4
# Words of a row before those of further tokens.
HEAD_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class LogprobLayout:
    """Number of entries of each row of a request.

    Attributes:
        top: most likely tokens.
        given: ids that were asked for.
    """

    top: int
    given: int

    @property
    def num_words(self) -> int:
        """Words of a row."""
        return HEAD_WORDS + 2 * self.top + self.given

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return _WORD_BYTES * self.num_words
