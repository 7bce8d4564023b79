"""Text that a client of a broken stream has already: left out where the stream goes on, once its digest is checked."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from common.errors import ResumeMismatchError

# Bytes of a character behind its first one (UTF-8).
_TOP_BITS: Final = 0b1100_0000
_CONTINUES: Final = 0b1000_0000


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
        self._digest = hashlib.sha256()

    def push(self, text: str) -> str:
        """Takes the next piece of the text; gives what of it has not been delivered.

        Raises:
            ResumeMismatchError: the delivered part is another text, or ends within a character.
        """
        data = text.encode()
        self._digest.update(data[: self.left])
        rest, self.left = data[self.left :], max(0, self.left - len(data))
        if self.left:
            return ""
        if not hmac.compare_digest(self._digest.digest(), self._sha256):
            raise ResumeMismatchError(self._index, "its text so far has another digest")
        if rest and rest[0] & _TOP_BITS == _CONTINUES:
            raise ResumeMismatchError(self._index, "what has been delivered ends within a character")
        return rest.decode()

    def mismatch(self) -> ResumeMismatchError:
        """The failure of an answer that ends before the delivered part does."""
        return ResumeMismatchError(self._index, f"its text ends {self.left} bytes before what has been delivered")
