"""Text and tokens that an earlier call of a broken stream delivered: left out where the answer is sent again.

The delivered text is the beginning of the answer in the order in which parts arrive. Its digest covers reasoning,
content and the arguments of each call, one after another, because a client knows the order within a channel alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from common.errors import ResumeMismatchError
from router.answers.channels.parser import Channel, ChannelPart

# Bits that mark the second and later bytes of a character in UTF-8.
_TOP_BITS: Final = 0b1100_0000
_CONTINUES: Final = 0b1000_0000
# Order of the channels in the digest.
_ORDER: Final = (Channel.REASONING, Channel.CONTENT, Channel.CALL)


class DeliveredText:
    """Compares an answer with the text that an earlier call delivered, and passes on the text behind it.

    Args:
        index: index of the answer, for errors.
        num_bytes: length of the delivered text in UTF-8.
        sha256: digest of the delivered text in UTF-8.

    Attributes:
        left: bytes of the delivered text that are still to arrive; 0 once all arrived and the digest is the same.
    """

    def __init__(self, index: int, num_bytes: int, sha256: bytes) -> None:
        self.left = num_bytes
        self._index = index
        self._sha256 = sha256
        self._channels: dict[tuple[int, int], bytearray] = {}

    def push(self, part: ChannelPart) -> ChannelPart | None:
        """Reads the next part of the answer. Returns its undelivered rest; None if all of it was delivered.

        Raises:
            ResumeMismatchError: the delivered text differs, or ends within a character.
        """
        data = part.text.encode()
        channel = self._channels.setdefault((_ORDER.index(part.channel), part.call), bytearray())
        channel += data[: self.left]
        rest, taken = data[self.left :], min(self.left, len(data))
        self.left -= taken
        if self.left:
            return None
        digest = hashlib.sha256(b"".join(self._channels[key] for key in sorted(self._channels)))
        if not hmac.compare_digest(digest.digest(), self._sha256):
            raise ResumeMismatchError(self._index, "its text so far has another digest")
        if rest and rest[0] & _TOP_BITS == _CONTINUES:
            raise ResumeMismatchError(self._index, "what has been delivered ends within a character")
        return part._replace(text=rest.decode(), name="" if taken else part.name) if rest else None

    def mismatch(self) -> ResumeMismatchError:
        """Returns the error for an answer that is shorter than the delivered text."""
        return ResumeMismatchError(self._index, f"its text ends {self.left} bytes before what has been delivered")


class DeliveredTokens:
    """Compares an answer with the tokens that an earlier call delivered.

    Args:
        index: index of the answer, for errors.
        count: number of delivered tokens.
        token_ids: the delivered tokens; None if the client gives their number and the digest of their text.

    Attributes:
        count: number of delivered tokens.
        are_named: True if the client gives the token ids.
        left: number of delivered tokens that are still to arrive.
    """

    def __init__(self, index: int, count: int, token_ids: Sequence[int] | None = None) -> None:
        self.count = self.left = count
        self.are_named = token_ids is not None
        self._index = index
        self._token_ids = token_ids

    def push(self, token_ids: Sequence[int]) -> None:
        """Checks the next tokens, at most `left`.

        Raises:
            ResumeMismatchError: other tokens were delivered.
        """
        begin = self.count - self.left
        self.left -= len(token_ids)
        if self._token_ids is not None and list(self._token_ids[begin : begin + len(token_ids)]) != list(token_ids):
            raise ResumeMismatchError(self._index, "its tokens so far are others")

    def mismatch(self) -> ResumeMismatchError:
        """Returns the error for an answer whose first tokens, or their text, differ from the delivered ones."""
        return ResumeMismatchError(self._index, f"its first {self.count} tokens are not those that have been delivered")
