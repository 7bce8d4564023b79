from __future__ import annotations

from tests.mask_times import masks_are_never_slow

__all__ = ["masks_are_never_slow"]
