"""Keeps `transformers` from importing PyTorch where its parts need none: config classes and tokenizers.

Where PyTorch is installed, `transformers` imports it on the way to a config class, which only names it in types. A
router, a simulated worker or a process in front of ranks would pay a second and 180 MB for nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_TORCH: Final = "torch"


class _DeferredTorch(ModuleType):
    """Stands in for PyTorch and imports it on the first use of an attribute."""

    def __getattr__(self, name: str) -> Any:
        _remove(self)
        return getattr(import_module(_TORCH), name)


@contextlib.contextmanager
def deferred_torch() -> Iterator[None]:
    """Makes `import torch` bind a stand-in, which loads PyTorch when a module uses it; no-op once PyTorch is loaded.

    Modules imported meanwhile keep the stand-in and work with the real PyTorch later. Other modules never see it.
    """
    spec = None if _TORCH in sys.modules else find_spec(_TORCH)
    if spec is None:
        yield
        return
    stand_in = _DeferredTorch(_TORCH)
    stand_in.__spec__ = spec
    sys.modules[_TORCH] = stand_in
    try:
        yield
    finally:
        _remove(stand_in)


def _remove(stand_in: ModuleType) -> None:
    if sys.modules.get(_TORCH) is stand_in:
        del sys.modules[_TORCH]
