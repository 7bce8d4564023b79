"""Files of the wrong kind, too large or nested too deeply are refused at once by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import UnreadableFileError, parse_json, read_file, read_json_file
from tests.e2e.service import REPOSITORY


def test_regular_files_and_links_to_them_are_read_up_to_the_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").symlink_to("a")
    assert read_file(tmp_path / "a", 100) == read_file(tmp_path / "b", 100) == b"x" * 100
    with pytest.raises(UnreadableFileError, match=r"a cannot be read: it has more than 99 bytes"):
        read_file(tmp_path / "a", 99)


def test_devices_pipes_and_folders_are_refused(tmp_path: Path) -> None:
    """Regression: a link to /dev/zero took 8.7 GB; a named pipe blocked for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UnreadableFileError, match=f"{name} cannot be read: it is not a regular file"):
            read_file(tmp_path / name, 100)
    with pytest.raises(UnreadableFileError, match="Is a directory"):
        read_file(tmp_path, 100)
    with pytest.raises(UnreadableFileError, match="nothing cannot be read: No such file or directory"):
        read_file(tmp_path / "nothing", 100)


def test_shell_pipe_is_read() -> None:
    """Options like `--api-keys <(command)` read such a pipe."""
    program = "import sys; from common.files import read_file; print(read_file(sys.argv[1], 5))"
    command = f"{sys.executable} -c '{program}' <(sleep 0.2; printf hello)"
    done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "b'hello'\n"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_too_deep_json_is_refused(tmp_path: Path, text: str) -> None:
    """Regression: deep JSON ended the command with a traceback and exit code 1."""
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UnreadableFileError, match=r"a\.json is not valid JSON: it is nested too deeply"):
        read_json_file(tmp_path / "a.json", 1 << 20)
