"""Proof files of audits are readable only by their user."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest
from fissile.v1 import inference_pb2 as pb

from common.rpc.tls import Dialer
from router.audit.verdicts import Verdicts

PROOF = pb.ReplayRequest()


@pytest.mark.parametrize("there", ["nothing", "file", "link"])
def test_audit_proof_file_is_private_and_follows_no_link(there: str, tmp_path: Path) -> None:
    """Regression: an existing file or link of that name was followed and kept its mode."""
    folder, other = tmp_path / "audits", tmp_path / "other"
    other.write_text("untouched")
    before = os.umask(0)
    try:
        if there != "nothing":
            folder.mkdir(mode=0o700)
            (folder / "a.json").touch(0o666) if there == "file" else (folder / "a.json").symlink_to(other)
        written = asyncio.run(Verdicts(folder, cast(Any, None), Dialer()).write("a", PROOF))
    finally:
        os.umask(before)
    path = Path(written)
    assert (path.is_symlink(), path.stat().st_mode & 0o777) == (False, 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.read_text().startswith("{")
    assert other.read_text() == "untouched"
    assert [each.name for each in folder.iterdir()] == ["a.json"]
