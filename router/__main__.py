"""`python -m router`: the same as `fissile router`."""

from __future__ import annotations

import sys

from common.cli.group import run

if __name__ == "__main__":
    sys.argv.insert(1, "router")
    sys.exit(run())
