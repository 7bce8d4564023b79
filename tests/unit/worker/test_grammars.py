"""Kept grammars are bounded in bytes, and only sequences of the same cache salt find them."""

from __future__ import annotations

import gc

import pytest

from common.constraints import library
from common.limits import MAX_COMPILED_GRAMMARS, MAX_GRAMMARS_BYTES
from worker import grammars as module
from worker.grammars import Compiled, Grammars

HEADER = '%llguidance {"no_forcing": true}\n'


def grammar(number: int) -> str:
    return f'{HEADER}start: "{number}"\n'


def made() -> Grammars:
    return Grammars(library.byte_vocabulary({}, {256}))


def begun(grammars: Grammars, number: int, salt: bytes = b"") -> Compiled:
    compiled = grammars.begin(grammar(number), salt)
    assert not compiled.result().is_error()
    return compiled


def test_grammar_is_found_by_the_same_cache_salt_alone() -> None:
    grammars = made()
    own, other = begun(grammars, 1, b"alice"), begun(grammars, 1, b"bob")
    assert own is not other
    assert begun(grammars, 1, b"alice") is own
    grammars.forget(grammar(1), b"alice", own)
    assert begun(grammars, 1, b"bob") is other
    assert begun(grammars, 1, b"alice") is not own


def test_kept_grammars_are_bounded_in_bytes_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is charged as bytes. Unused grammars are dropped, the least recently used one first."""
    monkeypatch.setattr(module, "MAX_GRAMMARS_BYTES", 64 << 20)
    second = 1 / module._BYTES_PER_SECOND
    grammars = made()
    for number in range(200):
        assert grammars.worked(begun(grammars, number), (5 << 20) * second)
        assert grammars.num_bytes <= 64 << 20
    gc.collect()
    kept = [key[1] for key in grammars._kept]
    assert 6 <= len(kept) <= 12
    assert kept == [grammar(number) for number in range(200 - len(kept), 200)]
    monkeypatch.setattr(module, "MAX_GRAMMARS_BYTES", MAX_GRAMMARS_BYTES)
    for number in range(300, 300 + 2 * MAX_COMPILED_GRAMMARS):
        begun(grammars, number)
    assert len(grammars._kept) == MAX_COMPILED_GRAMMARS


def test_grammars_in_use_count_and_largest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS_BYTES", 64 << 20)
    second = 1 / module._BYTES_PER_SECOND
    grammars = made()
    small, large, largest = (begun(grammars, number) for number in range(3))
    assert grammars.worked(small, (1 << 20) * second)
    assert grammars.worked(large, (40 << 20) * second)
    # A grammar's bytes count while anything refers to it.
    assert not grammars.worked(largest, (40 << 20) * second)
    assert grammars.worked(small, second)
    del largest
    gc.collect()
    assert grammars.worked(large, second)
