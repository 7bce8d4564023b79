"""The machine's own limits, measured: `python -m tests.bench.peers.peak [--threads 2]`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.bench.peers.floors import Machine
from tests.bench.peers.folder import AbsentError

SOURCE = Path(__file__).with_name("peak.cpp")


def measure(threads: int) -> Machine:
    """Compiles peak.cpp for this processor and runs it: some seconds.

    Raises:
        AbsentError: there is no C++ compiler.
        subprocess.CalledProcessError: it does not compile here, or ended badly.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise AbsentError("no C++ compiler: install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "peak"))
        options = ["-O3", "-march=native", "-std=c++20", "-pthread"]
        subprocess.run([compiler, *options, str(SOURCE), "-o", program], check=True)
        answer = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    read, flops = answer.stdout.split()
    return Machine(float(read), float(flops))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    machine = measure(options.threads)
    print(f"{options.threads} threads: {machine.read / 1e9:.1f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
