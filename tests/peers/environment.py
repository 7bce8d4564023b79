"""Environments of other projects' programs: each in a folder of its own under build/, made at the first use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients import PINNED
from tests.e2e.service import REPOSITORY

# The interpreter of this environment runs the double of a worker in tests/bench/router/vllm_double.py too.
SMG_PACKAGES = (PINNED["smg"], "smg-grpc-proto==0.4.28", "grpcio==1.85.1", "uvloop==0.23.0")
PEERS = REPOSITORY / "build" / "peers"
# File of an environment with the packages in it, written when all are installed.
_STAMP = "installed"


def peer_environment(name: str, packages: Sequence[str], bare: Sequence[str] = ()) -> Path:
    """The folder with a peer's programs; installs the packages from PyPI unless they are there.

    Args:
        name: of the environment.
        packages: installed with their requirements.
        bare: installed without them.
    """
    venv = PEERS / name
    if not is_installed(name, packages, bare):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        for options in (packages, ["--no-deps", *bare] if bare else ()):
            if options:
                subprocess.run([venv / "bin" / "pip", "install", "--quiet", *options], check=True)
        (venv / _STAMP).write_text("\n".join([*packages, *bare]))
    return venv / "bin"


def is_installed(name: str, packages: Sequence[str], bare: Sequence[str] = ()) -> bool:
    """True if the environment has these packages."""
    stamp = PEERS / name / _STAMP
    return stamp.is_file() and stamp.read_text().split() == [*packages, *bare]


def peer_variables() -> dict[str, str]:
    """Environment variables of a peer's process: no packages of ours, and no look at the Hugging Face Hub."""
    ours = {"PYTHONPATH", "VIRTUAL_ENV"}
    return {**{key: value for key, value in os.environ.items() if key not in ours}, "HF_HUB_OFFLINE": "1"}
