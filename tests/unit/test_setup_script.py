"""scripts/setup.sh shows its progress during a long installation."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PART = re.search(r'^child="".*?^}', (ROOT / "scripts" / "setup.sh").read_text(), re.MULTILINE | re.DOTALL)


def program(body: str, log: Path) -> list[str]:
    assert _PART is not None
    return ["bash", "-c", f"set -euo pipefail; log={log}; : >$log\n{_PART[0]}\n{body}"]


def everything(terminal: int) -> bytes:
    """What was written to a pseudo-terminal whose other end is closed; one read may return a part of it."""
    found = b""
    # At the end Linux reports an error.
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            found += part
    return found


def test_terminal_shows_newest_log_line(tmp_path: Path) -> None:
    """Regression: the script printed no line for eleven minutes."""
    work = 'work() { echo "Collecting numpy"; sleep 1; echo "ERROR: no such thing"; return 3; }'
    body = f"{work}; with_progress work || echo code $?"
    ours, theirs = pty.openpty()
    with subprocess.Popen(program(body, tmp_path / "log"), stdout=theirs) as process:
        assert process.wait(60) == 0
    os.close(theirs)
    shown = everything(ours).decode()
    os.close(ours)
    assert " s: Collecting numpy" in shown
    assert shown.endswith("code 3\r\n")
    assert (tmp_path / "log").read_text() == "Collecting numpy\nERROR: no such thing\n"


def test_running_command_ends_with_the_script(tmp_path: Path) -> None:
    """Bash makes a background command ignore Ctrl-C, so the script must end it."""
    body = "work() { exec sleep 600; }; (sleep 0.5; kill -TERM $$) & with_progress work"
    done = subprocess.run(program(body, tmp_path / "log"), capture_output=True, timeout=60, check=False)
    assert done.returncode != 0
