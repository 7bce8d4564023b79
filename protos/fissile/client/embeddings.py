"""Vectors as programs use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from fissile.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings(Sequence[list[float]]):
    """Vectors, in the order of their inputs: a sequence of lists of floats, and what NumPy makes an array [N, size] of.

    Attributes:
        message: as it came.
    """

    message: pb.EmbedResponse

    def __len__(self) -> int:
        """Number of vectors."""
        return len(self.message.embeddings)

    @overload
    def __getitem__(self, place: int) -> list[float]: ...

    @overload
    def __getitem__(self, place: slice) -> list[list[float]]: ...

    def __getitem__(self, place: int | slice) -> list[float] | list[list[float]]:
        """A vector, or several."""
        found = self.message.embeddings[place]
        return [*found.values] if isinstance(found, pb.Embedding) else [[*each.values] for each in found]

    def __iter__(self) -> Iterator[list[float]]:
        """The vectors."""
        return ([*each.values] for each in self.message.embeddings)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The vectors as an array of NumPy, float32 by default."""
        import numpy as np  # noqa: PLC0415

        return np.array([each.values for each in self.message.embeddings], dtype or np.float32)

    def __repr__(self) -> str:
        """Shows the number of vectors and their size."""
        return f"Embeddings({len(self)} vectors of {self.size} numbers, {self.usage.prompt_tokens} tokens)"

    @property
    def size(self) -> int:
        """Numbers of each vector."""
        return len(self.message.embeddings[0].values) if self else 0

    @property
    def embeddings(self) -> Sequence[pb.Embedding]:
        """The vectors, as messages."""
        return self.message.embeddings

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.message.request_id

    @property
    def usage(self) -> pb.Usage:
        """Token counts."""
        return self.message.usage

    @property
    def weights_digest(self) -> str:
        """Digest of the weights that made them; vectors of other weights cannot be compared with them."""
        return self.message.weights_digest

    @property
    def numerics(self) -> str:
        """Numerics class that made them."""
        return self.message.numerics

    @property
    def pooling(self) -> pb.Pooling.ValueType:
        """Pooling that made vectors of token states."""
        return self.message.pooling
