"""Text that a client of a broken stream has already: left out where the stream goes on, once its digest is checked.

What has been delivered is the beginning of all that comes, in the order in which it comes. Its digest is that of
reasoning, content and the arguments of each call, one after another: a client knows their order within a channel alone.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from common.errors import ResumeMismatchError
from router.answers.channels.parser import Channel, Part

# Bytes of a character behind its first one (UTF-8).
_TOP_BITS: Final = 0b1100_0000
_CONTINUES: Final = 0b1000_0000
# Channels as their digest has them.
_ORDER: Final = (Channel.REASONING, Channel.CONTENT, Channel.CALL)


class DeliveredText:
    """Takes text from its beginning, and passes on what is behind the part that has been delivered.

    Args:
        index: which answer, for errors.
        num_bytes: length of the delivered part in UTF-8.
        sha256: digest of its UTF-8.

    Attributes:
        left: bytes that have not come yet; 0 when all that was delivered has come and is the same.
    """

    def __init__(self, index: int, num_bytes: int, sha256: bytes) -> None:
        self.left = num_bytes
        self._index = index
        self._sha256 = sha256
        self._channels: dict[tuple[int, int], bytearray] = {}

    def push(self, part: Part) -> Part | None:
        """Takes the next part of the answer; gives what of it has not been delivered, None where all has.

        Raises:
            ResumeMismatchError: the delivered part is another text, or ends within a character.
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
        """The failure of an answer that ends before the delivered part does."""
        return ResumeMismatchError(self._index, f"its text ends {self.left} bytes before what has been delivered")
