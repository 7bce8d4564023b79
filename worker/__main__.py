"""`python -m worker`: the same as `fissile worker`."""

from __future__ import annotations

import sys

from common.cli.group import run

if __name__ == "__main__":
    sys.argv.insert(1, "worker")
    sys.exit(run())
