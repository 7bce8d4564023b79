"""One table of the ways to the same workers: `python -m tests.bench.doors`.

Starts simulated workers, and calls them through Fissile's router, its HTTP facade, smg 1.13.0 and Dynamo 1.6.1 with its
OpenEngine sidecar. Measures what each door costs, and what its streams survive: kill -9 of each process, more requests
than places, a client that stops reading. Prints Markdown; progress goes to stderr. Takes five minutes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from tests.bench.doors import stacks
from tests.bench.doors.cost import cost_entries
from tests.bench.doors.faults import fault_entries, slow_reader_entries
from tests.bench.doors.report import markdown_of, result_of, text_of

_PACED_STREAMS = 32


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--streams", type=int, nargs="*", default=[1, 32, 256], help="in flight. Default: 1 32 256")
    made.add_argument("--only", nargs="+", choices=stacks.TITLES, default=list(stacks.TITLES), help="these doors")
    made.add_argument("--seconds", type=float, default=2.0, help="of each load. Default: 2")
    made.add_argument("--no-faults", action="store_true", help="measure costs alone")
    made.add_argument("--no-costs", action="store_true", help="try faults alone")
    made.add_argument("--json", type=Path, metavar="FILE", help="keep the result in FILE too")
    return made.parse_args()


def main() -> None:
    """Runs all parts, and prints the tables."""
    args = _options()
    absent = stacks.missing_doors(args.only)
    for name in absent:
        print(f"left out: {stacks.TITLES[name]}. `make test-peers` installs it.", file=sys.stderr)
    names = [name for name in args.only if name not in absent]
    measured = [name for name in stacks.MEASURED if name in names]
    entries: list[stacks.Entry] = []
    began = time.monotonic()
    with stacks.running_doors(measured, "instant") as running:
        if not args.no_costs:
            entries += cost_entries(running, "instant", args.streams, args.seconds)
        if not args.no_faults:
            entries += slow_reader_entries(running)
    if not args.no_costs:
        with stacks.running_doors(measured, "fixed:10ms") as running:
            entries += cost_entries(running, "10 ms", [_PACED_STREAMS], args.seconds)
    if not args.no_faults:
        entries += fault_entries([name for name in stacks.FAULTED if name in names])
    given = [each for each in sys.argv[1:] if each not in ("--json", str(args.json))]
    result = result_of(entries, shlex.join(["python", "-m", "tests.bench.doors", *given]))
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(markdown_of(result))
    if args.json is not None:
        args.json.write_text(text_of(result))


if __name__ == "__main__":
    main()
