"""The interpreter's products, each row alone: as matrix instructions compute them, and BLAS does not.

OpenBLAS's bits depend on a row's place among those it is given (measured: permuted rows of 16 x 32 differ).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, a row's result is independent of the other rows of its `tl.dot` and of its place."""
    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        rows = [
            whole(self, TensorHandle(a.data[i : i + 1], a.dtype), b, TensorHandle(d.data[i : i + 1], d.dtype), *options)
            for i in range(len(a.data))
        ]
        return TensorHandle(np.concatenate([row.data for row in rows]), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
