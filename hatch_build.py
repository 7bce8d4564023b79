"""The package's build: compiles the CPU kernels, for an editable install beside their sources, for a wheel into it.

Without a C++ compiler the install succeeds and PyTorch's kernels serve (kernels/select.py); one that fails ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernels.cpu import build


class KernelsBuildHook(BuildHookInterface[Any]):
    """Hatchling's `custom` build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and names the library to the wheel, which is then for this platform and any Python."""
        if code := build.main():
            sys.exit(code)
        if build.LIBRARY.is_file() and version != "editable":
            build_data["force_include"][str(build.LIBRARY)] = str(build.LIBRARY.relative_to(self.root))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{build.platform_tag()}"
