"""A fixture for tests that count forced text: no mask is too slow to search for it."""

from __future__ import annotations

import math

import pytest

from worker.model import grammar_masks


@pytest.fixture(autouse=True)
def masks_are_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks on a busy machine can take longer than `_SLOW_S`, and forced text is not searched for after those."""
    monkeypatch.setattr(grammar_masks, "_SLOW_S", math.inf)
