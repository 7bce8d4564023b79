"""Groups of operations: every back end does all of each, none by the empty bodies that the interface has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from kernels.interface import KernelBackend
from tests.native import backend_or_skip

GROUPS = {
    name: kind for name, kind in get_type_hints(KernelBackend).items() if getattr(kind, "__name__", "").endswith("Ops")
}
BACKENDS = ("torch", "cpu")


def operations(group: type) -> list[str]:
    """Names of the operations that a group's protocol asks for."""
    return [name for name, found in vars(group).items() if inspect.isfunction(found) and not name.startswith("_")]


def missing(done: object, group: type) -> list[str]:
    """Operations of a group that are still the protocol's own."""
    return [name for name in operations(group) if getattr(type(done), name) is vars(group)[name]]


def groups_of(backend: Any) -> Iterator[tuple[object, type]]:
    for name, group in GROUPS.items():
        yield getattr(backend, name), group


def test_groups_have_operations() -> None:
    assert set(GROUPS) == {
        "linear",
        "elementwise",
        "experts",
        "kv_cache",
        "attention",
        "latent_attention",
        "sampling",
    }
    assert all(len(operations(group)) > 1 for group in GROUPS.values())


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_implement_every_operation(name: str) -> None:
    for done, group in groups_of(backend_or_skip(name)):
        assert group in type(done).__mro__
        assert not missing(done, group), type(done).__name__


def test_missing_operation_is_found() -> None:
    group = GROUPS["sampling"]
    left_out = type("Some", (group,), {name: lambda self: None for name in operations(group)[1:]})
    assert missing(left_out(), group) == operations(group)[:1]
