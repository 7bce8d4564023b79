"""Keeps `transformers` from importing PyTorch for config classes and tokenizers, which do not need it.

If PyTorch is installed, `transformers` imports it together with a config class, which names it in types only. That
would cost a router, a simulated worker or a process in front of ranks a second and 180 MB without use.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_TORCH: Final = "torch"
_lock: Final = threading.RLock()


class _DeferredTorch(ModuleType):
    """Placeholder for the module `torch`; imports PyTorch on the first use of an attribute."""

    def __getattr__(self, name: str) -> Any:
        _remove(self)
        return getattr(import_module(_TORCH), name)


@contextlib.contextmanager
def deferred_torch() -> Iterator[None]:
    """Makes `import torch` bind a placeholder, which loads PyTorch on first use. No-op once PyTorch is loaded.

    Modules imported in this context keep the placeholder and work with the real PyTorch later. Other modules never
    see the placeholder. One thread at a time: two that import `transformers` at once fail.
    """
    with _lock:
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
