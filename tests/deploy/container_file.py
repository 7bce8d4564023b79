"""Container files as lists of instructions: enough to compare what they say with the program that they start."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ContainerFile:
    """The instructions of a container file, (name, arguments) in order."""

    path: Path
    instructions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path) -> ContainerFile:
        """Reads a file; continued lines are joined, comments are left out."""
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        joined = "\n".join(kept).replace("\\\n", " ")
        lines = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
        return cls(path, tuple((name.upper(), rest.strip()) for name, _, rest in lines))

    def all(self, name: str) -> list[str]:
        """The arguments of each instruction of that name."""
        return [rest for found, rest in self.instructions if found == name]

    @property
    def command(self) -> list[str]:
        """ENTRYPOINT and CMD together."""
        return [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(self.all(name)[-1])]

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets in the last stage."""
        stages = [i for i, (name, _) in enumerate(self.instructions) if name == "FROM"]
        last = [rest for name, rest in self.instructions[stages[-1] :] if name == "ENV"]
        pairs = (word.partition("=") for rest in last for word in shlex.split(rest))
        return {name: value for name, _, value in pairs}

    def copied(self) -> Iterator[str]:
        """What COPY takes from the build context."""
        for rest in self.all("COPY"):
            *sources, _ = (word for word in shlex.split(rest) if not re.match(r"--(chown|chmod)=", word))
            if not any(source.startswith("--from=") for source in sources):
                yield from (source.rstrip("/") for source in sources)
