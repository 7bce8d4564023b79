"""Names that options share with key files, logs and metrics: priority classes, log levels and engine protocols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PRIORITIES: Final[Mapping[str, int]] = {"low": 1, "normal": 2, "high": 3}
"""Priority classes, with the numbers of the protos' Priority."""
DOORS: Final = ("openengine", "vllm-engine", "vllm-inference")
"""Engine protocols of other projects that workers can serve."""
LEVELS: Final = ("debug", "info", "warning", "error")
"""Log levels, the most verbose first."""
ROLES: Final = ("both", "prefill", "decode")
"""Roles of workers: both halves of the work, or one."""
