"""Makes docs/reference/options.md, and the table of the Helm chart, from the table of options.

`python -m scripts.option_reference` writes both, `--check` compares them.

The table is `common/params/options`; rows of sampling come from the fields of `SamplingParams`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from common.params.options.bench import BENCHMARKS
from common.params.options.option import Option
from common.params.options.table import OPTIONS

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "options.md"
CHART_TABLE: Final = ROOT / "deploy" / "helm" / "fissile" / "files" / "options.json"
# Components of the chart and their commands.
_COMPONENTS: Final = {"router": "router", "worker": "worker", "facade": "http"}
_SERVICES: Final = frozenset({"serve", "worker", "router", "worker warmup"})
_HEAD: Final = """\
# Options

<!-- Made by `python -m scripts.option_reference`. -->

Each option can be given on the command line, by its environment variable, and, for `serve`, `worker` and `router`, in
the section of the command in the [--config file](../how-to/run-a-model.md#options) by its first name without dashes.
The command line overrides the variable, and the variable overrides the file.

`fissile COMMAND --help` shows the options of one command, `fissile config show COMMAND` their values in force. An
option of `serve` that a router or worker has too is passed on to it.
"""
_COLUMNS: Final = "| option, variable | default | commands | meaning |\n| --- | --- | --- | --- |\n"


def page(rows: Sequence[Option] = OPTIONS) -> str:
    """Returns the whole page."""
    services = [row for row in rows if _SERVICES.intersection(row.commands)]
    benchmarks = [row for row in rows if row not in services and set(row.commands) <= set(BENCHMARKS)]
    clients = [row for row in rows if row not in services and row not in benchmarks]
    return (
        _HEAD
        + _section("Router, workers and serve", services)
        + _section("Clients and operators", clients)
        + _section("Benchmarks", benchmarks)
    )


def chart_table(rows: Sequence[Option] = OPTIONS) -> str:
    """Returns the environment variables of the options of each component of the chart, as JSON."""
    table = {
        component: {row.name: row.variable for row in sorted(rows, key=lambda row: row.name) if command in row.commands}
        for component, command in _COMPONENTS.items()
    }
    return json.dumps(table, indent=2) + "\n"


def _section(title: str, rows: Iterable[Option]) -> str:
    return f"\n## {title}\n\n{_COLUMNS}" + "".join(map(_line, rows))


def _line(row: Option) -> str:
    names = ", ".join(f"`{_with_value(name, row)}`" for name in row.names.split())
    commands = ", ".join(row.commands) if len(row.commands) < _MANY else "all that call a router"
    default = f"`{row.default_text}`" if row.default_text else ""
    cells = (f"{names}<br>`{row.variable}`", default, commands, row.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


# Commands of an option that are not listed one by one.
_MANY: Final = 15


def _with_value(name: str, row: Option) -> str:
    """Appends the placeholder of the value, if there is one."""
    return name if row.metavar is None or row.is_flag or "/" in name else f"{name} {row.metavar}"


def main(arguments: Sequence[str]) -> int:
    """Writes the files, or compares them; returns 1 if one is stale."""
    stale = 0
    for place, wanted in ((PAGE, page()), (CHART_TABLE, chart_table())):
        if "--check" not in arguments:
            place.write_text(wanted, "utf-8")
        elif not place.exists() or wanted != place.read_text("utf-8"):
            print(f"{place.name} is stale: run python -m scripts.option_reference", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
