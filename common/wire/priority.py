"""Names of the priority classes in options, key files and metrics, with their numbers in the proto Priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIORITIES: Final[Mapping[str, int]] = {"low": 1, "normal": 2, "high": 3}
