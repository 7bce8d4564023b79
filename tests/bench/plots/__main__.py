"""Writes the tables and plots of docs/reference/performance.md: `python -m tests.bench.plots [--check]`.

`--check` writes no file, names the files that differ from the results, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys

from tests.bench.plots import page, results


def main() -> None:
    """Writes the files that differ, and prints their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file is out of date")
    options = parser.parse_args()
    made = page.files(results.load())
    stale = {path: text for path, text in made.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'out of date' if options.check else 'written'}: {path}")
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    sys.exit(bool(options.check and stale))


if __name__ == "__main__":
    main()
