"""The router's benchmarks for a quiet machine, one after another: `python -m tests.bench.router.all [--short]`.

About 8 minutes on 2 cores; `--short` takes a third of the time with less accuracy. Each benchmark also runs alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.e2e.service import REPOSITORY

# Module, its arguments, and the arguments of the short form.
_RUNS: tuple[tuple[str, list[str], list[str]], ...] = (
    ("hop", ["--seconds", "3"], ["--rounds", "1", "--seconds", "2"]),
    ("streams", [], ["--seconds", "2", "--streams", "256"]),
    ("peer", [], ["--rounds", "1", "--seconds", "3", "--streams", "256"]),
    ("loop_lag", [], ["--seconds", "5"]),
    ("delay", [], ["--seconds", "3"]),
)


def main() -> None:
    """Runs all; a failure ends it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--short", action="store_true")
    options.add_argument("--json", action="store_true", help="one line of JSON per benchmark")
    args = options.parse_args()
    for name, arguments, short in _RUNS:
        command = [sys.executable, "-m", f"tests.bench.router.{name}", *(short if args.short else arguments)]
        began = time.monotonic()
        if not args.json:
            print(f"\n## {name} (load {os.getloadavg()[0]:.1f} before it)", flush=True)
        subprocess.run([*command, *(["--json"] if args.json else [])], cwd=REPOSITORY, check=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
