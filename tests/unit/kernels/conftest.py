"""The back ends that run on this machine."""

from __future__ import annotations

import pytest

from kernels.interface import KernelBackend
from kernels.select import CPU_BACKENDS, select_backend


@pytest.fixture(scope="session", params=list(CPU_BACKENDS))
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    """Each back end; those that this machine can not run are skipped."""
    try:
        return select_backend(request.param)
    except ValueError as error:
        pytest.skip(str(error))
