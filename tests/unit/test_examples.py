"""Programs in examples/ have a help text and report wrong arguments before any call."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Program -> the address that it calls by default; others call a router.
DEFAULTS = {
    "messages_client.py": "http://127.0.0.1:8000",
    "openai_client.py": "http://127.0.0.1:8000",
    "print_traces.py": "127.0.0.1:4317",
    "responses_client.py": "http://127.0.0.1:8000",
}
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> object:
    """Exit value of a program: None or 0 for success, else a status or error text."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_teaches(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code = run(monkeypatch, name, "--help")
    said = capsys.readouterr().out + (code if isinstance(code, str) else "")
    if name == "lm_eval_model.py":
        # With the harness installed the help is the harness's own.
        assert "--model" in said
        return
    assert code == 0
    first = (EXAMPLES / name).read_text().split('"""')[1].splitlines()[0]
    assert first in said
    assert DEFAULTS.get(name, "127.0.0.1:50051") in said


@pytest.mark.parametrize("name", ["async_client.py", "library_client.py", "tools_client.py"])
def test_example_names_invalid_address(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, name, "nowhere")
    said = capsys.readouterr().err + (code if isinstance(code, str) else "")
    assert code not in (0, None)
    assert said.count("\n") <= 1
    assert "'nowhere' is not an address; give HOST:PORT" in said


def test_node_example_has_help_without_packages() -> None:
    program = EXAMPLES / "node_client.mjs"
    try:
        done = subprocess.run(["node", program, "--help"], capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        # Without Node the program cannot run, so the test reads its source.
        assert "[HOST:PORT] [PROMPT]" in program.read_text()
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert "node examples/node_client.mjs [HOST:PORT] [PROMPT]" in done.stdout
