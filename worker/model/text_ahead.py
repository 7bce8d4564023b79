"""Text that a grammar forces behind a sequence's tokens, as much of it as one step uses.

The library gives all such text at once, which may be hundreds of kilobytes for a grammar of some bytes. So the text is
found token by token, from masks. If all allowed tokens are beginnings of the longest one, that one probably comes.
Each look takes a bounded number of masks whatever the grammar forces, and the sequence's next step needs the first of
these anyway. The text moves along with the sequence, so no byte is looked for twice.

The text is a guess: behind a part of a token, the grammar may allow text for which the vocabulary has no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from common.constraints.library import Matcher
from common.limits import MAX_FORCED_TEXT_BYTES, MOST_FORCED
from worker.grammars import Grammars

Bits = npt.NDArray[np.uint32]
# Masks of one look: a step whose drafts are all right samples one token more.
MOST_MASKS: Final = MOST_FORCED + 1
# Most tokens of a mask that is examined; more tokens count as a choice.
_MOST_TOKENS: Final = 64
_WORD_BITS: Final = 32


class TextAhead:
    """The text that is forced behind one sequence.

    Args:
        matcher: of the sequence. Only its mask is computed; it is given no tokens.

    Attributes:
        text: from the sequence's newest token on; at most MAX_FORCED_TEXT_BYTES.
        is_complete: True if nothing more is allowed behind the text.
        choice: two tokens that begin differently and are both allowed behind the text; empty if none are known.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.text = b""
        self.is_complete = False
        self.choice: tuple[int, ...] = ()
        # Has been given the text.
        self._matcher = matcher
        self._is_own = False
        # True if the next look may find more text.
        self._is_open = True

    def look(self, grammars: Grammars, bits: Bits) -> None:
        """Finds more text, up to what a step uses.

        Args:
            grammars: that have the tokens.
            bits: room for a mask.
        """
        for _ in range(MOST_MASKS):
            if not self._is_open or len(self.text) >= MAX_FORCED_TEXT_BYTES:
                return
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            found = None if self._matcher.is_error() else self._only_token(grammars, bits)
            if found is None:
                self._is_open = False
                return
            token, text = found
            if not self._is_own:
                # The sequence's own matcher might fail at a token, and its masks must not depend on that.
                self._matcher, self._is_own = self._matcher.deep_copy(), True
            if not self._matcher.consume_token(token):
                self._is_open = False
                return
            self.text += text
            self.is_complete = self._matcher.is_stopped()
            self._is_open = not self.is_complete

    def moved(self, texts: list[bytes | None], matcher: Matcher) -> TextAhead:
        """The forced text behind further tokens of the sequence: its rest, or a new TextAhead if the tokens differ.

        Args:
            texts: bytes of these tokens; None for one that is no text.
            matcher: of the sequence; it has been given these tokens.
        """
        text = b"".join(text for text in texts if text is not None)
        if not self._is_own or None in texts or not self.text.startswith(text):
            return TextAhead(matcher)
        self.text = self.text[len(text) :]
        return self

    def _only_token(self, grammars: Grammars, bits: Bits) -> tuple[int, bytes] | None:
        """The token that a mask forces, with its text; None if the mask leaves a choice.

        That is the longest token if all others are beginnings of it, else the shortest if all others begin with it.
        """
        texts, first = dict[bytes, int](), b""
        for token in _tokens_of(bits):
            # Most choices show in the first two tokens.
            text = grammars.text_of(token)
            if not text or len(texts) == _MOST_TOKENS:
                return None
            if texts and not text.startswith(first):
                self.choice = (next(iter(texts.values())), token)
                return None
            first, texts[text] = text[:1], token
        if not texts:
            return None
        longest, shortest = max(texts, key=len), min(texts, key=len)
        if self._is_forced(texts, longest):
            return texts[longest], longest
        return (texts[shortest], shortest) if all(text.startswith(shortest) for text in texts) else None

    def _is_forced(self, texts: dict[bytes, int], longest: bytes) -> bool:
        """True if all other texts are beginnings of the longest one, and the grammar can end behind none of them."""
        for text, token in texts.items():
            if text is longest:
                continue
            if not longest.startswith(text):
                return False
            ahead = self._matcher.deep_copy()
            if not ahead.consume_token(token) or ahead.is_accepting():
                return False
        return True


def _tokens_of(bits: Bits) -> Iterator[int]:
    """The tokens of a mask."""
    for place in np.flatnonzero(bits).tolist():
        word = int(bits[place])
        while word:
            yield place * _WORD_BITS + (word & -word).bit_length() - 1
            word &= word - 1
