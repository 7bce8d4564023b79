"""A child process for the supervisor's tests: `python -m tests.unit.common.cli.serve.a_child WORDS...`; each word is an
action."""

from __future__ import annotations

import signal
import subprocess
import sys
import time


def do(word: str, value: str) -> None:
    match word:
        case "say":
            print(value, flush=True)
        case "exit":
            sys.exit(int(value))
        case "sleep":
            time.sleep(float(value))
        case "long":
            sys.stdout.write("x" * int(value) + "\n")
            sys.stdout.flush()
        case "hold-pipe":
            held = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({value})"])
            print(held.pid, flush=True)
        case "ignore-term":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "exit-on-term":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(value)))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        do(*argument.split("=", 1))
