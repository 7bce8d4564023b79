"""Clients and peers of other projects that tests run, and the marker `client`, which names what a test tries with one.

`@pytest.mark.client("openai", "embeddings")` stands for one row of docs/reference/clients.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import Final

import pytest

MARKER: Final = "client"
# Client -> requirement of the environment of its own that it runs in (tests/peers/environment.py).
PINNED: Final = {
    "Dynamo": "ai-dynamo==1.6.1",
    "lm-eval": "lm-eval[api]==0.4.13",
    "openai 2": "openai==2.54.0",
    "smg": "smg==1.13.0",
    "tritonclient": "tritonclient[grpc]==2.73.0",
}
# Clients whose package is in the environment of the tests.
INSTALLED: Final = ("anthropic", "openai")


def version_of(client: str) -> str:
    """The version of a client that tests run.

    Raises:
        KeyError: the client is in neither table.
    """
    return metadata.version(client) if client in INSTALLED else PINNED[client].partition("==")[2]


def add_properties(items: Iterable[pytest.Item]) -> None:
    """Adds client, version and what is tried to the JUnit report of each marked test."""
    for item in items:
        for mark in item.iter_markers(MARKER):
            client, tried = mark.args
            item.user_properties.append((MARKER, f"{client}|{version_of(client)}|{tried}"))
