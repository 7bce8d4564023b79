"""`python -m tests.chaos.patient_router router ...`: a router that waits for the next stream of a broken Session for as
long as a busy machine may take to open it, and then goes on with its sequences."""

from __future__ import annotations

import sys

import common.limits

# Before the router is imported.
common.limits.RECONNECT_S = 60.0

from common.cli.group import run  # noqa: E402

if __name__ == "__main__":
    sys.exit(run())
