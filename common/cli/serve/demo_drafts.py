"""Speculation for the demo model: its EAGLE-3 head (deploy/demo/README.md)."""

from __future__ import annotations

import json
from typing import Final

from common.cli.core.errors import CommandError
from common.cli.group import CHECKOUT
from common.params.config_parts import EAGLE3

DEMO_HEAD: Final = CHECKOUT / "deploy" / "demo" / "eagle3"
_NUM_DRAFTS: Final = 3


def demo_speculation(model: str | None, given: str | None) -> str:
    """Makes the value of --speculative-config that drafts with the demo model's head.

    Raises:
        CommandError: another model is served, or an option of its own is there (exit code 2).
    """
    if model is not None or given is not None:
        raise CommandError(
            "--speculate takes the head of the demo model: leave it out with --model or --speculative-config"
        )
    return json.dumps({"method": EAGLE3, "model": str(DEMO_HEAD), "num_speculative_tokens": _NUM_DRAFTS})
