"""Adds a row to the options table before any module reads it, and prints as JSON where the option appears."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from common.params.options import engine
from common.params.options.option import Option

engine.ENGINE = (  # type: ignore[misc, assignment]
    *engine.ENGINE,
    Option(
        "--made-up", "FISSILE_MADE_UP", "Number of a test.", ("serve", "worker"), click.INT, 7,
        is_passed_on=True, field="made_up",
    ),
)  # fmt: skip


def main(folder: Path) -> None:
    """Prints the option's value by source, and the other places where it appears."""
    from common import config
    from common.params.options.table import library_default

    # The one other place that an engine option needs.
    made_up = ("made_up", int, dataclasses.field(default=library_default("made_up")))
    config.Config = dataclasses.make_dataclass(  # type: ignore[misc, assignment]
        "Config", [made_up], bases=(config.Config,), frozen=True
    )
    from common.cli.config import in_force
    from common.cli.serve.command import make_fleet, serve
    from scripts.option_reference import page
    from worker.cli.worker import worker
    from worker.cli.worker_options import worker_options

    (folder / "config.json").write_text("{}")
    file = folder / "fleet.yaml"
    file.write_text("worker: {made-up: 8}\n")
    plain = ("--model", str(folder))

    def value(*arguments: str) -> list[str]:
        rows = in_force(worker, "worker", (*plain, *arguments))
        return next(list(row[1:]) for row in rows if row[0] == "made-up")

    def config_of(*arguments: str) -> Any:
        params = worker.make_context("worker", [*plain, *arguments]).params
        return worker_options(**{name: each for name, each in params.items() if name != "log_level"}).config

    found = {
        "default": value(),
        "command line": value("--made-up", "9"),
        "file": value("--config", str(file)),
        "config": [config_of().made_up, config_of("--made-up", "9").made_up],
        "page": "| `--made-up`<br>`FISSILE_MADE_UP` | `7` | serve, worker | Number of a test. |" in page(),
    }
    os.environ["FISSILE_MADE_UP"] = "6"
    found["environment"] = value()
    del os.environ["FISSILE_MADE_UP"]
    served = serve.make_context("serve", ["--simulate", "instant", "--made-up", "9"]).params
    own = {"ask", "prompt", "once", "tls_cert", "tls_key", "tls_client_ca", "api_keys", "speculate"}
    fleet = make_fleet(protection={}, **{name: each for name, each in served.items() if name not in own})
    found["passed on"] = ["--made-up 9" in " ".join(child.arguments) for child in fleet.children()]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
