"""What is compiled for each target: calls of our own launchers with the shapes of real models.

Each module has CASES: a name, and a `Case`. Tensors lie on the CPU and are never looked at: `compile_only` compiles
what would have been launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernels.triton_backend.target import Settings


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        run: calls the launchers.
        matrix: names of kernels that must use matrix instructions.
        spills: registers that a kernel may keep in memory, by its name; 0 for those that are not named.
    """

    run: Callable[[Settings], object]
    matrix: frozenset[str] = frozenset()
    spills: tuple[tuple[str, int], ...] = ()
