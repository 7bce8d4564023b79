"""Result of `embed`: the vectors as a Python sequence, and for NumPy as an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from fissile.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings(Sequence[list[float]]):
    """Vectors in the order of their inputs: a sequence of lists of floats. NumPy converts it to an array [N, size].

    Examples:
        ```python
        with Client("10.0.0.1:50051") as client:
            query, document = client.embed(["Where is the wolf?", "A wolf lived by the river."])
            print(sum(a * b for a, b in zip(query, document)))
        ```

    Attributes:
        message: the router's response.
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
        """The vector at an index, or the vectors of a slice."""
        found = self.message.embeddings[place]
        return [*found.values] if isinstance(found, pb.Embedding) else [[*each.values] for each in found]

    def __iter__(self) -> Iterator[list[float]]:
        """Iterates over the vectors, as lists of floats."""
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
        """Length of each vector; 0 without vectors."""
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
        """Token counts of the request."""
        return self.message.usage

    @property
    def weights_digest(self) -> str:
        """Digest of the weights that made the vectors; only vectors of the same weights can be compared."""
        return self.message.weights_digest

    @property
    def numerics(self) -> str:
        """Numerics class of the worker that made the vectors."""
        return self.message.numerics

    @property
    def pooling(self) -> pb.Pooling.ValueType:
        """Method that pooled token states into vectors."""
        return self.message.pooling
