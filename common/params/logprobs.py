"""Kinds of logprobs, and the length of their rows (common/wire/logprob_rows.py).

The command line imports this module, so it imports no numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RAW: Final = "raw"
PROCESSED: Final = "processed"
LOGPROBS_KINDS: Final = (RAW, PROCESSED)

_WORD_BYTES: Final = 4
# Words of a row's own token; those of further tokens follow.
HEAD_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class LogprobLayout:
    """Number of entries of each row of a request.

    Attributes:
        top: most likely tokens.
        given: token ids that the request names.
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
