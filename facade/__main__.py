"""`python -m facade`: the same as `fissile http`."""

from __future__ import annotations

import sys

from common.cli.group import run
from common.telemetry.output import open_missing_streams

if __name__ == "__main__":
    sys.argv.insert(1, "http")
    open_missing_streams()
    sys.exit(run())
