"""The commands of docs/tutorial.md, in their order, with real processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import free_port

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
_LIMIT_S = 240


def commands() -> list[str]:
    """The blocks of commands; the first one installs Fissile."""
    return re.findall(r"```sh\n(.*?)```", TUTORIAL.read_text("utf-8"), re.DOTALL)


@pytest.mark.slow
def test_tutorial_commands_keep_the_answer_of_a_killed_worker(tmp_path: Path) -> None:
    install, *blocks = commands()
    assert install == "make run ARGS=--once\n"
    text = "\n".join(blocks).replace("build/tutorial", str(tmp_path))
    ports = {port: str(free_port()) for port in ("4317", "50051", "50052", "50061", "50062")}
    for port, free in ports.items():
        text = re.sub(rf"\b{port}\b", free, text)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
        # The defaults of commands without the option.
        "FISSILE_PORT": ports["50051"],
        "FISSILE_ADDRESS": f"127.0.0.1:{ports['50051']}",
        "FISSILE_ADMIN_ADDRESS": f"127.0.0.1:{ports['50052']}",
    }
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "the answers are equal" in output
    assert "tokens are the same on worker two" in output
    assert re.search(r"900 tokens from 13 .*, length", output)
    # The answer began on worker one and went on.
    assert re.search(r"^ +attempt .*\n +wait for worker .*\n +attempt ", output, re.MULTILINE)
