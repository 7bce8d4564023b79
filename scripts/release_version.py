"""Checks that a tag names the version of both packages, of the Helm chart and of the images in deploy/.

`release_version.py v0.1.0`.

A release must not publish packages or manifests of another version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CHART = re.compile(r"^(?:version|appVersion): (\d[\w.]*)$", re.MULTILINE)
_IMAGE = re.compile(r"fissile-(?:router|worker-[a-z]+):(\d[\w.]*)")


def versions(root: Path) -> Iterator[tuple[str, str]]:
    """Yields file and version of each package and of the chart, and of each image that a manifest starts."""
    for folder in (".", "protos"):
        file = root / folder / "pyproject.toml"
        yield str(file.relative_to(root)), tomllib.loads(file.read_text("utf-8"))["project"]["version"]
    for file in sorted((root / "deploy").rglob("*.yaml")):
        pattern = _CHART if file.name == "Chart.yaml" else _IMAGE
        for version in pattern.findall(file.read_text("utf-8")):
            yield str(file.relative_to(root)), version


def main(arguments: list[str]) -> int:
    """Prints the versions that differ from the tag. Returns the exit code, 0 if none does."""
    if len(arguments) != 1:
        print("error: usage: release_version.py TAG", file=sys.stderr)
        return 2
    wrong = [(place, version) for place, version in versions(ROOT) if f"v{version}" != arguments[0]]
    for place, version in wrong:
        print(f"error: the tag is {arguments[0]}, but {place} has version {version}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
