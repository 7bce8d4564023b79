"""Fixtures: a stand-in for AITER's library, and an AiterBackend that uses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from kernels.aiter.backend import AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary
from tests.kernels.aiter.fake_aiter import lay
from tests.kernels.aiter.watched import TAGS, TUNED, Fallback, forget


@pytest.fixture(scope="module", params=TAGS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AiterLibrary]:
    folder = tmp_path_factory.mktemp("aiter")
    lay(folder, request.param)
    sys.path.insert(0, str(folder))
    forget()
    yield AiterLibrary.load(SINCE)
    sys.path.remove(str(folder))
    forget()


@pytest.fixture
def backend(library: AiterLibrary) -> AiterBackend:
    return AiterBackend(Fallback(), library, TUNED)
