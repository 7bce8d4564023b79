"""`python -m tests.chaos.aged_worker AGE_MS worker ...`: a worker whose connections end after a while, as behind many
balancers."""

from __future__ import annotations

import sys
from typing import Any

import common.rpc.server
from common.cli.group import run


def main() -> None:
    """Runs the command line that follows the age."""
    age_ms = int(sys.argv.pop(1))
    plain = common.rpc.server.server_options

    def aged(*arguments: Any, **named: Any) -> list[tuple[str, int]]:
        # With a grace, unlike the option of routers: it ends the Session too.
        age = [("grpc.max_connection_age_ms", age_ms), ("grpc.max_connection_age_grace_ms", age_ms // 4)]
        return [*plain(*arguments, **named), *age]

    common.rpc.server.server_options = aged
    sys.exit(run())


if __name__ == "__main__":
    main()
