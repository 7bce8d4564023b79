"""Failure of a command: one line, and the exit code for scripts."""

from __future__ import annotations


class CommandError(Exception):
    """Ends a command: one line on standard error, and an exit code.

    Exit codes of every command: 1 failed; 2 something must be changed (an option, the request, the installation);
    3 nothing to change, it may work later (no router, no worker, a full queue).
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code
