"""A shell runs the commands that `fissile serve` prints for another terminal without changes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb

from common.cli.serve import first_question
from common.cli.serve.first_question import http_step, next_steps

ALL = frozenset({pb.CAPABILITY_GENERATE, pb.CAPABILITY_RERANK})


@pytest.mark.parametrize("folder", ["new comer", "it's", "a$HOME", "plain", "a;b&c"])
@pytest.mark.parametrize("has_script", [True, False])
def test_printed_commands_with_odd_folders_parse_in_a_shell(
    folder: str, has_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout or an environment may be in any folder."""
    home = tmp_path / folder
    (home / "bin").mkdir(parents=True)
    (home / "examples").mkdir()
    (home / "examples" / "python_client.py").touch()
    python = home / "bin" / "python"
    if has_script:
        python.with_name("fissile").touch()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(first_question, "CHECKOUT", home)
    title, *commands = next_steps("127.0.0.1:50051", "", ALL).strip().splitlines()
    assert title == "serving on 127.0.0.1:50051 until Ctrl-C. From another terminal:"
    program = [str(python.with_name("fissile"))] if has_script else [str(python), "-m", "common.cli.main"]
    words = [shlex.split(command) for command in commands]
    assert [line[: len(program)] for line in words[:-1]] == [program] * 4
    assert words[-1] == [str(python), str(home / "examples" / "python_client.py"), "127.0.0.1:50051"]


def test_printed_request_of_the_facade_parses_in_a_shell() -> None:
    assert http_step("", "demo") == ""
    command = http_step("http://127.0.0.1:8000", "it's")
    words = shlex.split(command)
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert command in next_steps("127.0.0.1:50051", "", ALL, command)
    words = shlex.split(http_step("https://127.0.0.1:8000", "m", " --cacert FILE -H 'authorization: Bearer KEY'"))
    assert words[2:7] == [
        "--cacert",
        "FILE",
        "-H",
        "authorization: Bearer KEY",
        "https://127.0.0.1:8000/v1/chat/completions",
    ]
