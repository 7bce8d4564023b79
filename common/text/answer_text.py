"""Text of one answer, from its tokens up to the stop string that ends it. Pure.

The router's streams and `LLMEngine` both use it, so an answer has the same text in the service and in a program.

Invariants:
  * The concatenated text is the decoded text of the tokens, up to a matched stop string.
  * It does not depend on how the tokens were cut into runs.
  * A stop string counts from token number `min_tokens` on; earlier text is not searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.text.detokenizer import Detokenizer
from common.text.stop_strings import StopStrings


class TextPiece(NamedTuple):
    """Some tokens of an answer and the text that they add.

    Attributes:
        token_ids: the tokens; none for the rest at the end of the answer.
        decoded: text that the tokens complete.
        text: text that may be sent now, without what may still become a stop string.
    """

    token_ids: Sequence[int]
    decoded: str
    text: str


class AnswerText:
    """Decodes the tokens of one answer and searches their text for stop strings.

    Args:
        detokenizer: decoder of the answer; None for a model without a tokenizer, whose answers have no text.
        stop_strings: search of the answer; None for no stop strings.
        min_tokens: number of the first token that a stop string may end with.
        is_read_per_token: True to get a piece for each token, where a caller needs to know the text of each.

    Attributes:
        matched: the stop string that ended the answer; None before a match.
        is_plain: True if nothing is searched or read per token, so that `decode` gives the whole text of a run.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop_strings: StopStrings | None = None,
        min_tokens: int = 0,
        *,
        is_read_per_token: bool = False,
    ) -> None:
        self.matched: str | None = None
        self.is_plain = stop_strings is None and not is_read_per_token
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._unsearched = max(0, min_tokens - 1)
        self._is_read_per_token = is_read_per_token

    def push(self, token_ids: Sequence[int]) -> Iterator[TextPiece]:
        """Yields the pieces of the next tokens, up to the token that completes a stop string."""
        if self.is_plain:
            text = self.decode(token_ids)
            yield TextPiece(token_ids, text, text)
            return
        start = 0
        if not self._is_read_per_token:
            start = min(self._unsearched, len(token_ids))
            self._unsearched -= start
            if start:
                text = self.decode(token_ids[:start])
                yield TextPiece(token_ids[:start], text, text)
        for i in range(start, len(token_ids)):
            decoded = text = self.decode(token_ids[i : i + 1])
            if self._unsearched:
                self._unsearched -= 1
            else:
                text = self._search(decoded)
            yield TextPiece(token_ids[i : i + 1], decoded, text)
            if self.matched is not None:
                return

    def flush(self) -> TextPiece:
        """The text held back, at the end of the tokens; it may complete a stop string."""
        decoded = "" if self._detokenizer is None else self._detokenizer.flush()
        text = self._search(decoded)
        if self._stop_strings is not None and self.matched is None:
            text += self._stop_strings.flush()
        return TextPiece((), decoded, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that the next tokens complete, without a search for stop strings."""
        return "" if self._detokenizer is None else self._detokenizer.push(token_ids)

    def _search(self, text: str) -> str:
        if self._stop_strings is None:
            return text
        result = self._stop_strings.push(text)
        self.matched = result.matched
        return result.emit
