"""`fissile`: the one program. Works installed and from a plain checkout (`python -m common.cli.main`).

This file must parse on any Python 3, and imports nothing before the version check: an old Python gets one line.
"""

import sys

OLDEST = (3, 11)


def main() -> None:
    """Runs the command line; refuses an old Python with one line and exit code 2."""
    if sys.version_info < OLDEST:
        have = "%d.%d" % sys.version_info[:2]  # noqa: UP031
        sys.exit(refusal("Fissile needs Python %d.%d or newer, this is %s: %s" % (*OLDEST, have, sys.executable)))  # noqa: UP031
    from common.telemetry.output import open_missing_streams  # noqa: PLC0415

    # Before anything else is imported that looks at them.
    open_missing_streams()
    from common.cli.group import run  # noqa: PLC0415

    sys.exit(run())


def refusal(message: str) -> int:
    """Prints one line saying what to change. Returns the exit code for it, 2."""
    sys.stderr.write("error: " + message + "\n")
    return 2


if __name__ == "__main__":
    main()
