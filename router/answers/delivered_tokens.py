"""Tokens that a client of a broken stream has already, of an answer that comes once more: they are left out."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ResumeMismatchError


class DeliveredTokens:
    """Takes tokens from the beginning of an answer, as many as have been delivered.

    Args:
        index: which answer, for errors.
        count: how many have been delivered.
        token_ids: which ones; None where the client says their number and the digest of their text.

    Attributes:
        count: as given.
        are_named: True if the client says which ones.
        left: how many have not come yet.
    """

    def __init__(self, index: int, count: int, token_ids: Sequence[int] | None = None) -> None:
        self.count = self.left = count
        self.are_named = token_ids is not None
        self._index = index
        self._token_ids = token_ids

    def push(self, token_ids: Sequence[int]) -> None:
        """Takes the next ones, not more than are left.

        Raises:
            ResumeMismatchError: others were delivered.
        """
        begin = self.count - self.left
        self.left -= len(token_ids)
        if self._token_ids is not None and list(self._token_ids[begin : begin + len(token_ids)]) != list(token_ids):
            raise ResumeMismatchError(self._index, "its tokens so far are others")

    def mismatch(self) -> ResumeMismatchError:
        """The failure of an answer whose first tokens are not these, or do not have this text."""
        return ResumeMismatchError(self._index, f"its first {self.count} tokens are not those that have been delivered")
