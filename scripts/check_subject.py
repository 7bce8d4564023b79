"""Checks the subject of a commit message, `area: imperative subject`: `python scripts/check_subject.py FILE`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

_MAX_LENGTH: Final = 72
_SUBJECT: Final = re.compile(r"[a-z][\w./-]*(, [a-z][\w./-]*)*: \S.*[^.\s]")
# Subjects that git writes.
_MADE_BY_GIT: Final = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def problem(message: str) -> str:
    """The problem with the first line of a commit message; empty for a valid one."""
    subject = message.partition("\n")[0]
    if subject.startswith(_MADE_BY_GIT):
        return ""
    if len(subject) > _MAX_LENGTH:
        return f"the subject has {len(subject)} characters; at most {_MAX_LENGTH}, and the reason in the body"
    if not _SUBJECT.fullmatch(subject):
        return "the subject is not `area: imperative subject` without a full stop, such as `router: retry lost calls`"
    return ""


def main() -> int:
    """Prints the problem with the subject in the message file that git names; 1 if there is one."""
    found = problem(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(found, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
